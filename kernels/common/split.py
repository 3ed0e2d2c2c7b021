"""The two planes of ``fp32_split`` (see ``replayinfer.formats``), and the other storage types."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.config import interpreting

__all__ = [
    "encode",
    "join_planes",
    "load_pairs",
    "load_state",
    "round_to",
    "split_planes",
    "store_pairs",
    "store_state",
    "unpack_pairs",
]


@triton.jit
def split_planes(x):
    """float32 to (high, low) int16 patterns, for results of arithmetic: their NaN is a quiet one.

    Its pattern may be all ones, which rounding would turn into a zero; so the patterns of either
    sign are capped at the plain quiet NaN: two instructions, where a test costs four.
    """
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000)
    bits = tl.minimum(bits.to(tl.uint32, bitcast=True), tl.full([], 0xFFC00000, tl.uint32))
    bits = bits.to(tl.int32, bitcast=True)
    high = ((bits + 0x8000) >> 16).to(tl.int16)
    low = bits.to(tl.int16)
    return high, low


@triton.jit
def join_planes(high, low):
    """(high, low) int16 patterns to the float32 they came from, bit for bit."""
    # The low plane is the signed remainder of rounding to the high one: sign extension undoes it.
    bits = (high.to(tl.int32) << 16) + low.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


# The interpreter truncates to bf16, where the hardware rounds.
_BY_BITS = tl.constexpr(interpreting())


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round float32 to nearest, ties to even."""
    if _BY_BITS and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, (bits >> 16) | 0x40, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def encode(x, DTYPE: tl.constexpr):
    """Round a float32 state to a single-plane storage type; fp16 saturates finite values."""
    if tl.float16 == DTYPE:
        finite = tl.abs(x) < float("inf")
        x = tl.where(finite, tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)
    return round_to(x, DTYPE)


@triton.jit
def load_state(plane_ptr, low_ptr, at, mask):
    """A tile of a state as float32; `low_ptr` is None where one plane holds all of it."""
    plane = tl.load(plane_ptr + at, mask=mask, other=0)
    if low_ptr is not None:
        return join_planes(plane, tl.load(low_ptr + at, mask=mask, other=0))
    else:
        return plane.to(tl.float32)


@triton.jit
def store_state(plane_ptr, low_ptr, at, state, mask):
    """The inverse of `load_state`."""
    if low_ptr is not None:
        high, low = split_planes(state)
        tl.store(plane_ptr + at, high, mask=mask)
        tl.store(low_ptr + at, low, mask=mask)
    else:
        tl.store(plane_ptr + at, encode(state, plane_ptr.dtype.element_ty), mask=mask)


@triton.jit
def unpack_pairs(word):
    """Two neighbouring bf16 in an int32, the first in the low half, as float32: a shift, a mask."""
    first = (word << 16).to(tl.float32, bitcast=True)
    second = (word & -65536).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def load_pairs(ptr, at, mask, ONCE: tl.constexpr):
    """Elements ``2 at`` and ``2 at + 1`` as float32, zeros where not `mask`.

    ONCE: nobody else reads them in this step, so they are first to leave L2.
    """
    EVICTION: tl.constexpr = "evict_first" if ONCE else ""
    if ptr.dtype.element_ty == tl.bfloat16:
        words = ptr.to(tl.pointer_type(tl.int32)) + at
        word = tl.load(words, mask=mask, other=0, eviction_policy=EVICTION)
        first, second = unpack_pairs(word)
    else:
        first = tl.load(ptr + 2 * at, mask=mask, other=0.0, eviction_policy=EVICTION)
        second = tl.load(ptr + 2 * at + 1, mask=mask, other=0.0, eviction_policy=EVICTION)
        first, second = first.to(tl.float32), second.to(tl.float32)
    return first, second


@triton.jit
def store_pairs(ptr, at, first, second, mask):
    """The inverse of `load_pairs`, for values that the element type holds exactly."""
    if ptr.dtype.element_ty == tl.bfloat16:
        low = first.to(tl.int32, bitcast=True) >> 16
        word = (low & 0xFFFF) | (second.to(tl.int32, bitcast=True) & -65536)
        tl.store(ptr.to(tl.pointer_type(tl.int32)) + at, word, mask=mask)
    else:
        tl.store(ptr + 2 * at, first.to(ptr.dtype.element_ty), mask=mask)
        tl.store(ptr + 2 * at + 1, second.to(ptr.dtype.element_ty), mask=mask)
