"""Mamba-2 decode readout: one token per sequence from a checkpoint and the rows after it.

::

    y = exp(A d(0,t)) (S0 C) + sum_j dt_j exp(A d(j,t)) (B_j . C) x_j + (dt (B . C) + D) x

with ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``. Reads the checkpoint plane
``[pages, heads, dim, state]``; writes ``y [batch, heads, dim]`` and the token's row.
A program takes `HEADS` neighbouring heads of one group and loads the next head's state while it
works on this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu, softplus
from ..common.rows import row_offset
from ..common.split import round_to
from ..launch.config import LaunchConfig

__all__ = ["readout"]


@triton.jit
def _readout_kernel(
    y_ptr, plane_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr,
    a_ptr, d_skip_ptr, dt_bias_ptr,
    row_x_ptr, row_b_ptr, row_dt_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_h,
    stride_plane_page, stride_plane_h, stride_plane_d,
    stride_x_b, stride_x_h, stride_dt_b, stride_b_b, stride_b_g, stride_c_b, stride_c_g,
    stride_z_b, stride_z_h,
    stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_page, stride_row_dt_row,
    stride_table_b,
    num_heads, heads_per_group, dt_min, dt_max,
    DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, PAGE_ROWS: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)  # all of the grid on axis 0
    split = pid % SPLITS  # which BLOCK_D rows of the heads
    blocks = num_heads // HEADS
    b = pid // SPLITS // blocks
    first = (pid // SPLITS % blocks) * HEADS
    group = first // heads_per_group

    d = split * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    in_d, in_n = d < DIM, n < STATE
    y_ptr += b * stride_y_b
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        for i in range(HEADS):
            zero = tl.zeros([BLOCK_D], y_ptr.dtype.element_ty)
            tl.store(y_ptr + (first + i) * stride_y_h + d, zero, mask=in_d)
        return

    in_tile = in_d[:, None] & in_n[None, :]
    tile_ptr = plane_ptr + page * stride_plane_page + first * stride_plane_h
    tile_ptr += d[:, None] * stride_plane_d + n[None, :]
    upcoming = tl.load(tile_ptr, mask=in_tile, other=0.0)  # in flight while the rows are prepared

    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    live = j < history
    c = tl.load(c_ptr + b * stride_c_b + group * stride_c_g + n, mask=in_n, other=0.0)
    c = c.to(tl.float32)
    new_b = tl.load(b_ptr + b * stride_b_b + group * stride_b_g + n, mask=in_n, other=0.0)
    at = row_offset(table_ptr, j, live, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
    rows_b = tl.load(
        row_b_ptr + at[:, None] + group * stride_row_b_g + n[None, :],
        mask=live[:, None] & in_n[None, :], other=0.0,
    )  # fmt: skip
    seen = tl.sum(rows_b.to(tl.float32) * c[None, :], axis=1)  # B_j . C, [BLOCK_J]
    new_seen = tl.sum(new_b.to(tl.float32) * c, axis=0)

    # The token's own row goes to index `history`.
    here_page = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    here_row = history % PAGE_ROWS
    if (first % heads_per_group == 0) & (split == 0):
        at_b = here_page * stride_row_b_page + here_row * stride_row_b_row + group * stride_row_b_g
        tl.store(row_b_ptr + at_b + n, new_b, mask=in_n)

    at_x = row_offset(table_ptr, j, live, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    at_dt = row_offset(table_ptr, j, live, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    after = j + 1 < history
    at_next = row_offset(table_ptr, j + 1, after, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    here_x = here_page * stride_row_x_page + here_row * stride_row_x_row
    here_dt = here_page * stride_row_dt_page + here_row * stride_row_dt_row

    for i in range(HEADS):
        h = first + i
        state = upcoming
        tile_ptr += stride_plane_h
        upcoming = tl.load(tile_ptr, mask=in_tile & (i + 1 < HEADS), other=0.0)
        decay = tl.load(a_ptr + h)
        dt = tl.load(dt_ptr + b * stride_dt_b + h).to(tl.float32) + tl.load(dt_bias_ptr + h)
        if SOFTPLUS:
            dt = softplus(dt)
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
        new_x = tl.load(x_ptr + b * stride_x_b + h * stride_x_h + d, mask=in_d, other=0.0)
        tl.store(row_x_ptr + here_x + h * stride_row_x_h + d, new_x, mask=in_d)
        if split == 0:
            tl.store(row_dt_ptr + here_dt + h, dt)

        # Sums over (j, t]: the rows' dt shifted by one, this token's in the last place, scanned
        # from the end. Never a difference of prefix sums.
        own = tl.load(row_dt_ptr + at_dt + h, mask=live, other=0.0)
        shifted = tl.load(row_dt_ptr + at_next + h, mask=after, other=0.0)
        shifted = tl.where(j + 1 == history, dt, shifted)
        reach = tl.cumsum(shifted, axis=0, reverse=True)
        total = tl.sum(own, axis=0) + dt
        weight = tl.where(live, own * tl.exp(decay * reach) * seen, 0.0)

        rows_x = tl.load(
            row_x_ptr + at_x[:, None] + h * stride_row_x_h + d[None, :],
            mask=live[:, None] & in_d[None, :], other=0.0,
        )  # fmt: skip
        y = tl.sum(weight[:, None] * rows_x.to(tl.float32), axis=0)
        y += (dt * new_seen + tl.load(d_skip_ptr + h)) * new_x.to(tl.float32)
        y += tl.exp(decay * total) * tl.sum(state.to(tl.float32) * c[None, :], axis=1)
        if HAS_Z:
            z = tl.load(z_ptr + b * stride_z_b + h * stride_z_h + d, mask=in_d, other=0.0)
            y *= silu(z.to(tl.float32))
        tl.store(y_ptr + h * stride_y_h + d, round_to(y, y_ptr.dtype.element_ty), mask=in_d)


def readout(
    y: torch.Tensor,
    plane: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    a: torch.Tensor,
    d_skip: torch.Tensor,
    dt_bias: torch.Tensor,
    row_x: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    capacity: int,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module."""
    batch, heads, dim = x.shape
    groups, state = b.shape[1], b.shape[2]
    block_d = min(config.block_d or 1 << 30, triton.next_power_of_2(dim))
    splits = triton.cdiv(dim, block_d)
    per_program = min(config.heads_per_program, heads // groups)
    while (heads // groups) % per_program:
        per_program //= 2
    gate = x if z is None else z
    grid = (batch * (heads // per_program) * splits,)
    _readout_kernel[grid](
        y, plane, x, dt, b, c, gate,
        a, d_skip, dt_bias,
        row_x, row_b, row_dt,
        page, history, window, table,
        y.stride(0), y.stride(1),
        plane.stride(0), plane.stride(1), plane.stride(2),
        x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        gate.stride(0), gate.stride(1),
        row_x.stride(0), row_x.stride(1), row_x.stride(2),
        row_b.stride(0), row_b.stride(1), row_b.stride(2),
        row_dt.stride(0), row_dt.stride(1),
        table.stride(0),
        heads, heads // groups, dt_limit[0], dt_limit[1],
        DIM=dim, STATE=state,
        BLOCK_D=block_d, BLOCK_N=triton.next_power_of_2(state),
        BLOCK_J=triton.next_power_of_2(capacity),
        SPLITS=splits, HEADS=per_program, PAGE_ROWS=row_x.shape[1],
        SOFTPLUS=dt_softplus, HAS_Z=z is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
