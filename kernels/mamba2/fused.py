"""Mamba-2 decode in one kernel, for batches that do not fill the machine.

::

    y = exp(A d(0,t)) (S0 C) + sum_j dt_j exp(A d(j,t)) (B_j . C) x_j + (dt (B . C) + D) x

with ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``; optionally ``y *= silu(z)``. Reads the
checkpoint plane ``[pages, heads, dim, state]`` and the rows; writes ``y [batch, heads, dim]`` and
the token's row.

Latency is what counts here: a program is a block of one head's state rows, works out that head's
row weights by itself, and waits for memory twice: for plan and inputs, then for all the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import clamp, silu, softplus
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import round_to
from ..launch.config import LaunchConfig

__all__ = ["fused"]


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_dt_b", "stride_row_dt_page", "stride_row_dt_row", "stride_table_b", "pages",
    ],
    do_not_specialize_on_alignment=[
        "dt_ptr", "a_ptr", "d_skip_ptr", "dt_bias_ptr", "row_dt_ptr",
        "page_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _fused_kernel(
    y_ptr, plane_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr,
    a_ptr, d_skip_ptr, dt_bias_ptr,
    row_x_ptr, row_b_ptr, row_dt_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_x_b, stride_x_h, stride_dt_b, stride_b_b, stride_b_g, stride_c_b, stride_c_g,
    stride_z_b, stride_z_h,
    stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_page, stride_row_dt_row,
    stride_table_b, pages, dt_min, dt_max,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % (GROUPS * HEADS)
    b = (pid // BLOCKS // (GROUPS * HEADS)).to(tl.int64)
    group = h // HEADS
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    in_d, in_n = d < DIM, n < STATE
    rate = tl.load(a_ptr + h)
    skip = tl.load(d_skip_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    if PDL:
        wait_for_previous()  # whatever made the inputs

    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    c = tl.load(c_ptr + b * stride_c_b + group * stride_c_g + n, mask=in_n, other=0.0)
    new_b = tl.load(b_ptr + b * stride_b_b + group * stride_b_g + n, mask=in_n, other=0.0)
    dt = tl.load(dt_ptr + b * stride_dt_b + h).to(tl.float32) + dt_bias
    new_x = tl.load(x_ptr + b * stride_x_b + h * stride_x_h + d, mask=in_d, other=0.0)
    table_ptr += b * stride_table_b
    at_x = row_offset(table_ptr, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    at_b = row_offset(table_ptr, j, pages, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
    at_dt = row_offset(table_ptr, j, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    at_next = row_offset(table_ptr, j + 1, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    y_ptr += b * stride_y_b + h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        tl.store(y_ptr, tl.zeros([BLOCK_R], y_ptr.dtype.element_ty), mask=in_d)
        return

    plane_ptr += page * stride_plane_page + h * stride_plane_h
    in_tile = in_d[:, None] & in_n[None, :]
    state = tl.load(plane_ptr + d[:, None] * STATE + n[None, :], mask=in_tile, other=0.0)
    live, more = j < history, j + 1 < history
    rows_b = tl.load(
        row_b_ptr + at_b[:, None] + group * stride_row_b_g + n[None, :],
        mask=live[:, None] & in_n[None, :], other=0.0,
    )  # fmt: skip
    rows_x = tl.load(
        row_x_ptr + at_x[:, None] + h * stride_row_x_h + d[None, :],
        mask=live[:, None] & in_d[None, :], other=0.0,
    )  # fmt: skip
    own = tl.load(row_dt_ptr + at_dt + h, mask=live, other=0.0)
    following = tl.load(row_dt_ptr + at_next + h, mask=more, other=0.0)
    here = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    if PDL:
        launch_dependents()
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    if SOFTPLUS:
        dt = softplus(dt)
    dt = clamp(dt, dt_min, dt_max)
    # Sums over (j, t]: the rows' dt shifted by one, this token's in the last place, scanned from
    # the end. Never a difference of prefix sums.
    following = tl.where(j + 1 == history, dt, following)
    reach = tl.cumsum(following, axis=0)
    c = c.to(tl.float32)
    seen = tl.sum(rows_b.to(tl.float32) * c[None, :], axis=1)
    weight = own * tl.exp(rate * reach) * seen
    decay = tl.exp(rate * (tl.sum(own, axis=0) + dt))
    y = decay * tl.sum(state.to(tl.float32) * c[None, :], axis=1)
    y += tl.sum(weight[:, None] * rows_x.to(tl.float32), axis=0)
    y += (dt * tl.sum(new_b.to(tl.float32) * c, axis=0) + skip) * new_x.to(tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + b * stride_z_b + h * stride_z_h + d, mask=in_d, other=0.0)
        y *= silu(z.to(tl.float32))
    tl.store(y_ptr, round_to(y, y_ptr.dtype.element_ty), mask=in_d)

    # The token's own row goes to index `history`, which nobody reads in this step.
    row = history % PAGE_ROWS
    at = here * stride_row_x_page + row * stride_row_x_row + h * stride_row_x_h
    tl.store(row_x_ptr + at + d, new_x, mask=in_d)
    if block == 0:
        tl.store(row_dt_ptr + here * stride_row_dt_page + row * stride_row_dt_row + h, dt)
        if h % HEADS == 0:
            at = here * stride_row_b_page + row * stride_row_b_row + group * stride_row_b_g
            tl.store(row_b_ptr + at + n, new_b, mask=in_n)


def fused(
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
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module."""
    batch, heads, dim = x.shape
    groups, state = b.shape[1], b.shape[2]
    block_r = min(config.rows or 16, triton.next_power_of_2(dim))
    gate = x if z is None else z
    _fused_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, plane, x, dt, b, c, gate,
        a, d_skip, dt_bias,
        row_x, row_b, row_dt,
        page, history, window, table,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        gate.stride(0), gate.stride(1),
        row_x.stride(0), row_x.stride(1), row_x.stride(2),
        row_b.stride(0), row_b.stride(1), row_b.stride(2),
        row_dt.stride(0), row_dt.stride(1),
        table.stride(0), table.shape[1], dt_limit[0], dt_limit[1],
        GROUPS=groups, HEADS=heads // groups, DIM=dim, STATE=state,
        BLOCK_R=block_r, BLOCK_N=triton.next_power_of_2(state),
        BLOCK_J=max(2, triton.next_power_of_2(capacity)), PAGE_ROWS=row_x.shape[1],
        SOFTPLUS=dt_softplus, HAS_Z=z is not None, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
