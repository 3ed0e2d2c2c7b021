"""Mamba-2 decode prepass: all of a token's output that comes from rows, and the append.

::

    replay = sum_j dt_j exp(A d(j,t)) (B_j . C) x_j + (dt (B . C) + D) x      decay = exp(A d(0,t))

with ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``. Reads the rows; writes
``replay [batch, heads, dim]`` and ``decay [batch, heads]`` for the readout, and the token's row.

A program takes a block of heads of one group, and walks the history backwards, so that the sums of
``dt`` after a row are at hand when the row is read: a reverse scan, never a difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import softplus
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..launch.config import LaunchConfig

__all__ = ["prepass"]


@triton.jit
def _prepass_kernel(
    replay_ptr, decay_ptr, x_ptr, dt_ptr, b_ptr, c_ptr,
    a_ptr, d_skip_ptr, dt_bias_ptr,
    row_x_ptr, row_b_ptr, row_dt_ptr,
    history_ptr, window_ptr, table_ptr,
    stride_x_b, stride_x_h, stride_dt_b, stride_b_b, stride_b_g, stride_c_b, stride_c_g,
    stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_page, stride_row_dt_row,
    stride_table_b, dt_min, dt_max,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    PAGE_ROWS: tl.constexpr, SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    group = pid // BLOCKS % GROUPS
    b = (pid // BLOCKS // GROUPS).to(tl.int64)
    local = block * BLOCK_H + tl.arange(0, BLOCK_H)
    h = group * HEADS + local
    d, n, j = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J)
    in_h, in_d, in_n = local < HEADS, d < DIM, n < STATE
    in_hd = in_h[:, None] & in_d[None, :]
    rate = tl.load(a_ptr + h, mask=in_h, other=0.0)
    skip = tl.load(d_skip_ptr + h, mask=in_h, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + h, mask=in_h, other=0.0)
    if PDL:
        launch_dependents()
        wait_for_previous()  # whatever made the inputs

    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    c = tl.load(c_ptr + b * stride_c_b + group * stride_c_g + n, mask=in_n, other=0.0)
    new_b = tl.load(b_ptr + b * stride_b_b + group * stride_b_g + n, mask=in_n, other=0.0)
    dt = tl.load(dt_ptr + b * stride_dt_b + h, mask=in_h, other=0.0).to(tl.float32) + dt_bias
    at_x = h[:, None] * stride_x_h + d[None, :]
    new_x = tl.load(x_ptr + b * stride_x_b + at_x, mask=in_hd, other=0.0)
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    c = c.to(tl.float32)
    new_seen = tl.sum(new_b.to(tl.float32) * c, axis=0)
    replay = (dt * new_seen + skip)[:, None] * new_x.to(tl.float32)

    table_ptr += b * stride_table_b
    row_b_ptr += group * stride_row_b_g
    at_x = h[:, None] * stride_row_x_h + d[None, :]
    after = tl.zeros([BLOCK_H], tl.float32)  # d(last row of this block, t)
    total = dt
    upper = (j[:, None] >= j[None, :])[:, :, None]
    start = tl.where(history > 0, (history - 1) // BLOCK_J * BLOCK_J, -1)
    while start >= 0:
        row = start + j
        live, more = row < history, row + 1 < history
        at = row_offset(table_ptr, row, live, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
        x = tl.load(
            row_x_ptr + at[None, :, None] + at_x[:, None, :],
            mask=live[None, :, None] & in_hd[:, None, :], other=0.0,
        )  # fmt: skip
        at = row_offset(table_ptr, row, live, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
        rows_b = tl.load(
            row_b_ptr + at[:, None] + n[None, :], mask=live[:, None] & in_n[None, :], other=0.0
        )
        at = row_offset(table_ptr, row, live, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
        own = tl.load(
            row_dt_ptr + at[:, None] + h[None, :], mask=live[:, None] & in_h[None, :], other=0.0
        )
        at = row_offset(table_ptr, row + 1, more, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
        following = tl.load(
            row_dt_ptr + at[:, None] + h[None, :], mask=more[:, None] & in_h[None, :], other=0.0
        )
        following = tl.where((row + 1 == history)[:, None], dt[None, :], following)
        # A sum over pairs rather than a scan, which Triton does not compile for every shape this small.
        reach = after[None, :] + tl.sum(tl.where(upper, following[:, None, :], 0.0), axis=0)
        seen = tl.sum(rows_b.to(tl.float32) * c[None, :], axis=1)
        weight = own * tl.exp(rate[None, :] * reach) * seen[:, None]
        # Rows on the middle axis stay within a thread, so that their sum is a chain of FMAs.
        replay += tl.sum(tl.trans(weight)[:, :, None] * x.to(tl.float32), axis=1)
        after += tl.sum(following, axis=0)
        total += tl.sum(own, axis=0)
        start -= BLOCK_J

    out = b * (GROUPS * HEADS) + h
    tl.store(decay_ptr + out, tl.exp(rate * total), mask=in_h)
    tl.store(replay_ptr + out[:, None] * DIM + d[None, :], replay, mask=in_hd)

    # The token's own row goes to index `history`, which nobody reads in this step.
    page = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    row = history % PAGE_ROWS
    at = page * stride_row_x_page + row * stride_row_x_row
    tl.store(row_x_ptr + at + at_x, new_x, mask=in_hd)
    at = page * stride_row_dt_page + row * stride_row_dt_row
    tl.store(row_dt_ptr + at + h, dt, mask=in_h)
    if block == 0:
        at = page * stride_row_b_page + row * stride_row_b_row
        tl.store(row_b_ptr + at + n, new_b, mask=in_n)


def prepass(
    replay: torch.Tensor,
    decay: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d_skip: torch.Tensor,
    dt_bias: torch.Tensor,
    row_x: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, ...]`` inputs of one token and one layer; see the module."""
    batch, heads, dim = x.shape
    groups, state = b.shape[1], b.shape[2]
    shared = heads // groups
    block_h = triton.next_power_of_2(min(config.heads or shared, shared))
    _prepass_kernel[(batch * groups * triton.cdiv(shared, block_h),)](
        replay, decay, x, dt, b, c,
        a, d_skip, dt_bias,
        row_x, row_b, row_dt,
        history, window, table,
        x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        row_x.stride(0), row_x.stride(1), row_x.stride(2),
        row_b.stride(0), row_b.stride(1), row_b.stride(2),
        row_dt.stride(0), row_dt.stride(1),
        table.stride(0), dt_limit[0], dt_limit[1],
        GROUPS=groups, HEADS=shared, DIM=dim, STATE=state,
        BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_N=triton.next_power_of_2(state), BLOCK_J=config.rows or 8,
        PAGE_ROWS=row_x.shape[1], SOFTPLUS=dt_softplus, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
