"""Causal depthwise convolution of one token, over windows that an engine keeps and shifts itself.

::

    y = activation(bias + sum_i weight_i s_i + weight_{width - 1} x)        s' = (s_1, ..., x)

``s`` is the last ``width - 1`` inputs of a channel, oldest first and beside each other in memory,
as SGLang, vLLM and FlashInfer keep them. For kernels that go on with ``y``: loads and arithmetic
are apart, so that a program can have those of all its channels in flight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.gates import silu
from ..common.split import round_to, store_pairs, unpack_pairs

__all__ = ["ShiftedWindows", "convolve_shifted", "load_shifted"]


class ShiftedWindows(NamedTuple):
    """One layer's convolution of ``x [batch, channels]``, or ``[batch, key_heads, its channels]``.

    Its windows are ``states [slots, channels, width - 1]``, of each row that of ``slot [batch]``,
    and lie beside each other, as do the weights ``[channels, width]``. ``z [batch, key_heads, ..]``
    is copied to ``z_out`` of the same number of values, which is contiguous.
    """

    x: torch.Tensor
    states: torch.Tensor
    slot: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    z: torch.Tensor | None = None
    z_out: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether all of it is bf16 of width 4, at addresses that hold whole words."""
        words = (self.x, self.states, self.weight)
        return (
            self.weight.shape[1] == 4
            and all(t.dtype == torch.bfloat16 and t.data_ptr() % 8 == 0 for t in words)
            and all(stride % 2 == 0 for stride in self.x.stride()[:-1])
            and self.states.stride(0) % 2 == 0
        )


@triton.jit
def load_shifted(
    x_ptr, state_ptr, weight_ptr, bias_ptr, pair, mask,
    WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What the channels ``2 pair`` and ``2 pair + 1`` need.

    PACKED: bf16 and width 4, whose three inputs of two channels are three words, and whose four
    weights are one of twice the length.
    """
    bias = (0.0, 0.0)
    if bias_ptr is not None:
        even = tl.load(bias_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        bias = (even, tl.load(bias_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32))
    inputs, weights = (), ()
    if PACKED:
        words = state_ptr.to(tl.pointer_type(tl.int32)) + 3 * pair
        for i in tl.static_range(3):
            inputs += (tl.load(words + i, mask=mask, other=0, eviction_policy="evict_first"),)
        inputs += (tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pair, mask=mask, other=0),)
        for c in tl.static_range(2):
            four = weight_ptr.to(tl.pointer_type(tl.int64)) + 2 * pair + c
            weights += (tl.load(four, mask=mask, other=0),)
    else:
        for c in tl.static_range(2):
            channel = 2 * pair + c
            for i in tl.static_range(WIDTH - 1):
                inputs += (tl.load(state_ptr + channel * (WIDTH - 1) + i, mask=mask, other=0.0),)
            inputs += (tl.load(x_ptr + channel, mask=mask, other=0.0),)
            for i in tl.static_range(WIDTH):
                weights += (tl.load(weight_ptr + channel * WIDTH + i, mask=mask, other=0.0),)
    return inputs, weights, bias


@triton.jit
def _four(word):
    """Four neighbouring bf16 in an int64, the first in its lowest part, as float32."""
    return unpack_pairs(word.to(tl.int32)) + unpack_pairs((word >> 32).to(tl.int32))


@triton.jit
def convolve_shifted(
    y_ptr, state_ptr, inputs, weights, bias, pair, mask,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Store ``y``, rounded to its type, and the shifted windows; see `load_shifted`."""
    if PACKED:
        first, second, third, new = inputs
        words = state_ptr.to(tl.pointer_type(tl.int32)) + 3 * pair
        shifted = ((first >> 16) & 0xFFFF) | (second << 16)
        tl.store(words, shifted, mask=mask, eviction_policy="evict_first")
        shifted = (new & 0xFFFF) | (third << 16)
        tl.store(words + 1, shifted, mask=mask, eviction_policy="evict_first")
        shifted = ((third >> 16) & 0xFFFF) | (new & -65536)
        tl.store(words + 2, shifted, mask=mask, eviction_policy="evict_first")
        x0, x1 = unpack_pairs(first)
        x2, z0 = unpack_pairs(second)
        z1, z2 = unpack_pairs(third)
        x3, z3 = unpack_pairs(new)
        w0, w1, w2, w3 = _four(weights[0])
        even = bias[0] + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        w0, w1, w2, w3 = _four(weights[1])
        odd = bias[1] + w0 * z0 + w1 * z1 + w2 * z2 + w3 * z3
    else:
        even, odd = bias
        for i in tl.static_range(WIDTH):
            even += weights[i].to(tl.float32) * inputs[i].to(tl.float32)
            odd += weights[WIDTH + i].to(tl.float32) * inputs[WIDTH + i].to(tl.float32)
        for c in tl.static_range(2):
            for i in tl.static_range(WIDTH - 1):
                at = state_ptr + (2 * pair + c) * (WIDTH - 1) + i
                tl.store(at, inputs[c * WIDTH + i + 1].to(state_ptr.dtype.element_ty), mask=mask)
    if SILU:
        even, odd = silu(even), silu(odd)
    even = round_to(even, y_ptr.dtype.element_ty).to(tl.float32)
    odd = round_to(odd, y_ptr.dtype.element_ty).to(tl.float32)
    store_pairs(y_ptr, pair, even, odd, mask)
