"""Tiles in the order in which the matrix units hold their operands and products.

There a thread holds rows 8 apart and pairs of columns 8 apart; a load gives it 16 bytes of
neighbours, so four threads a *unit* of columns: 32 of 16 bits or 16 of 32. So the other operands
come with their rows and columns permuted, and a tile's index bits are renamed on the way in and
out: that moves no data, where a change of layout would go through shared memory. It needs 16 rows
to a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_of", "columns_to_units", "from_units", "rows_of_units", "to_units"]


@triton.jit
def rows_of_units(r, WARPS: tl.constexpr):
    """Which row of a loaded tile the units' row `r` is."""
    return r % 8 + r // 8 % 2 * (8 * WARPS) + r // 16 * 8


@triton.jit
def columns_to_units(x, UNIT: tl.constexpr):
    """``[rows, columns]`` with the columns as `to_units` puts them."""
    CHUNKS: tl.constexpr = x.shape[1] // UNIT
    y = x.reshape(x.shape[0], CHUNKS, 4, UNIT // 8, 2).permute(0, 1, 3, 2, 4)
    return y.reshape(x.shape[0], x.shape[1])


@triton.jit
def to_units(x, WARPS: tl.constexpr):
    """``[chunks, 16 WARPS, UNIT]`` in order to ``[16 WARPS, columns]`` as an operand has them."""
    CHUNKS: tl.constexpr = x.shape[0]
    UNIT: tl.constexpr = x.shape[2]
    x = x.reshape(CHUNKS, 2, WARPS, 8, 4, UNIT // 8, 2)
    return x.permute(2, 1, 3, 0, 5, 4, 6).reshape(16 * WARPS, CHUNKS * UNIT)


@triton.jit
def from_units(x, WARPS: tl.constexpr, UNIT: tl.constexpr):
    """The inverse of `to_units`, for a product."""
    CHUNKS: tl.constexpr = x.shape[1] // UNIT
    x = x.reshape(WARPS, 2, 8, CHUNKS, UNIT // 8, 4, 2)
    return x.permute(3, 1, 0, 2, 5, 4, 6).reshape(CHUNKS, 16 * WARPS, UNIT)


def block_of(size: int) -> int:
    """The power of two that holds `size`; the matrix units take no fewer than 16 of anything."""
    return max(16, 1 << (size - 1).bit_length())
