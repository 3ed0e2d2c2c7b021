"""Mamba-2 by replay on a caller's own rings of rows: one launch for a window, folding where needed.

::

    y_t = exp(A d(0,t)) S0 C_t + sum_{j <= t} dt_j exp(A d(j,t)) (B_j . C_t) x_j + D x_t
    fold:  S0 = exp(A d(0,h)) S0 + sum_{j <= h} dt_j exp(A d(j,h)) x_j B_j^T

over the ``h`` rows of a ring that follow the state and the tokens of the window, with ``d(j, t)``
the sum of ``dt`` over ``(j, t]``. A slot has a state and a ring of `length` rows ``x``, ``B`` and
``dt``; the host says where its oldest live row is (`start`) and how many there are (`history`). The
window's rows are appended behind them. Where history and window together exceed ``length - window``
rows, the history is also folded into the state, in place; the host then moves `start` on. Nothing
else of a slot is written, so that a rejected token is only ever overwritten.

A state of integers has a scale for each of its rows, which a fold sets anew.

A program is a block of one head's state rows in one sequence. Every product is accurate to float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.dot import add_terms
from ..common.gates import silu, softplus
from ..common.split import round_to
from ..delta.operands import operand_terms
from ..launch.config import interpreting
from .walk import LARGEST, store_rows

__all__ = ["ring"]


@triton.jit
def _product(a, b, INTERPRET: tl.constexpr):
    """``a @ b`` with the accuracy of float32."""
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    return add_terms(total, operand_terms(a, INTERPRET), operand_terms(b, INTERPRET))


@triton.jit(
    do_not_specialize=["heads", "heads_per_group", "window", "capacity", "slots", "length", "pad"]
)
def _ring_kernel(
    y_ptr, state_ptr, row_x_ptr, row_b_ptr, row_dt_ptr, start_ptr, history_ptr,
    x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, a_ptr, d_skip_ptr, dt_bias_ptr,
    slot_ptr, starts_ptr, scale_ptr,
    stride_y_b, stride_y_t, stride_y_h, stride_state_slot, stride_state_h,
    stride_row_x_slot, stride_row_x_h, stride_row_x_row,
    stride_row_b_slot, stride_row_b_g, stride_row_b_row, stride_row_dt_slot, stride_row_dt_h,
    stride_start, stride_history, stride_scale_slot,
    stride_x_b, stride_x_t, stride_x_h, stride_dt_b, stride_dt_t, stride_dt_h,
    stride_b_b, stride_b_t, stride_b_g, stride_c_b, stride_c_t, stride_c_g,
    stride_z_b, stride_z_t, stride_z_h,
    heads, heads_per_group, window, capacity, slots, length, pad,
    DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
    SOFTPLUS: tl.constexpr, LARGEST: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = (pid // BLOCKS % heads).to(tl.int64)  # a head's states may lie far apart
    b = (pid // BLOCKS // heads).to(tl.int64)
    group = h // heads_per_group
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    in_d, in_n = d < DIM, n < STATE
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
    if tokens <= 0:
        return
    in_t = t < tokens
    y_ptr += b * stride_y_b + first * stride_y_t + h * stride_y_h
    y_ptrs = y_ptr + t[:, None] * stride_y_t + d[None, :]
    slot = b
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + b).to(tl.int64)
    if (slot == pad) | (slot < 0) | (slot >= slots):  # zeros, and no other write
        zeros = tl.zeros([BLOCK_T, BLOCK_R], y_ptr.dtype.element_ty)
        tl.store(y_ptrs, zeros, mask=in_t[:, None] & in_d[None, :])
        return
    start = tl.load(start_ptr + slot * stride_start)
    start = (start % length + length) % length
    history = tl.load(history_ptr + slot * stride_history)
    history = tl.minimum(tl.maximum(history, 0), capacity)
    live = j < history
    at_row = ((start + j) % length).to(tl.int64)

    # Everything is loaded before anything is stored.
    at_state = slot * stride_state_slot + h * stride_state_h + d[:, None] * STATE + n[None, :]
    in_tile = in_d[:, None] & in_n[None, :]
    state = tl.load(state_ptr + at_state, mask=in_tile, other=0)
    at_scale = slot * stride_scale_slot + h * DIM + d
    if scale_ptr is not None:
        rows = tl.load(scale_ptr + at_scale, mask=in_d, other=0.0)
        state = state.to(tl.float32) * rows[:, None]
    row_x_ptr += slot * stride_row_x_slot + h * stride_row_x_h
    row_b_ptr += slot * stride_row_b_slot + group * stride_row_b_g
    row_dt_ptr += slot * stride_row_dt_slot + h * stride_row_dt_h
    old_x = tl.load(
        row_x_ptr + at_row[:, None] * stride_row_x_row + d[None, :],
        mask=live[:, None] & in_d[None, :], other=0.0,
    )  # fmt: skip
    old_b = tl.load(
        row_b_ptr + at_row[:, None] * stride_row_b_row + n[None, :],
        mask=live[:, None] & in_n[None, :], other=0.0,
    )  # fmt: skip
    old_dt = tl.load(row_dt_ptr + at_row, mask=live, other=0.0)
    x_ptr += b * stride_x_b + first * stride_x_t + h * stride_x_h
    b_ptr += b * stride_b_b + first * stride_b_t + group * stride_b_g
    c_ptr += b * stride_c_b + first * stride_c_t + group * stride_c_g
    dt_ptr += b * stride_dt_b + first * stride_dt_t + h * stride_dt_h
    in_tn, in_td = in_t[:, None] & in_n[None, :], in_t[:, None] & in_d[None, :]
    x = tl.load(x_ptr + t[:, None] * stride_x_t + d[None, :], mask=in_td, other=0.0)
    new_b = tl.load(b_ptr + t[:, None] * stride_b_t + n[None, :], mask=in_tn, other=0.0)
    c = tl.load(c_ptr + t[:, None] * stride_c_t + n[None, :], mask=in_tn, other=0.0)
    dt = tl.load(dt_ptr + t * stride_dt_t, mask=in_t, other=0.0).to(tl.float32) + dt_bias
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.where(in_t, dt, 0.0)

    # Sums over the rows behind a row, each by itself: never a difference of two longer sums.
    behind = tl.arange(0, BLOCK_J)[None, :] > j[:, None]
    after = tl.sum(tl.where(behind, old_dt[None, :], 0.0), axis=1)
    whole = tl.sum(old_dt, axis=0)
    since = tl.sum(tl.where(t[None, :] <= t[:, None], dt[None, :], 0.0), axis=1)
    between = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)  # over (s, t]
    i = tokens * 0
    while i < tokens:
        one = tl.sum(tl.where(t == i, dt, 0.0), axis=0)
        between += tl.where((t[None, :] < i) & (t[:, None] >= i), one, 0.0)
        i += 1

    reach = tl.exp(rate * (after[None, :] + since[:, None])) * old_dt[None, :]
    reach = tl.where(live[None, :], reach, 0.0)
    reach *= _product(c, tl.trans(old_b), INTERPRET)
    y = tl.exp(rate * (whole + since))[:, None] * _product(c, tl.trans(state), INTERPRET)
    y += _product(reach, old_x, INTERPRET)
    inside = tl.exp(rate * between) * dt[None, :] * _product(c, tl.trans(new_b), INTERPRET)
    inside = tl.where(t[None, :] <= t[:, None], inside, 0.0)
    wide = x.to(tl.float32)
    y += _product(inside, x, INTERPRET) + skip * wide
    if z_ptr is not None:
        z_ptr += b * stride_z_b + first * stride_z_t + h * stride_z_h
        z = tl.load(z_ptr + t[:, None] * stride_z_t + d[None, :], mask=in_td, other=0.0)
        y *= silu(z.to(tl.float32))
    tl.store(y_ptrs, round_to(y, y_ptr.dtype.element_ty), mask=in_td)

    if history + tokens > capacity:
        weight = tl.exp(rate * after) * old_dt
        weighted = tl.where(live, weight, 0.0)[:, None] * old_x.to(tl.float32)
        total = rate * whole
        decay = tl.where(total > 0.0, tl.exp(total), exact_decay(total))  # for fold after fold
        folded = decay * state.to(tl.float32)
        folded += _product(tl.trans(weighted), old_b, INTERPRET)
        tl.debug_barrier()  # every thread has what it loaded of the state
        store_rows(state_ptr, scale_ptr, at_state, at_scale, folded, in_tile, in_d, LARGEST)

    # Behind the history, which no program reads.
    to_row = ((start + history + t) % length).to(tl.int64)
    tl.store(row_x_ptr + to_row[:, None] * stride_row_x_row + d[None, :], x, mask=in_td)
    if block == 0:
        tl.store(row_dt_ptr + to_row, dt, mask=in_t)
        if h % heads_per_group == 0:
            tl.store(row_b_ptr + to_row[:, None] * stride_row_b_row + n[None, :], new_b, mask=in_tn)


def ring(
    y: torch.Tensor,
    state: torch.Tensor,
    row_x: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    start: torch.Tensor,
    history: torch.Tensor,
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
    slot: torch.Tensor | None,
    starts: torch.Tensor | None,
    scale: torch.Tensor | None,
    pad: int,
    dt_softplus: bool,
) -> None:
    """Launch over ``[batch, window, heads, dim]`` inputs, or packed ``[tokens, heads, dim]`` ones.

    Packed inputs come with `starts` ``[batch + 1]``. Rings are ``[slots, heads, length, dim]``,
    ``[slots, groups, length, state]`` and ``[slots, heads, length]``. A head's ``dim * state``
    values are contiguous; `scale` ``[slots, heads, dim]`` is for a state of integers.
    """
    heads, dim, size = state.shape[1:]
    length, packed = row_x.shape[2], starts is not None
    if batch == 0 or x.shape[0] == 0 or window == 0:
        return

    def strides(tensor: torch.Tensor | None) -> tuple[int, int, int]:
        if tensor is None:
            return 0, 0, 0
        s = tensor.stride()
        return (0, s[0], s[1]) if packed else (s[0], s[1], s[2])

    capacity = length - window
    block_t = max(16, triton.next_power_of_2(window))
    block_j = max(16, triton.next_power_of_2(capacity))
    # As many rows of the state as its terms and the weights of all pairs leave registers for; more
    # than 16 tokens, or rows, spill some.
    small = (
        state.dtype in (torch.bfloat16, torch.float16)
        and x.dtype is torch.bfloat16
        and block_j == 16
    )
    long = block_t * block_j > 512
    most = 16 if long else 64 if small else 32
    block_r = next((r for r in (64, 32) if r <= most and dim % r == 0), 16)
    _ring_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, state, row_x, row_b, row_dt, start, history,
        x, dt, b, c, z, a, d_skip, dt_bias,
        slot, starts, scale,
        *strides(y), state.stride(0), state.stride(1),
        *row_x.stride()[:3], *row_b.stride()[:3], *row_dt.stride()[:2],
        start.stride(0), history.stride(0), 0 if scale is None else scale.stride(0),
        *strides(x), *strides(dt), *strides(b), *strides(c), *strides(z),
        heads, heads // b.shape[-2], window, capacity, state.shape[0], length, pad,
        DIM=dim, STATE=size, BLOCK_R=block_r, BLOCK_N=max(16, triton.next_power_of_2(size)),
        BLOCK_T=block_t, BLOCK_J=block_j,
        SOFTPLUS=dt_softplus, LARGEST=LARGEST.get(state.dtype, 0), INTERPRET=interpreting(),
        num_warps=8 if long or size > 128 else 4,
    )  # fmt: skip
