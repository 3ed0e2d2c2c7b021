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
    stride_out_layer, stride_out_page, stride_out_h, stride_out_d,
    stride_in_layer, stride_in_page, stride_in_h, stride_in_d,
    stride_a_layer,
    stride_row_x_layer, stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_row_b_layer, stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_layer, stride_row_dt_page, stride_row_dt_row,
    stride_table_b,
    num_layers, num_heads, heads_per_group,
    DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    SPLITS: tl.constexpr, PAGE_ROWS: tl.constexpr,
    IN_SPLIT: tl.constexpr, OUT_SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    in_n = n < STATE
    count = tl.load(count_ptr).to(tl.int64)
    items = count * num_layers * num_heads * SPLITS
    item = tl.program_id(0).to(tl.int64)
    while item < items:
        split = item % SPLITS
        h = item // SPLITS % num_heads
        f = item // SPLITS // num_heads % count
        layer = item // SPLITS // num_heads // count
        group = h // heads_per_group
        d = split * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = d < DIM
        in_tile = in_d[:, None] & in_n[None, :]

        source = tl.load(source_ptr + f).to(tl.int64)
        target = tl.load(target_ptr + f).to(tl.int64)
        history = tl.load(rows_ptr + f)
        table = table_ptr + f * stride_table_b
        at = layer * stride_in_layer + source * stride_in_page + h * stride_in_h
        at = at + d[:, None] * stride_in_d + n[None, :]
        if IN_SPLIT:
            high = tl.load(in_ptr + at, mask=in_tile, other=0)
            low = tl.load(in_low_ptr + at, mask=in_tile, other=0)
            state = join_planes(high, low)
        else:
            state = tl.load(in_ptr + at, mask=in_tile, other=0.0).to(tl.float32)

        live = j < history
        decay = tl.load(a_ptr + layer * stride_a_layer + h)
        dts = row_dt_ptr + layer * stride_row_dt_layer + h
        own = tl.load(
            dts + row_offset(table, j, live, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS),
            mask=live, other=0.0,
        )  # fmt: skip
        after = j + 1 < history
        shifted = tl.load(
            dts + row_offset(table, j + 1, after, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS),
            mask=after, other=0.0,
        )  # fmt: skip
        reach = tl.cumsum(shifted, axis=0, reverse=True)  # sums over (j, h]: shifted, then scanned
        weight = own * tl.exp(decay * reach)
        at_x = row_offset(table, j, live, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
        xs = tl.load(
            row_x_ptr + layer * stride_row_x_layer + at_x[:, None] + h * stride_row_x_h + d[None, :],
            mask=live[:, None] & in_d[None, :], other=0.0,
        )  # fmt: skip
        at_b = row_offset(table, j, live, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
        bs = tl.load(
            row_b_ptr + layer * stride_row_b_layer + at_b[:, None] + group * stride_row_b_g
            + n[None, :],
            mask=live[:, None] & in_n[None, :], other=0.0,
        )  # fmt: skip
        update = dot_exact(tl.trans(weight[:, None] * xs.to(tl.float32)), bs, INTERPRET)
        state = tl.exp(decay * tl.sum(own, axis=0)) * state + update

        at = layer * stride_out_layer + target * stride_out_page + h * stride_out_h
        at = at + d[:, None] * stride_out_d + n[None, :]
        if OUT_SPLIT:
            high, low = split_planes(state)
            tl.store(out_ptr + at, high, mask=in_tile)
            tl.store(out_low_ptr + at, low, mask=in_tile)
        else:
            tl.store(out_ptr + at, encode(state, out_ptr.dtype.element_ty), mask=in_tile)
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

    Two-plane sides pass both planes as int16, with equal strides.
    """
    layers, _, heads, dim, state = plane.shape
    groups = row_b.shape[3]
    block_d = max(16, min(config.block_d or 1 << 30, triton.next_power_of_2(dim)))
    _fold_kernel[(programs,)](
        out_plane, out_plane if out_low is None else out_low, plane, plane if low is None else low,
        a, row_x, row_b, row_dt,
        source, target, rows, table, count,
        out_plane.stride(0), out_plane.stride(1), out_plane.stride(2), out_plane.stride(3),
        plane.stride(0), plane.stride(1), plane.stride(2), plane.stride(3),
        a.stride(0),
        row_x.stride(0), row_x.stride(1), row_x.stride(2), row_x.stride(3),
        row_b.stride(0), row_b.stride(1), row_b.stride(2), row_b.stride(3),
        row_dt.stride(0), row_dt.stride(1), row_dt.stride(2),
        table.stride(0),
        layers, heads, heads // groups,
        DIM=dim, STATE=state,
        BLOCK_D=block_d, BLOCK_N=max(16, triton.next_power_of_2(state)),
        BLOCK_J=max(16, triton.next_power_of_2(capacity)),
        SPLITS=triton.cdiv(dim, block_d), PAGE_ROWS=row_x.shape[2],
        IN_SPLIT=low is not None, OUT_SPLIT=out_low is not None, INTERPRET=interpreting(),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
