"""Mamba-2 decode readout: streams checkpoints; the prepass has done the rest.

::

    y = decay (S0 C) + sum_j weight_j x_j + own x          optionally  y *= silu(z)

Reads the checkpoint plane ``[pages, heads, dim, state]`` and the ``x`` rows; writes
``y [batch, heads, dim]`` and the token's ``x`` row. A program walks `HEADS` neighbouring heads of one
group with the next heads' tiles in flight.

With a bf16 plane both sums are matrix products: the other factor is split into three bf16 terms, one
a column, so that every product is exact and the columns add up to the fp32 result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu
from ..common.pdl import wait_for_previous
from ..common.rows import row_offset
from ..common.split import round_to, terms
from ..launch.config import LaunchConfig, interpreting

__all__ = ["readout"]

# Columns of a matrix product that is really a vector's: the hardware's narrowest.
COLUMNS = tl.constexpr(8)


@triton.jit
def _readout_kernel(
    y_ptr, plane_ptr, weight_ptr, scale_ptr, x_ptr, c_ptr, z_ptr, row_x_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_h,
    stride_plane_page, stride_plane_h, stride_plane_d,
    stride_x_b, stride_x_h, stride_c_b, stride_c_g, stride_z_b, stride_z_h,
    stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_table_b,
    num_heads, heads_per_group,
    DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr, PAGE_ROWS: tl.constexpr,
    DOT: tl.constexpr, HAS_Z: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
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
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    c = tl.load(c_ptr + b * stride_c_b + group * stride_c_g + n, mask=in_n, other=0.0)
    y_ptr += b * stride_y_b
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        for i in range(HEADS):
            zero = tl.zeros([BLOCK_D], y_ptr.dtype.element_ty)
            tl.store(y_ptr + (first + i) * stride_y_h + d, zero, mask=in_d)
        return

    table_ptr += b * stride_table_b
    live = j < history
    at = row_offset(table_ptr, j, live, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    here = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64) * stride_row_x_page
    here += (history % PAGE_ROWS) * stride_row_x_row
    in_tile = in_d[:, None] & in_n[None, :]
    in_rows = live[:, None] & in_d[None, :]
    tiles = plane_ptr + page * stride_plane_page + d[:, None] * stride_plane_d + n[None, :]
    rows = row_x_ptr + at[:, None] + d[None, :]
    if DOT:
        columns = terms(c.to(tl.float32), COLUMNS)  # [BLOCK_N, COLUMNS]
    if PDL:
        wait_for_previous()  # the weights of the prepass; checkpoints are older than it

    for i in tl.range(0, HEADS, num_stages=STAGES):
        h = first + i
        state = tl.load(tiles + h * stride_plane_h, mask=in_tile, other=0.0)
        past = tl.load(rows + h * stride_row_x_h, mask=in_rows, other=0.0)
        weight = tl.load(weight_ptr + (b * num_heads + h) * BLOCK_J + j)
        decay = tl.load(scale_ptr + (b * num_heads + h) * 2)
        own = tl.load(scale_ptr + (b * num_heads + h) * 2 + 1)
        new = tl.load(x_ptr + b * stride_x_b + h * stride_x_h + d, mask=in_d, other=0.0)
        if DOT:
            if INTERPRET:  # it multiplies the bit patterns of bf16 operands
                read = tl.dot(state.to(tl.float32), columns.to(tl.float32))
                replay = tl.dot(tl.trans(past.to(tl.float32)), terms(weight, COLUMNS).to(tl.float32))
            else:
                read = tl.dot(state, columns)
                replay = tl.dot(tl.trans(past), terms(weight, COLUMNS))
            y = tl.sum(decay * read + replay, axis=1)
        else:
            y = decay * tl.sum(state.to(tl.float32) * c.to(tl.float32)[None, :], axis=1)
            y += tl.sum(weight[:, None] * past.to(tl.float32), axis=0)
        y += own * new.to(tl.float32)
        if HAS_Z:
            z = tl.load(z_ptr + b * stride_z_b + h * stride_z_h + d, mask=in_d, other=0.0)
            y *= silu(z.to(tl.float32))
        tl.store(y_ptr + h * stride_y_h + d, round_to(y, y_ptr.dtype.element_ty), mask=in_d)
        tl.store(row_x_ptr + here + h * stride_row_x_h + d, new, mask=in_d)


def readout(
    y: torch.Tensor,
    plane: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    row_x: torch.Tensor,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module."""
    batch, heads, dim = x.shape
    groups, state = c.shape[1], c.shape[2]
    block_d = min(config.block_d or 1 << 30, triton.next_power_of_2(dim))
    splits = triton.cdiv(dim, block_d)
    per_program = min(config.heads_per_program, heads // groups)
    while (heads // groups) % per_program:
        per_program //= 2
    gate = x if z is None else z
    dot = config.dot and plane.dtype == torch.bfloat16 and x.dtype == torch.bfloat16
    _readout_kernel[(batch * (heads // per_program) * splits,)](
        y, plane, weight, scale, x, c, gate, row_x,
        page, history, window, table,
        y.stride(0), y.stride(1),
        plane.stride(0), plane.stride(1), plane.stride(2),
        x.stride(0), x.stride(1), c.stride(0), c.stride(1), gate.stride(0), gate.stride(1),
        row_x.stride(0), row_x.stride(1), row_x.stride(2),
        table.stride(0),
        heads, heads // groups,
        DIM=dim, STATE=state,
        BLOCK_D=block_d, BLOCK_N=triton.next_power_of_2(state), BLOCK_J=weight.shape[2],
        SPLITS=splits, HEADS=per_program, STAGES=config.num_stages, PAGE_ROWS=row_x.shape[1],
        DOT=dot, HAS_Z=z is not None, PDL=pdl, INTERPRET=interpreting(),
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
