"""Mamba-2 over short windows without replay, on a caller's own states: token after token.

::

    S = exp(A dt) S + dt x B^T        y = S C + D x        optionally  y *= silu(z)

in float32. A program holds a block of one head's state rows and walks the tokens of one sequence;
state rows do not depend on each other. It reads the slot that `source` names, and writes, as asked,
the last state to `target`, or each token's state to its own `target`, or to `each`.

A sequence whose source is the pad, or no slot at all, starts from zeros and writes outputs only. A
target that is the pad, or no slot, is skipped. A state of integers has a scale for each of its
rows, which is set anew with every write.

Slots may be updated in place as long as no sequence writes what another one reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu, softplus
from ..common.split import encode, round_to

__all__ = ["LARGEST", "store_rows", "walk"]

LARGEST = {torch.int8: 127, torch.int16: 32767}


@triton.jit
def _nearest(x):
    """Round to whole numbers, ties to even, for ``|x| < 2^22``."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_rows(ptr, scale_ptr, at, row, state, mask, in_d, LARGEST: tl.constexpr):
    """A block of state rows, and their scales where the state is of integers up to LARGEST."""
    if scale_ptr is not None:
        size = tl.max(tl.abs(state), axis=1)
        up = tl.where(size == 0.0, 1.0, LARGEST / size)
        whole = _nearest(state * up[:, None])
        whole = tl.minimum(tl.maximum(whole, -LARGEST), LARGEST)
        tl.store(ptr + at, whole.to(ptr.dtype.element_ty), mask=mask)
        tl.store(scale_ptr + row, 1.0 / up, mask=in_d)
    else:
        tl.store(ptr + at, encode(state, ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["heads", "heads_per_group", "window", "columns", "slots", "entries", "pad"]
)
def _walk_kernel(
    y_ptr, state_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, a_ptr, d_skip_ptr, dt_bias_ptr,
    scale_ptr, each_ptr, each_scale_ptr,
    starts_ptr, source_ptr, accepted_ptr, target_ptr, entry_ptr,
    stride_y_b, stride_y_t, stride_y_h, stride_state_slot, stride_state_h,
    stride_x_b, stride_x_t, stride_x_h, stride_dt_b, stride_dt_t, stride_dt_h,
    stride_b_b, stride_b_t, stride_b_g, stride_c_b, stride_c_t, stride_c_g,
    stride_z_b, stride_z_t, stride_z_h, stride_scale_slot,
    stride_each_entry, stride_each_t, stride_each_scale_entry,
    stride_source_b, stride_source_t, stride_target_b, stride_target_t,
    heads, heads_per_group, window, columns, slots, entries, pad,
    DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, WRITE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = (pid // BLOCKS % heads).to(tl.int64)  # a head's states may lie far apart
    b = (pid // BLOCKS // heads).to(tl.int64)
    group = h // heads_per_group
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    in_d, in_n = d < DIM, n < STATE
    in_tile = in_d[:, None] & in_n[None, :]
    rate = tl.load(a_ptr + h).to(tl.float32)
    skip, dt_bias = 0.0, 0.0
    if d_skip_ptr is not None:
        skip = tl.load(d_skip_ptr + h).to(tl.float32)
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + h).to(tl.float32)

    first = b * 0
    tokens = window
    if starts_ptr is not None:
        first = tl.load(starts_ptr + b).to(tl.int64)
        end = tl.load(starts_ptr + b + 1).to(tl.int64)
        tokens = tl.minimum(end - first, window).to(tl.int32)
    slot = b
    if source_ptr is not None:
        column = b * 0
        if accepted_ptr is not None:
            column = tl.maximum(tl.load(accepted_ptr + b).to(tl.int64) - 1, 0)
            column = tl.minimum(column, columns - 1)
        at = b * stride_source_b + column * stride_source_t
        slot = tl.load(source_ptr + at).to(tl.int64)
    live = (slot != pad) & (slot >= 0) & (slot < slots)
    slot = tl.where(live, slot, 0)

    in_head = d[:, None] * STATE + n[None, :]
    at = slot * stride_state_slot + h * stride_state_h + in_head
    state = tl.load(state_ptr + at, mask=in_tile & live, other=0).to(tl.float32)
    if scale_ptr is not None:
        row = slot * stride_scale_slot + h * DIM + d
        state *= tl.load(scale_ptr + row, mask=in_d & live, other=0.0)[:, None]
    entry = slot
    if entry_ptr is not None:
        entry = tl.load(entry_ptr + b).to(tl.int64)
    kept = live & (entry >= 0) & (entry < entries)
    entry = tl.where(kept, entry, 0)

    y_ptr += b * stride_y_b + first * stride_y_t + h * stride_y_h + d
    x_ptr += b * stride_x_b + first * stride_x_t + h * stride_x_h + d
    dt_ptr += b * stride_dt_b + first * stride_dt_t + h * stride_dt_h
    b_ptr += b * stride_b_b + first * stride_b_t + group * stride_b_g + n
    c_ptr += b * stride_c_b + first * stride_c_t + group * stride_c_g + n
    if z_ptr is not None:
        z_ptr += b * stride_z_b + first * stride_z_t + h * stride_z_h + d
    t = tokens * 0
    while t < tokens:
        x = tl.load(x_ptr + t * stride_x_t, mask=in_d, other=0.0).to(tl.float32)
        new_b = tl.load(b_ptr + t * stride_b_t, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * stride_c_t, mask=in_n, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * stride_dt_t).to(tl.float32) + dt_bias
        if SOFTPLUS:
            dt = softplus(dt)
        state = tl.exp(rate * dt) * state + (dt * x)[:, None] * new_b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + skip * x
        if z_ptr is not None:
            z = tl.load(z_ptr + t * stride_z_t, mask=in_d, other=0.0)
            y *= silu(z.to(tl.float32))
        tl.store(y_ptr + t * stride_y_t, round_to(y, y_ptr.dtype.element_ty), mask=in_d)
        if each_ptr is not None:
            at = (
                entry * stride_each_entry
                + t.to(tl.int64) * stride_each_t
                + h * (DIM * STATE)
                + in_head
            )
            row = entry * stride_each_scale_entry + (t * heads + h) * DIM + d
            store_rows(
                each_ptr, each_scale_ptr, at, row, state, in_tile & kept, in_d & kept, LARGEST
            )
        if WRITE == "each":
            target = tl.load(target_ptr + b * stride_target_b + t * stride_target_t).to(tl.int64)
            there = live & (target != pad) & (target >= 0) & (target < slots)
            target = tl.where(there, target, 0)
            at = target * stride_state_slot + h * stride_state_h + in_head
            row = target * stride_scale_slot + h * DIM + d
            store_rows(state_ptr, scale_ptr, at, row, state, in_tile & there, in_d & there, LARGEST)
        t += 1
    if WRITE == "last":
        target = slot
        if target_ptr is not None:
            target = tl.load(target_ptr + b * stride_target_b).to(tl.int64)
        there = live & (tokens > 0) & (target != pad) & (target >= 0) & (target < slots)
        target = tl.where(there, target, 0)
        at = target * stride_state_slot + h * stride_state_h + in_head
        row = target * stride_scale_slot + h * DIM + d
        store_rows(state_ptr, scale_ptr, at, row, state, in_tile & there, in_d & there, LARGEST)


def walk(
    y: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    a: torch.Tensor,
    d_skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    batch: int,
    window: int,
    starts: torch.Tensor | None,
    source: torch.Tensor | None,
    accepted: torch.Tensor | None,
    target: torch.Tensor | None,
    each: torch.Tensor | None,
    entry: torch.Tensor | None,
    scale: torch.Tensor | None,
    each_scale: torch.Tensor | None,
    write: str,
    pad: int,
    dt_softplus: bool,
) -> None:
    """Launch over ``[batch, window, heads, dim]`` inputs, or packed ``[tokens, heads, dim]`` ones.

    Packed inputs come with `starts` ``[batch + 1]``. `source` and `target` are ``[batch,
    columns]``; `write` is ``"none"``, ``"last"`` or ``"each"``. A head's ``dim * state`` values are
    contiguous.
    """
    heads, dim, size = state.shape[1:]
    packed = starts is not None
    if batch == 0 or x.shape[0] == 0 or window == 0:
        return

    def strides(tensor: torch.Tensor | None) -> tuple[int, int, int]:
        if tensor is None:
            return 0, 0, 0
        s = tensor.stride()
        return (0, s[0], s[1]) if packed else (s[0], s[1], s[2])

    def pair(index: torch.Tensor | None) -> tuple[int, int]:
        return (0, 0) if index is None else (index.stride(0), index.stride(1))

    block_r = min(16, triton.next_power_of_2(dim))
    _walk_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, state, x, dt, b, c, z, a, d_skip, dt_bias,
        scale, each, each_scale,
        starts, source, accepted, target, entry,
        *strides(y), state.stride(0), state.stride(1),
        *strides(x), *strides(dt), *strides(b), *strides(c), *strides(z),
        0 if scale is None else scale.stride(0),
        0 if each is None else each.stride(0), 0 if each is None else each.stride(1),
        0 if each_scale is None else each_scale.stride(0),
        *pair(source), *pair(target),
        heads, heads // b.shape[-2], window, 1 if source is None else source.shape[1],
        state.shape[0], 0 if each is None else each.shape[0], pad,
        DIM=dim, STATE=size, BLOCK_R=block_r, BLOCK_N=triton.next_power_of_2(size),
        SOFTPLUS=dt_softplus, WRITE=write,
        LARGEST=LARGEST.get(state.dtype, 0),
        num_warps=4,
    )  # fmt: skip
