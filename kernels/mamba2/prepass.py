"""Mamba-2 decode prepass: everything about the rows that the heads of a group share.

::

    weight_j = dt_j exp(A d(j,t)) (B_j . C)      decay = exp(A d(0,t))      own = dt (B . C) + D

with ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``. Reads the ``B`` and ``dt`` rows; writes
``weight [batch, heads, rows]`` and ``scale [batch, heads, 2]`` (decay, own) for the readout, and the
token's ``B`` and ``dt`` row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import softplus
from ..common.pdl import launch_dependents
from ..common.rows import row_offset
from ..launch.config import LaunchConfig

__all__ = ["prepass"]


@triton.jit
def _prepass_kernel(
    weight_ptr, scale_ptr, dt_ptr, b_ptr, c_ptr,
    a_ptr, d_skip_ptr, dt_bias_ptr,
    row_b_ptr, row_dt_ptr,
    history_ptr, window_ptr, table_ptr,
    stride_dt_b, stride_b_b, stride_b_g, stride_c_b, stride_c_g,
    stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_page, stride_row_dt_row,
    stride_table_b,
    num_groups, heads_per_group, dt_min, dt_max,
    STATE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    PAGE_ROWS: tl.constexpr, SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    b, group = pid // num_groups, pid % num_groups
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    local = tl.arange(0, BLOCK_H)
    in_n, in_h = n < STATE, local < heads_per_group
    h = group * heads_per_group + local
    num_heads = num_groups * heads_per_group

    # Everything that does not depend on the plan is asked for first.
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    c = tl.load(c_ptr + b * stride_c_b + group * stride_c_g + n, mask=in_n, other=0.0)
    new_b = tl.load(b_ptr + b * stride_b_b + group * stride_b_g + n, mask=in_n, other=0.0)
    dt = tl.load(dt_ptr + b * stride_dt_b + h, mask=in_h, other=0.0).to(tl.float32)
    dt += tl.load(dt_bias_ptr + h, mask=in_h, other=0.0)
    rate = tl.load(a_ptr + h, mask=in_h, other=0.0)
    skip = tl.load(d_skip_ptr + h, mask=in_h, other=0.0)
    if PDL:
        launch_dependents()
    if tokens == 0:  # pad or empty window
        return
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    c = c.to(tl.float32)

    table_ptr += b * stride_table_b
    live, after = j < history, j + 1 < history
    at_b = row_offset(table_ptr, j, live, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
    rows_b = tl.load(
        row_b_ptr + at_b[:, None] + group * stride_row_b_g + n[None, :],
        mask=live[:, None] & in_n[None, :], other=0.0,
    )  # fmt: skip
    at_dt = row_offset(table_ptr, j, live, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    own = tl.load(
        row_dt_ptr + at_dt[:, None] + h[None, :], mask=live[:, None] & in_h[None, :], other=0.0
    )
    at_dt = row_offset(table_ptr, j + 1, after, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    shifted = tl.load(
        row_dt_ptr + at_dt[:, None] + h[None, :], mask=after[:, None] & in_h[None, :], other=0.0
    )
    # Sums over (j, t]: the rows' dt shifted by one, this token's in the last place, scanned from the
    # end. Never a difference of prefix sums.
    shifted = tl.where((j + 1 == history)[:, None], dt[None, :], shifted)
    reach = tl.cumsum(shifted, axis=0, reverse=True)
    seen = tl.sum(rows_b.to(tl.float32) * c[None, :], axis=1)
    weight = own * tl.exp(rate[None, :] * reach) * seen[:, None]
    weight = tl.where(live[:, None], weight, 0.0)
    at = (b * num_heads + h[None, :]) * BLOCK_J + j[:, None]
    tl.store(weight_ptr + at, weight, mask=in_h[None, :])

    scale_ptr += (b * num_heads + h) * 2
    total = tl.sum(own, axis=0) + dt
    tl.store(scale_ptr, tl.exp(rate * total), mask=in_h)
    new_seen = tl.sum(new_b.to(tl.float32) * c, axis=0)
    tl.store(scale_ptr + 1, dt * new_seen + skip, mask=in_h)

    # The token's own row goes to index `history`.
    page = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    row = history % PAGE_ROWS
    at_b = page * stride_row_b_page + row * stride_row_b_row + group * stride_row_b_g
    tl.store(row_b_ptr + at_b + n, new_b, mask=in_n)
    tl.store(row_dt_ptr + page * stride_row_dt_page + row * stride_row_dt_row + h, dt, mask=in_h)


def prepass(
    weight: torch.Tensor,
    scale: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d_skip: torch.Tensor,
    dt_bias: torch.Tensor,
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
    batch, groups, state = b.shape
    heads = dt.shape[1]
    _prepass_kernel[(batch * groups,)](
        weight, scale, dt, b, c,
        a, d_skip, dt_bias,
        row_b, row_dt,
        history, window, table,
        dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        row_b.stride(0), row_b.stride(1), row_b.stride(2),
        row_dt.stride(0), row_dt.stride(1),
        table.stride(0),
        groups, heads // groups, dt_limit[0], dt_limit[1],
        STATE=state,
        BLOCK_H=triton.next_power_of_2(heads // groups), BLOCK_N=triton.next_power_of_2(state),
        BLOCK_J=weight.shape[2],
        PAGE_ROWS=row_b.shape[1], SOFTPLUS=dt_softplus, PDL=pdl,
        num_warps=config.num_warps,
    )  # fmt: skip
