"""What gates per key channel make of the rows of one head, for a fold that solves for ``u``.

As in `solve`, with the decay inside the sum over channels::

    A_ij = b_i s_i^2 sum_n k_in e^{g_n(j,i)} k_jn

Decays are running products of the rows' own factors, all at most 1: no difference of sums, and no
quotient. Where a row at a time is enough a thread has a channel of every row, so the products stay
in registers and come out as operands of the matrix units; the overlaps go through memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.decay import exact_decay

__all__ = ["above", "beside", "columns", "inverse_columns", "load_rows", "overlaps", "running"]


@triton.jit
def columns(rows):
    """``[places, rows]`` from a tuple of ``[places]``, as many as a power of two; moves nothing."""
    PLACES: tl.constexpr = rows[0].shape[0]
    COUNT: tl.constexpr = len(rows)
    for _ in tl.static_range(COUNT.bit_length() - 1):
        joined = ()
        for i in tl.static_range(len(rows) // 2):
            joined += (tl.join(rows[i], rows[i + len(rows) // 2]),)
        rows = joined
    return rows[0].reshape(PLACES, COUNT)


@triton.jit
def beside(x, y):
    """``[A, 2 B]`` from two ``[A, B]``; moves nothing."""
    return tl.join(x, y).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def above(x, y):
    """``[2 A, B]`` from two ``[A, B]``; moves nothing."""
    return tl.join(x, y).permute(2, 0, 1).reshape(2 * x.shape[0], x.shape[1])


@triton.jit
def load_rows(
    ptr, table_ptr, n, history, pages, stride_page, stride_row, zero,
    STATE: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """The channels `n` of every row of a head as a tuple; zeros of dead rows."""
    RUN: tl.constexpr = min(BLOCK_J, PAGE_ROWS)
    rows = ()
    for p in tl.static_range(BLOCK_J // RUN):
        entry = zero + p
        page = tl.load(table_ptr + entry, mask=entry < pages, other=0).to(tl.int64)
        first_ptr = ptr + page * stride_page + n
        for r in tl.static_range(RUN):
            live = (n < STATE) & (p * RUN + r < history)
            rows += (tl.load(first_ptr + r * stride_row, mask=live, other=0.0),)
    return rows


@triton.jit
def running(keys, gates, decays_ptr, keys_ptr, totals_ptr, n, CHANNELS: tl.constexpr):
    """Tuples of ``e^{g(0,j)} k_j`` and of ``e^{g(j,h)} k_j``, by row.

    Into memory go ``e^{g_j}`` and ``k_j`` ``[rows, CHANNELS]``, for `overlaps`, and ``e^{g(0,h)}``.
    """
    ROWS: tl.constexpr = len(keys)
    decays, wide, reads = (), (), ()
    total = tl.zeros_like(gates[0])
    since = tl.full([CHANNELS], 1.0, tl.float32)
    for j in tl.static_range(ROWS):
        k = keys[j].to(tl.float32)
        decay = tl.exp(gates[j])
        tl.store(decays_ptr + j * CHANNELS + n, decay)
        tl.store(keys_ptr + j * CHANNELS + n, k)
        total += gates[j]
        since *= decay
        reads += (since * k,)
        decays += (decay,)
        wide += (k,)
    tl.store(totals_ptr + n, exact_decay(total))
    writes = (wide[ROWS - 1],)
    after = tl.full([CHANNELS], 1.0, tl.float32)
    for i in tl.static_range(ROWS - 1):
        after *= decays[ROWS - 1 - i]
        writes = (after * wide[ROWS - 2 - i],) + writes  # noqa: RUF005
    return reads, writes


@triton.jit
def overlaps(
    a_ptr, factors_ptr, decays_ptr, keys_ptr, zero, CHANNELS: tl.constexpr, BLOCK_J: tl.constexpr
):
    """`A` into memory, zero from the diagonal up, from what `running` put there.

    `factors_ptr` has ``b_i s_i^2``. A thread has 4 neighbouring channels of every 32 of a row, so
    three shuffles to a sum. Row BLOCK_J of the decays is ones: a row starts at its own place.
    """
    LANES: tl.constexpr = 32
    RUN: tl.constexpr = 16
    CHUNKS: tl.constexpr = CHANNELS // LANES
    place = tl.arange(0, BLOCK_J * CHANNELS)
    j = place // LANES % BLOCK_J + zero
    # Of what is added up here, the first is a constant to each register.
    n = place // (LANES * BLOCK_J) * LANES + (place % LANES + zero)
    keys = tl.load(keys_ptr + j * CHANNELS + n)
    if BLOCK_J == RUN:
        _overlaps_of(keys, a_ptr, factors_ptr, decays_ptr, keys_ptr, j, n, 0, RUN, CHUNKS, BLOCK_J)
    else:
        first = zero
        while first < BLOCK_J:
            keys = _overlaps_of(
                keys, a_ptr, factors_ptr, decays_ptr, keys_ptr, j, n, first, RUN, CHUNKS, BLOCK_J
            )  # fmt: skip
            first += RUN


@triton.jit
def _overlaps_of(
    keys, a_ptr, factors_ptr, decays_ptr, keys_ptr, j, n, first,
    RUN: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """RUN rows of `A` from row `first`, and the keys as they are after these."""
    LANES: tl.constexpr = 32
    sums = ()
    for r in tl.static_range(RUN):
        i = first + r
        row = tl.where(j < i, i, BLOCK_J) * (CHUNKS * LANES)
        keys *= tl.load(decays_ptr + row + n)
        products = keys * tl.load(keys_ptr + i * (CHUNKS * LANES) + n)
        sums += (tl.sum(tl.sum(products.reshape(CHUNKS, BLOCK_J, LANES), axis=0), axis=1),)
    i = tl.arange(0, RUN)[None, :] + first
    j = tl.arange(0, BLOCK_J)[:, None]
    a = columns(sums) * tl.load(factors_ptr + i)
    tl.store(a_ptr + i * BLOCK_J + j, tl.where(j < i, a, 0.0))
    return keys


@triton.jit
def inverse_columns(a_ptr, starts_ptr, zero, COPIES: tl.constexpr, BLOCK_J: tl.constexpr):
    """The transpose of ``(I + A)^-1 diag(starts)``, ``[COPIES x by column, by row]``.

    A column is a thread's, in as many copies; an entry of A, in memory below the diagonal and on 8
    bytes, is one load for all; only the last of a row's products waits for the row before.
    """
    j = tl.arange(0, COPIES * BLOCK_J) % BLOCK_J + zero
    start = tl.load(starts_ptr + j)
    a_ptr += zero
    rows = ()
    for i in tl.static_range(BLOCK_J):
        x = tl.where(j == i, start, 0.0)
        for p in tl.static_range((i + 1) // 2):
            pair = tl.load((a_ptr + (i * BLOCK_J + 2 * p)).to(tl.pointer_type(tl.int64)))
            x -= pair.to(tl.int32).to(tl.float32, bitcast=True) * rows[2 * p]
            if 2 * p + 1 < i:
                x -= (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True) * rows[2 * p + 1]
        rows += (x,)
    return columns(rows)
