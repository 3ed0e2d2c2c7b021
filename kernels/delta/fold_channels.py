"""Kimi Delta Attention fold that solves for ``u``: as `fold`, with a gate for every key channel.

::

    u = M (v - S0 (e^{g(0,.)} k s))        S = S0 e^{g(0,h)} + sum_j u_j (e^{g(j,h)} s_j k_j)^T

A key decays by channel, so here a key is three bf16 terms as well, and six products of terms make
one. The matrix units take them in few calls, each of which waits for the one before: terms of the
keys stand beside each other, or above each other against terms of ``u`` beside each other.

A persistent grid as `fold` has it. Tiles are 16 rows a warp, always in the matrix units' own order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dot import bf16_terms, narrow, upper_half
from ..common.rows import row_offset
from ..common.split import encode, join_planes, split_planes
from ..common.units import block_of, from_units, rows_of_units, to_units
from ..launch.config import LaunchConfig, interpreting
from .solve_channels import (
    above,
    beside,
    columns,
    inverse_columns,
    load_rows,
    overlaps,
    running,
)

__all__ = ["fold_channels", "scratch_size"]


@triton.jit
def _load_planes(
    in_ptr, in_low_ptr, at, block,
    D: tl.constexpr, CHUNKS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Both planes of a block of rows: tuples of ``[1, rows, 32]``, which leaves one layout."""
    r, n = tl.arange(0, D)[None, :, None], tl.arange(0, 32)[None, None, :]
    at += (r + block * D) * STATE + n
    highs, lows = (), ()
    for c in tl.static_range(CHUNKS):
        mask = (r + block * D < DIM) & (n + c * 32 < STATE)
        highs += (tl.load(in_ptr + at + c * 32, mask=mask, other=0),)
        lows += (tl.load(in_low_ptr + at + c * 32, mask=mask, other=0),)
    return highs, lows


