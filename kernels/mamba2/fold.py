"""Mamba-2 fold: checkpoints advanced over their rows, every layer in one launch.

::

    S = exp(A d(0,h)) S0 + sum_j (dt_j exp(A d(j,h)) x_j) B_j^T

A persistent grid walks (layer, fold, set of heads, part of a head); the length of the fold list is
read on the device, so the launch is the same in every step and fits into a CUDA graph. The heads of
a set share one look-up of pages and one tile of ``B``. Source and target page may be the same: a
program reads its tile before it writes it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..common.dot import dot_exact
from ..common.rows import row_offset
from ..common.split import encode, join_planes, split_planes
from ..launch.config import LaunchConfig, interpreting

__all__ = ["fold"]


@triton.jit
def _from_units(x, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """``[16 WARPS, 32 CHUNKS]`` as the matrix units hold it to ``[16 WARPS, CHUNKS, 32]`` in order.

    There a thread holds rows 8 apart and pairs of columns 8 apart; a load gives it 8 neighbours. So
    the operands come with their rows and columns permuted, and the product's index bits are put
    back here: that moves no data, where a change of layout would go through shared memory.
    """
    x = x.reshape(WARPS, 2, 8, CHUNKS, 4, 4, 2)
    return x.permute(1, 0, 2, 3, 5, 4, 6).reshape(16 * WARPS, CHUNKS, 32)


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing; and one
    # kernel serves the fold of all layers and of one.
    do_not_specialize=[
        "stride_a_layer", "stride_row_dt_layer", "stride_row_dt_page", "stride_row_dt_row",
        "stride_table_b", "pages", "num_layers",
    ],
    do_not_specialize_on_alignment=[
        "a_ptr", "row_dt_ptr", "source_ptr", "target_ptr", "rows_ptr", "table_ptr", "count_ptr",
    ],
)  # fmt: skip
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
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_J: tl.constexpr,
    SET: tl.constexpr, STAGES: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PERMUTE: tl.constexpr, IN_SPLIT: tl.constexpr, OUT_SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (STATE + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D * PARTS
    SETS: tl.constexpr = GROUPS * HEADS // SET
    WARPS: tl.constexpr = BLOCK_D // 16
    COLUMNS: tl.constexpr = BLOCK_N // CHUNKS
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    r = tl.arange(0, BLOCK_D)
    n = tl.arange(0, CHUNKS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = r[:, None, None] * STATE + n[None, :, :]
    if PERMUTE:  # the matrix units' order of rows, see `_from_units`
        r = r % 8 + r // 8 % 2 * (8 * WARPS) + r // 16 * 8
    count = tl.load(count_ptr)
    item = tl.program_id(0)
    while item < count * num_layers * SETS * BLOCKS:
        corner = item % BLOCKS // PARTS * BLOCK_D, item % PARTS * BLOCK_N  # of the tile in the head
        first = item // BLOCKS % SETS * SET
        f = item // (BLOCKS * SETS) % count
        layer = (item // (BLOCKS * SETS) // count).to(tl.int64)
        item += tl.num_programs(0)
        source = tl.load(source_ptr + f).to(tl.int64)
        target = tl.load(target_ptr + f).to(tl.int64)
        history = tl.load(rows_ptr + f)
        table = table_ptr + f * stride_table_b
        at_x = row_offset(table, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
        at_b = row_offset(table, j, pages, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
        at_dt = row_offset(table, j, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
        at_next = row_offset(table, j + 1, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)

        live, more = j < history, j + 1 < history
        d = corner[0] + r
        in_d = d < DIM
        in_tile = (corner[0] + tl.arange(0, BLOCK_D) < DIM)[:, None, None]
        in_tile &= (corner[1] + n < STATE)[None, :, :]
        columns = corner[1] + tl.arange(0, BLOCK_N)
        group = first // HEADS
        bs = tl.load(
            row_b_ptr + layer * stride_row_b_layer + group * stride_row_b_g + at_b[:, None]
            + columns[None, :],
            mask=live[:, None] & (columns < STATE)[None, :], other=0.0,
        )  # fmt: skip
        if PERMUTE:
            bs = bs.reshape(BLOCK_J, CHUNKS, 4, 4, 2).permute(0, 1, 3, 2, 4)
            bs = bs.reshape(BLOCK_J, BLOCK_N)
        xs_ptr = row_x_ptr + layer * stride_row_x_layer + at_x[:, None] + d[None, :]
        dts_ptr = row_dt_ptr + layer * stride_row_dt_layer
        old = layer * stride_in_layer + source * stride_in_page + corner[0] * STATE + corner[1]
        new = layer * stride_out_layer + target * stride_out_page + corner[0] * STATE + corner[1]
        for i in tl.range(0, SET, num_stages=STAGES):
            h = first + i
            at = old + h * stride_in_h
            if IN_SPLIT:
                high = tl.load(in_ptr + at + tile, mask=in_tile, other=0)
                low = tl.load(in_low_ptr + at + tile, mask=in_tile, other=0)
            else:
                high = tl.load(in_ptr + at + tile, mask=in_tile, other=0.0)
            xs = tl.load(xs_ptr + h * stride_row_x_h, mask=live[:, None] & in_d[None, :], other=0.0)
            own = tl.load(dts_ptr + at_dt + h, mask=live, other=0.0)
            following = tl.load(dts_ptr + at_next + h, mask=more, other=0.0)
            rate = tl.load(a_ptr + layer * stride_a_layer + h)
            if STAGES == 1:
                tl.debug_barrier()  # keeps the loads above the arithmetic: all are in flight

            reach = tl.cumsum(following, axis=0)  # over (j, h]: shifted, then scanned
            weight = own * tl.exp(rate * reach)
            state = dot_exact(tl.trans(weight[:, None] * xs.to(tl.float32)), bs, INTERPRET)
            if PERMUTE:
                state = _from_units(state, WARPS, CHUNKS)
            else:
                state = state.reshape(BLOCK_D, CHUNKS, COLUMNS)
            if IN_SPLIT:
                before = join_planes(high, low)
            else:
                before = high.to(tl.float32)
            state += tl.exp(rate * tl.sum(own, axis=0)) * before

            at = new + h * stride_out_h
            if OUT_SPLIT:
                high, low = split_planes(state)
                tl.store(out_ptr + at + tile, high, mask=in_tile)
                tl.store(out_low_ptr + at + tile, low, mask=in_tile)
            else:
                tl.store(out_ptr + at + tile, encode(state, out_ptr.dtype.element_ty), mask=in_tile)


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

    Two-plane sides pass both planes as int16, with equal strides; a head's ``dim * state`` values
    are contiguous in a plane.
    """
    layers, _, heads, dim, state = plane.shape
    groups = row_b.shape[3]
    # The matrix units take no fewer than 16 of anything.
    block_d = max(16, min(config.rows or 64, triton.next_power_of_2(dim)))
    block_n = max(16, min(config.columns or 128, triton.next_power_of_2(state)))
    permute = block_n >= 32 and block_d == 16 * config.num_warps
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
        BLOCK_D=block_d, BLOCK_N=block_n, CHUNKS=max(1, block_n // 32),
        BLOCK_J=max(16, triton.next_power_of_2(capacity)),
        SET=math.gcd(config.heads or 2, heads // groups), STAGES=config.stages,
        PAGE_ROWS=row_x.shape[2], PERMUTE=permute,
        IN_SPLIT=low is not None, OUT_SPLIT=out_low is not None, INTERPRET=interpreting(),
        num_warps=config.num_warps, num_stages=1, maxnreg=config.registers or None,
    )  # fmt: skip
