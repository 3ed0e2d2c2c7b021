"""Mamba-2 fold: checkpoints advanced over their rows, every layer in one launch.

::

    S = exp(A d(0,h)) S0 + sum_j (dt_j exp(A d(j,h)) x_j) B_j^T

A persistent grid walks (layer, fold, head); the length of the fold list is read on the device, so
the launch is the same in every step and fits into a CUDA graph. Source and target page may be the
same: a program reads its tile before it writes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dot import dot_exact
from ..common.rows import row_offset
from ..common.split import encode, join_planes, split_planes
from ..launch.config import LaunchConfig, interpreting

__all__ = ["fold"]


@triton.jit
def _fold_kernel(
    out_ptr, out_low_ptr, in_ptr, in_low_ptr,
    a_ptr, row_x_ptr, row_b_ptr, row_dt_ptr,
    source_ptr, target_ptr, rows_ptr, table_ptr, count_ptr,
    stride_out_layer, stride_out_page, stride_out_h,
    stride_in_layer, stride_in_page, stride_in_h,
    stride_a_layer,
    stride_row_x_layer, stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_row_b_layer, stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_layer, stride_row_dt_page, stride_row_dt_row,
    stride_table_b, pages,
    num_layers,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    IN_SPLIT: tl.constexpr, OUT_SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    NUM_HEADS: tl.constexpr = GROUPS * HEADS
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_J)
    in_n = n < STATE
    count = tl.load(count_ptr)
    items = count * num_layers * NUM_HEADS * BLOCKS
    item = tl.program_id(0)
    while item < items:
        block = item % BLOCKS
        h = item // BLOCKS % NUM_HEADS
        f = item // (BLOCKS * NUM_HEADS) % count
        layer = (item // (BLOCKS * NUM_HEADS) // count).to(tl.int64)
        source = tl.load(source_ptr + f).to(tl.int64)
        target = tl.load(target_ptr + f).to(tl.int64)
        history = tl.load(rows_ptr + f)
        rate = tl.load(a_ptr + layer * stride_a_layer + h)

        d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < DIM
        in_tile = in_d[:, None] & in_n[None, :]
        tile = d[:, None] * STATE + n[None, :]
        at = layer * stride_in_layer + source * stride_in_page + h * stride_in_h
        if IN_SPLIT:
            high = tl.load(in_ptr + at + tile, mask=in_tile, other=0)
            low = tl.load(in_low_ptr + at + tile, mask=in_tile, other=0)
        else:
            high = tl.load(in_ptr + at + tile, mask=in_tile, other=0.0)

        live, more = j < history, j + 1 < history
        table = table_ptr + f * stride_table_b
        at = row_offset(table, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
        at += layer * stride_row_x_layer + h * stride_row_x_h
        xs = tl.load(
            row_x_ptr + at[:, None] + d[None, :], mask=live[:, None] & in_d[None, :], other=0.0
        )
        at = row_offset(table, j, pages, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
        at += layer * stride_row_b_layer + h // HEADS * stride_row_b_g
        bs = tl.load(
            row_b_ptr + at[:, None] + n[None, :], mask=live[:, None] & in_n[None, :], other=0.0
        )
        dts = row_dt_ptr + layer * stride_row_dt_layer + h
        at = row_offset(table, j, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
        own = tl.load(dts + at, mask=live, other=0.0)
        at = row_offset(table, j + 1, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
        following = tl.load(dts + at, mask=more, other=0.0)

        tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight
        reach = tl.cumsum(following, axis=0, reverse=True)  # over (j, h]: shifted, then scanned
        weight = own * tl.exp(rate * reach)
        state = dot_exact(tl.trans(weight[:, None] * xs.to(tl.float32)), bs, INTERPRET)
        if IN_SPLIT:
            before = join_planes(high, low)
        else:
            before = high.to(tl.float32)
        state += tl.exp(rate * tl.sum(own, axis=0)) * before

        at = layer * stride_out_layer + target * stride_out_page + h * stride_out_h
        if OUT_SPLIT:
            high, low = split_planes(state)
            tl.store(out_ptr + at + tile, high, mask=in_tile)
            tl.store(out_low_ptr + at + tile, low, mask=in_tile)
        else:
            tl.store(out_ptr + at + tile, encode(state, out_ptr.dtype.element_ty), mask=in_tile)
        item += tl.num_programs(0)


def fold(
    out_plane: torch.Tensor,
    out_low: torch.Tensor | None,
    plane: torch.Tensor,
    low: torch.Tensor | None,
    a: torch.Tensor,
    row_x: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    count: torch.Tensor,
    *,
    capacity: int,
    programs: int,
    config: LaunchConfig,
) -> None:
    """Launch over ``[layers, pages, heads, dim, state]`` planes; see the module.

    Two-plane sides pass both planes as int16, with equal strides; a head's ``dim * state`` values are
    contiguous in a plane.
    """
    layers, _, heads, dim, state = plane.shape
    groups = row_b.shape[3]
    # The matrix units take no fewer than 16 of anything.
    block_d = max(16, min(config.rows or 64, triton.next_power_of_2(dim)))
    _fold_kernel[(programs,)](
        out_plane, out_plane if out_low is None else out_low, plane, plane if low is None else low,
        a, row_x, row_b, row_dt,
        source, target, rows, table, count,
        out_plane.stride(0), out_plane.stride(1), out_plane.stride(2),
        plane.stride(0), plane.stride(1), plane.stride(2),
        a.stride(0),
        row_x.stride(0), row_x.stride(1), row_x.stride(2), row_x.stride(3),
        row_b.stride(0), row_b.stride(1), row_b.stride(2), row_b.stride(3),
        row_dt.stride(0), row_dt.stride(1), row_dt.stride(2),
        table.stride(0), table.shape[1],
        layers,
        GROUPS=groups, HEADS=heads // groups, DIM=dim, STATE=state,
        BLOCK_D=block_d, BLOCK_N=max(16, triton.next_power_of_2(state)),
        BLOCK_J=max(16, triton.next_power_of_2(capacity)), PAGE_ROWS=row_x.shape[2],
        IN_SPLIT=low is not None, OUT_SPLIT=out_low is not None, INTERPRET=interpreting(),
        num_warps=config.num_warps, num_stages=1, maxnreg=config.registers or None,
    )  # fmt: skip