@triton.jit
def _together(tiles, WARPS: tl.constexpr):
    """A left operand from a tuple of loaded tiles."""
    parts = ()
    for c in tl.static_range(len(tiles)):
        parts += (to_units(tiles[c], WARPS),)
    COUNT: tl.constexpr = len(tiles)
    for _ in tl.static_range(COUNT.bit_length() - 1):
        joined = ()
        for c in tl.static_range(len(parts) // 2):
            joined += (beside(parts[2 * c], parts[2 * c + 1]),)
        parts = joined
    return parts[0]  # type: ignore[misc]


@triton.jit
def _apart(x, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """The inverse of `_together`, for a product."""
    parts = (x,)
    for _ in tl.static_range(CHUNKS.bit_length() - 1):
        halves = ()
        for c in tl.static_range(len(parts)):
            left, right = tl.split(
                parts[c].reshape(x.shape[0], 2, parts[c].shape[1] // 2).permute(0, 2, 1)
            )
            halves += (left, right)
        parts = halves
    tiles = ()
    for c in tl.static_range(CHUNKS):
        tiles += (from_units(parts[c], WARPS, 32),)
    return tiles


@triton.jit
def _beside4(a, b, c, d):
    return beside(beside(a, b), beside(c, d))


@triton.jit
def _above4(a, b, c, d):
    return above(above(a, b), above(c, d))


@triton.jit
def _six(left, b4, b2):
    """The product of three terms with three, from `b4` and `b2` as `_stacked` makes them."""
    out = tl.dot(_beside4(left[2], left[0], left[1], left[1]), b4, input_precision="ieee")
    return tl.dot(beside(left[0], left[0]), b2, out, input_precision="ieee")


@triton.jit
def _stacked(terms):
    """Terms above each other: the smaller products' (for two, zero, one, one), then the rest's."""
    return _above4(terms[0], terms[2], terms[1], terms[0]), above(terms[1], terms[0])


@triton.jit
def _one_of_terms(x, BLOCK_J: tl.constexpr, INTERPRET: tl.constexpr):
    """Eight copies of `x` above each other as right operands of six terms' products, and zeros."""
    one, two, three = bf16_terms(x, INTERPRET)
    copy = tl.arange(0, 8 * BLOCK_J)[:, None] // BLOCK_J
    term = tl.where(copy == 1, three, tl.where((copy == 2) | (copy == 4), two, one))
    return tl.where(copy < 6, term, tl.zeros_like(term))


@triton.jit
def _seen(highs, lows, reads, WARPS: tl.constexpr, INTERPRET: tl.constexpr):
    """A block's float32 state, in tiles, and ``[rows, keys]``: its products with the keys."""
    reads01, reads0, reads2 = reads
    D: tl.constexpr = 16 * WARPS
    J: tl.constexpr = reads0.shape[1]
    states, firsts, seconds, thirds = (), (), (), ()
    for c in tl.static_range(len(highs)):
        value = (highs[c].to(tl.int32) << 16).to(tl.float32, bitcast=True)
        if INTERPRET:
            firsts += (value,)
        else:
            firsts += (highs[c].to(tl.bfloat16, bitcast=True),)
        state = join_planes(highs[c], lows[c])
        states += (state,)
        rest = state - value
        second, value = upper_half(rest, INTERPRET)
        seconds += (second,)
        thirds += (narrow(rest - value, INTERPRET),)
    first = _together(firsts, WARPS)
    upper = tl.dot(first, reads01, input_precision="ieee")
    last = tl.dot(first, reads2, input_precision="ieee")
    last = tl.dot(_together(thirds, WARPS), reads0, last, input_precision="ieee")
    lower = tl.dot(_together(seconds, WARPS), reads01, input_precision="ieee")
    large, small = tl.split(upper.reshape(D, 2, J).permute(0, 2, 1))
    middle, lower = tl.split(lower.reshape(D, 2, J).permute(0, 2, 1))
    return states, large + ((last + lower) + (middle + small))


@triton.jit
def _advance(
    highs, lows, operands, block, rest,
    WARPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, OUT_SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """A block of a head's rows over all of its input rows, and its store."""
    D: tl.constexpr = 16 * WARPS
    CHUNKS: tl.constexpr = len(highs)
    reads, solution, writes4, writes2 = operands
    out_ptr, out_low_ptr, xs_ptr, totals_ptr, at, at_x, live, scale = rest
    d = rows_of_units(tl.arange(0, D), WARPS) + block * D
    xs = tl.load(
        xs_ptr + at_x[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0
    )
    states, seen = _seen(highs, lows, reads, WARPS, INTERPRET)
    error = tl.trans(xs).to(tl.float32) - seen * scale[None, :]
    one, two, three = bf16_terms(error, INTERPRET)
    us = _beside4(beside(three, one), beside(two, two), beside(one, one), beside(one, one))
    us = tl.dot(us, solution, input_precision="ieee")
    added = _apart(_six(bf16_terms(us, INTERPRET), writes4, writes2), WARPS, CHUNKS)
    r, n = tl.arange(0, D)[None, :, None], tl.arange(0, 32)
    at += (r + block * D) * STATE + n[None, None, :]
    for c in tl.static_range(CHUNKS):
        total = tl.load(totals_ptr + c * 32 + n)
        state = added[c] + total[None, None, :] * states[c]
        mask = (r + block * D < DIM) & (n + c * 32 < STATE)[None, None, :]
        if OUT_SPLIT:
            high, low = split_planes(state)
            tl.store(out_ptr + at + c * 32, high, mask=mask)
            tl.store(out_low_ptr + at + c * 32, low, mask=mask)
        else:
            tl.store(out_ptr + at + c * 32, encode(state, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing; and one
    # kernel serves the fold of all layers and of one.
    do_not_specialize=[
        "stride_row_scale_layer", "stride_row_scale_page", "stride_row_scale_row",
        "stride_row_beta_layer", "stride_row_beta_page", "stride_row_beta_row",
        "stride_table_b", "pages", "num_layers",
    ],
    do_not_specialize_on_alignment=[
        "row_scale_ptr", "row_beta_ptr",
        "source_ptr", "target_ptr", "rows_ptr", "table_ptr", "count_ptr",
    ],
)  # fmt: skip
def _fold_channels_kernel(
    out_ptr, out_low_ptr, in_ptr, in_low_ptr,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_beta_ptr, row_x_ptr,
    source_ptr, target_ptr, rows_ptr, table_ptr, count_ptr, scratch_ptr,
    stride_out_layer, stride_out_page, stride_out_h,
    stride_in_layer, stride_in_page, stride_in_h,
    stride_row_k_layer, stride_row_k_page, stride_row_k_row, stride_row_k_h,
    stride_row_scale_layer, stride_row_scale_page, stride_row_scale_row,
    stride_row_g_layer, stride_row_g_page, stride_row_g_row, stride_row_g_h,
    stride_row_beta_layer, stride_row_beta_page, stride_row_beta_row,
    stride_row_x_layer, stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_table_b, stride_scratch, pages, num_layers,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    OUT_SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    WARPS: tl.constexpr = BLOCK_D // 16
    CHUNKS: tl.constexpr = CHANNELS // 32
    scratch_ptr += tl.program_id(0).to(tl.int64) * stride_scratch
    decays_ptr = scratch_ptr + BLOCK_J * BLOCK_J
    keys_ptr = decays_ptr + (BLOCK_J + 1) * CHANNELS
    totals_ptr = keys_ptr + BLOCK_J * CHANNELS
    factors_ptr = totals_ptr + CHANNELS
    starts_ptr = factors_ptr + BLOCK_J
    c = tl.arange(0, CHANNELS)
    tl.store(decays_ptr + BLOCK_J * CHANNELS + c, tl.full([CHANNELS], 1.0, tl.float32))
    count = tl.load(count_ptr)
    item = tl.program_id(0)
    while item < count * num_layers * HEADS:
        h = item % HEADS
        f = item // HEADS % count
        layer = (item // HEADS // count).to(tl.int64)
        item += tl.num_programs(0)
        source = tl.load(source_ptr + f).to(tl.int64)
        target = tl.load(target_ptr + f).to(tl.int64)
        history = tl.load(rows_ptr + f)
        # Unknown to the compiler, which would keep what follows from the ranges from head to head,
        # and has no registers left for that; the 16 leaves wide loads aligned.
        zero = tl.minimum(history, 0) * 16
        j = tl.arange(0, BLOCK_J) + zero
        live = j < history
        table = table_ptr + f * stride_table_b
        # The channel at a place of the matrix units' order; see `to_units`.
        c = tl.arange(0, CHANNELS) + zero
        n = c // 32 * 32 + c % 8 // 2 * 8 + c % 32 // 8 * 2 + c % 2
        keys = load_rows(
            row_k_ptr + layer * stride_row_k_layer + h // RATIO * stride_row_k_h, table, n,
            history, pages, stride_row_k_page, stride_row_k_row, zero, STATE, BLOCK_J, PAGE_ROWS,
        )  # fmt: skip
        gates = load_rows(
            row_g_ptr + layer * stride_row_g_layer + h * stride_row_g_h, table, n,
            history, pages, stride_row_g_page, stride_row_g_row, zero, STATE, BLOCK_J, PAGE_ROWS,
        )  # fmt: skip
        at = row_offset(table, j, pages, stride_row_beta_page, stride_row_beta_row, PAGE_ROWS)
        betas_ptr = row_beta_ptr + layer * stride_row_beta_layer + h
        beta = tl.load(betas_ptr + at, mask=live, other=0.0)
        if row_scale_ptr is not None:
            scales_ptr = row_scale_ptr + layer * stride_row_scale_layer + h // RATIO
            at = row_offset(table, j, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS)
            scale = tl.load(scales_ptr + at, mask=live, other=0.0)
        else:
            scale = tl.where(live, 1.0, 0.0)
        at_x = row_offset(table, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
        xs_ptr = row_x_ptr + layer * stride_row_x_layer + h * stride_row_x_h
        old = layer * stride_in_layer + source * stride_in_page + h * stride_in_h + zero
        new = layer * stride_out_layer + target * stride_out_page + h * stride_out_h + zero
        tl.debug_barrier()  # the head before is done with the scratch memory; all loads in flight

        tl.store(factors_ptr + j, beta * scale * scale)
        tl.store(starts_ptr + j, beta * scale)
        reads, writes = running(keys, gates, decays_ptr, keys_ptr, totals_ptr, n, CHANNELS)
        tl.debug_barrier()
        terms = bf16_terms(columns(reads), INTERPRET)
        reads = beside(terms[0], terms[1]), terms[0], terms[2]
        terms = bf16_terms(columns(writes), INTERPRET)
        turned = (tl.trans(terms[0]), tl.trans(terms[1]), tl.trans(terms[2]))
        writes4, writes2 = _stacked(turned)
        overlaps(scratch_ptr, factors_ptr, decays_ptr, keys_ptr, zero, CHANNELS, BLOCK_J)
        tl.debug_barrier()
        solution = inverse_columns(scratch_ptr, starts_ptr, zero, 8, BLOCK_J)
        solution = _one_of_terms(solution, BLOCK_J, INTERPRET)

        operands = (reads, solution, writes4, writes2)
        rest = (out_ptr, out_low_ptr, xs_ptr, totals_ptr + zero, new, at_x, live, scale)
        for block in tl.range(0, BLOCKS):
            highs, lows = _load_planes(in_ptr, in_low_ptr, old, block, BLOCK_D, CHUNKS, DIM, STATE)
            _advance(highs, lows, operands, block, rest, WARPS, DIM, STATE, OUT_SPLIT, INTERPRET)


def scratch_size(capacity: int, state: int) -> int:
    """float32 values that a program needs for itself; a multiple of 16."""
    rows, channels = block_of(capacity), max(32, block_of(state))
    return rows * rows + (2 * rows + 2) * channels + 2 * rows


def fold_channels(
    out_plane: torch.Tensor,
    out_low: torch.Tensor | None,
    plane: torch.Tensor,
    low: torch.Tensor,
    row_k: torch.Tensor,
    row_scale: torch.Tensor | None,
    row_g: torch.Tensor,
    row_beta: torch.Tensor,
    row_v: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    count: torch.Tensor,
    scratch: torch.Tensor,
    *,
    capacity: int,
    programs: int,
    config: LaunchConfig,
) -> None:
    """Launch over ``[layers, pages, heads, dim, state]`` planes; see the module and `fold`.

    `scratch` ``[programs, size]`` is as `scratch_size` has it. A tile has 16 rows to a warp.
    """
    layers, _, heads, dim, state = plane.shape
    scale_strides = (0, 0, 0) if row_scale is None else row_scale.stride()[:3]
    _fold_channels_kernel[(programs,)](
        out_plane, out_plane if out_low is None else out_low, plane, low,
        row_k, row_scale, row_g, row_beta, row_v,
        source, target, rows, table, count, scratch,
        out_plane.stride(0), out_plane.stride(1), out_plane.stride(2),
        plane.stride(0), plane.stride(1), plane.stride(2),
        row_k.stride(0), row_k.stride(1), row_k.stride(2), row_k.stride(3),
        *scale_strides,
        row_g.stride(0), row_g.stride(1), row_g.stride(2), row_g.stride(3),
        *row_beta.stride()[:3],
        row_v.stride(0), row_v.stride(1), row_v.stride(2), row_v.stride(3),
        table.stride(0), scratch.stride(0), table.shape[1], layers,
        HEADS=heads, RATIO=heads // row_k.shape[3], DIM=dim, STATE=state,
        BLOCK_D=16 * config.num_warps, CHANNELS=max(32, block_of(state)),
        BLOCK_J=block_of(capacity), PAGE_ROWS=row_k.shape[2],
        OUT_SPLIT=out_low is not None, INTERPRET=interpreting(),
        num_warps=config.num_warps, num_stages=1, maxnreg=config.registers or None,
    )  # fmt: skip
