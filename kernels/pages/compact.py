"""Rows of accepted tree nodes moved to where a chain's rows lie, in every layer of one field.

The node at rank ``r`` of an accepted path is copied from row ``start + node`` of its sequence to
row ``start + r``. Nodes of a path rise, so a target is never after its source: a program takes the
ranks of its part of a sequence in order, and has read whatever it overwrites. Once a path has left
the chain, all of its later nodes move; most paths that never do are found by one look.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.config import LaunchConfig

__all__ = ["compact"]


@triton.jit
def _place(table_ptr, start, index, ring, PAGE_ROWS: tl.constexpr):
    """Page and offset of a window row; in a ring the page is the sequence's own."""
    row = start + index
    if PAGE_ROWS > 0:
        return tl.load(table_ptr + row // PAGE_ROWS).to(tl.int64), row % PAGE_ROWS
    else:
        return tl.load(table_ptr).to(tl.int64), row % ring


@triton.jit(
    do_not_specialize=[
        "stride_layer", "stride_page", "stride_row", "stride_h", "stride_table_b",
        "layers", "width", "values", "ring", "window", "blocks",
    ],
    do_not_specialize_on_alignment=["rows_ptr", "nodes_ptr", "start_ptr", "table_ptr"],
)  # fmt: skip
def _compact_kernel(
    rows_ptr, nodes_ptr, start_ptr, table_ptr,
    stride_layer, stride_page, stride_row, stride_h, stride_table_b,
    layers, width, values, ring, window, blocks,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)  # all of the grid on axis 0
    block = (pid % blocks).to(tl.int32)
    layer = pid // blocks % layers
    b = pid // blocks // layers
    at = block * BLOCK + tl.arange(0, BLOCK)
    in_row = at < values
    rows_ptr += layer * stride_layer + at // width * stride_h + at % width
    start = tl.load(start_ptr + b)
    table_ptr += b * stride_table_b
    nodes_ptr += b * window
    ranks = tl.arange(0, BLOCK_T)
    nodes = tl.load(nodes_ptr + ranks, mask=ranks < window, other=-1)
    rank = tl.min(tl.where(nodes > ranks, ranks, window))
    while rank < window:
        node = tl.load(nodes_ptr + rank)
        if node > rank:
            page, offset = _place(table_ptr, start, node, ring, PAGE_ROWS)
            value = tl.load(rows_ptr + (page * stride_page + offset * stride_row), mask=in_row)
            page, offset = _place(table_ptr, start, rank, ring, PAGE_ROWS)
            tl.store(rows_ptr + (page * stride_page + offset * stride_row), value, mask=in_row)
        rank += 1


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in words of up to 8 bytes."""
    size = rows.element_size()
    for dtype in (torch.int64, torch.int32):
        parts = (rows.data_ptr(), rows.shape[-1] * size, *(s * size for s in rows.stride()[:-1]))
        if dtype.itemsize >= size and not any(part % dtype.itemsize for part in parts):
            return rows.view(dtype)
    return rows.view(torch.int16)


def compact(
    rows: torch.Tensor,
    nodes: torch.Tensor,
    start: torch.Tensor,
    table: torch.Tensor,
    *,
    ring: bool,
    config: LaunchConfig,
) -> None:
    """Launch over the rows of one field, of any type of 2 or 4 bytes; see the module.

    Parameters
    ----------
    rows : Tensor, [layers, pages, rows, heads] or [layers, pages, rows, heads, width]
        Contiguous along the last axis. A ring is ``[layers, slots, rows, channels]``.
    nodes : int32, [batch, window]
        Accepted nodes from the root down, -1 for none.
    start : int32, [batch]
        The row before which the window begins; in a ring its place.
    table : int32, [batch, pages], or [batch] in a ring
        Pages, or the slot.
    ring : bool
        Whether a sequence's rows lie in one page and wrap around.
    """
    if rows.dim() == 4:
        rows = rows.unsqueeze(3)
    rows = _as_words(rows)
    width = rows.shape[4]
    values = rows.shape[3] * width
    block = min(config.rows or 1024, triton.next_power_of_2(values))
    blocks = triton.cdiv(values, block)
    batch, window = nodes.shape
    _compact_kernel[(batch * rows.shape[0] * blocks,)](
        rows, nodes, start, table,
        rows.stride(0), rows.stride(1), rows.stride(2), rows.stride(3), table.stride(0),
        rows.shape[0], width, values, rows.shape[2], window, blocks,
        BLOCK=block, BLOCK_T=max(triton.next_power_of_2(window), 16),
        PAGE_ROWS=0 if ring else rows.shape[2],
        num_warps=config.num_warps,
    )  # fmt: skip
