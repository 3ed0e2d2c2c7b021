"""The triangular system of a fold's rows: what a delta-rule row changes for the rows after it.

With ``z = s u`` (`s` the reciprocal norm of a row's key, ``k`` the key as given) the corrected
values solve ``(I + A) z = s b (v - S0 e^{g(0,.)} k s)`` with, strictly below the diagonal::

    A_ij = b_i s_i^2 (k_i . e^{g(j,i)} k_j)

The inverse is bounded where the recurrence is stable, so it is formed once per head and applied to
all of the state by the matrix units. It comes from forward substitution: repeated squaring would
lose digits where keys are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.dot import bf16_terms, dot_terms
from ..common.rows import row_offset

__all__ = ["inverse", "scan_channels", "sums_between"]


@triton.jit
def sums_between(g, i, j):
    """``g(j, i)``, the sum of gates over ``(j, i]``, for ``i > j``, else 0: a scan down from j."""
    return tl.cumsum(tl.where(i[:, None] > j[None, :], g[:, None], 0.0), axis=0)


@triton.jit
def scan_channels(
    a_ptr, reads_ptr, writes_ptr, totals_ptr, zero,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_beta_ptr, table_ptr, history, pages,
    stride_row_k_page, stride_row_k_row, stride_row_scale_page, stride_row_scale_row,
    stride_row_g_page, stride_row_g_row, stride_row_beta_page, stride_row_beta_row,
    STATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """What gates per channel make of the keys of one head, row by row, into memory.

    ``writes``: ``e^{g(j,h)} k_j``, and ``totals``: ``e^{g(0,h)}``; for the solution also `A`, and
    ``reads``: ``e^{g(0,j)} k_j``. Keys decay as the state of a plain recurrence does, by one
    row's factor after the other, all at most 1. Dead rows of reads and writes are not written.
    The pointers are those of one layer and head.
    """
    j, n = tl.arange(0, BLOCK_J) + zero, tl.arange(0, BLOCK_N) + zero
    in_n = n < STATE
    tile = j[:, None] * BLOCK_N + n[None, :]
    live = (j < history)[:, None] & in_n[None, :]
    at = row_offset(table_ptr, j, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
    gates = tl.load(row_g_ptr + at[:, None] + n[None, :], mask=live, other=0.0)
    at = row_offset(table_ptr, j, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
    keys = tl.load(row_k_ptr + at[:, None] + n[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(totals_ptr + n, exact_decay(tl.sum(gates, axis=0)))
    if SOLVE:
        tl.store(
            a_ptr + j[:, None] * BLOCK_J + j[None, :], tl.zeros([BLOCK_J, BLOCK_J], tl.float32)
        )
        tl.debug_barrier()
    since = tl.full([BLOCK_N], 1.0, tl.float32)
    i = 0
    while i < history:
        row = row_offset(table_ptr, i, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
        decay = tl.exp(tl.load(row_g_ptr + row + n, mask=in_n, other=0.0))
        keys = tl.where((j < i)[:, None], keys * decay[None, :], keys)
        if SOLVE:
            row = row_offset(table_ptr, i, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
            k = tl.load(row_k_ptr + row + n, mask=in_n, other=0.0).to(tl.float32)
            since *= decay
            tl.store(reads_ptr + i * BLOCK_N + n, since * k)
            row = row_offset(
                table_ptr, i, pages, stride_row_beta_page, stride_row_beta_row, PAGE_ROWS
            )
            factor = tl.load(row_beta_ptr + row)
            if row_scale_ptr is not None:
                row = row_offset(
                    table_ptr, i, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS
                )
                scale = tl.load(row_scale_ptr + row)
                factor *= scale * scale
            overlap = tl.sum(keys * k[None, :], axis=1)
            tl.store(a_ptr + i * BLOCK_J + j, tl.where(j < i, factor * overlap, 0.0))
        i += 1
    tl.store(writes_ptr + tile, keys)


@triton.jit
def inverse(a_ptr, start, history, BLOCK_J: tl.constexpr, INTERPRET: tl.constexpr):
    """``(I + A)^-1 diag(start)``, float32 ``[BLOCK_J, BLOCK_J]``, of the `A` in memory.

    `a_ptr` holds all rows of A, zero from the diagonal up, on 8 bytes, where the whole program sees
    it. `start` is by column.
    """
    j = tl.arange(0, BLOCK_J)
    result = tl.zeros([BLOCK_J, BLOCK_J], tl.float32)
    if BLOCK_J <= 32:
        # A column to a lane, in every warp alike; an entry of A is one load for all lanes of a
        # block. So there is nothing to exchange, and only the last of a row's products waits for
        # the row before. More than 16 rows are two blocks at once, and a product between them.
        HALF: tl.constexpr = min(BLOCK_J, 16)
        corner_ptr = a_ptr + j // HALF * (HALF * (BLOCK_J + 1))
        rows = ()
        for i in tl.static_range(HALF):
            x = tl.where(j % HALF == i, 1.0, 0.0)
            for p in tl.static_range((i + 1) // 2):
                at = corner_ptr + (i * BLOCK_J + 2 * p)
                pair = tl.load(at.to(tl.pointer_type(tl.int64)))
                x -= pair.to(tl.int32).to(tl.float32, bitcast=True) * rows[2 * p]
                if 2 * p + 1 < i:
                    x -= (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True) * rows[2 * p + 1]
            rows += (x,)
        for i in tl.static_range(HALF):
            mine = (j % HALF == i)[:, None] & (j[:, None] // HALF == j[None, :] // HALF)
            result = tl.where(mine, rows[i][None, :], result)
        if HALF < BLOCK_J:
            below = (j >= HALF)[:, None] & (j < HALF)[None, :]
            a = tl.load(a_ptr + j[:, None] * BLOCK_J + j[None, :], mask=below, other=0.0)
            terms = bf16_terms(result, INTERPRET)
            a = dot_terms(bf16_terms(a, INTERPRET), terms)
            result -= dot_terms(terms, bf16_terms(a, INTERPRET))
        result *= start[None, :]
    else:
        i = 0
        while i < history:
            row = tl.load(a_ptr + i * BLOCK_J + j)
            x = tl.where(j == i, start, 0.0) - tl.sum(row[:, None] * result, axis=0)
            result = tl.where((j == i)[:, None], x[None, :], result)
            i += 1
    return result
