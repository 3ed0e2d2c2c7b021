"""Products of a few tokens with rows of memory, on the matrix units, straight from the loads.

A warp reads 128 bytes of four rows at a time, 16 bytes a thread: whole cache lines. The matrix
units want the columns of a right operand in eight groups of four threads. So each half of a line
counts as a column of its own, against tokens that also come twice, once for either half; of the
products those of matching halves are added. The left operand has room for that: it never has fewer
than 16 rows, and there are rarely more than 8 tokens.

Tiles are ``[places, values]`` with the values of one load of a thread last, which leaves no choice
of a layout; the functions here rename index bits until they are operands, which moves no data
within one warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dot import bf16_terms

__all__ = [
    "lines_as_operand",
    "matching_halves",
    "rows_as_operand",
    "tokens_as_operand",
    "weights_as_operand",
]


@triton.jit
def lines_as_operand(x, INTERPRET: tl.constexpr):
    """Terms of ``[channels / 2, 2 rows]`` from ``[8 rows, E]``: place ``8 row + part of a line``.

    The right operand of a product with `tokens_as_operand`. A column is (row, half of its line).
    """
    E: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[0] // 8
    parts = bf16_terms(x, INTERPRET)
    terms = ()
    for i in tl.static_range(len(parts)):
        term = parts[i].reshape(ROWS, 2, 4, E // 2, 2).permute(3, 2, 4, 0, 1)
        terms += (term.reshape(4 * E, 2 * ROWS),)
    return terms


@triton.jit
def tokens_as_operand(x, INTERPRET: tl.constexpr):
    """Terms of ``[2 tokens, channels / 2]`` from ``[8 tokens, E]``.

    Place ``((block of 8 tokens, half of a line), token of the block, quarter of the half)``.
    """
    E: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[0] // 4
    parts = bf16_terms(x, INTERPRET)
    terms = ()
    for i in tl.static_range(len(parts)):
        term = parts[i].reshape(ROWS, 4, E // 2, 2).permute(0, 2, 1, 3)
        terms += (term.reshape(ROWS, 4 * E),)
    return terms


@triton.jit
def matching_halves(x):
    """``[tokens / 8, 8, rows]`` from products ``[2 tokens, 2 rows]`` of halves with halves."""
    BLOCKS: tl.constexpr = x.shape[0] // 16
    ROWS: tl.constexpr = x.shape[1] // 2
    first, second = tl.split(x.reshape(BLOCKS, 2, 8, ROWS, 2).permute(0, 2, 3, 1, 4))
    first, _ = tl.split(first)
    _, second = tl.split(second)
    return first + second


@triton.jit
def weights_as_operand(w, BLOCK_T: tl.constexpr, INTERPRET: tl.constexpr):
    """Terms of ``[tokens, rows]`` from ``[rows tokens / 2, 2]``, for `rows_as_operand`.

    Place ``(block of 8 tokens, block of 8 rows, token, pair of rows)``.
    """
    BLOCKS: tl.constexpr = BLOCK_T // 8
    ROWS: tl.constexpr = w.shape[0] * 2 // BLOCK_T
    parts = bf16_terms(w, INTERPRET)
    terms = ()
    for i in tl.static_range(len(parts)):
        term = parts[i].reshape(BLOCKS, ROWS // 8, 8, 4, 2).permute(0, 2, 1, 3, 4)
        terms += (term.reshape(BLOCK_T, ROWS),)
    return terms


@triton.jit
def rows_as_operand(x, WARPS: tl.constexpr, INTERPRET: tl.constexpr):
    """Terms of ``[rows, columns]`` from ``[8 WARPS rows, V]``, for `weights_as_operand`.

    Place ``(block of 8 rows, row % 2, warp, 4, 2, row // 2 % 4)``; a column is ``(V, warp, 4, 2)``.
    """
    V: tl.constexpr = x.shape[1]
    ROWS: tl.constexpr = x.shape[0] // (8 * WARPS)
    parts = bf16_terms(x, INTERPRET)
    terms = ()
    for i in tl.static_range(len(parts)):
        term = parts[i].reshape(ROWS // 8, 2, WARPS, 4, 2, 4, V).permute(0, 5, 1, 6, 2, 3, 4)
        terms += (term.reshape(ROWS, V * WARPS * 8),)
    return terms
