"""Mamba-2 readout of windows: checkpoints and ``x`` rows stream by once for all tokens.

::

    y_t = start_t (S0 C_t) + sum_j w_tj x_j + D x_t                optionally  y_t *= silu(z_t)
    w_tj = weight_j since_t score_tj    of the history             w_ts = inside_ts score_ts

Reads the checkpoint plane ``[pages, heads, dim, state]``, the ``x`` rows, the window's ``x``, and
what `verify_prepass` wrote; writes ``y [batch, window, heads, dim]`` and the window's ``x`` rows.
A window's row is row ``history + s`` of the sequence, so that history and window are one sum.

As in the readout of one token a program does everything once: all loads, then all arithmetic. Both
products go through the matrix units, in their own order; see `..common.lines`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dot import add_terms
from ..common.gates import silu
from ..common.lines import (
    lines_as_operand,
    matching_halves,
    rows_as_operand,
    tokens_as_operand,
    weights_as_operand,
)
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import round_to
from ..launch.config import LaunchConfig, interpreting

__all__ = ["verify"]


@triton.jit
def _output_places(zero, V: tl.constexpr, WARPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Token and row of each place of the outputs, ``[places]`` and ``[places, V]``."""
    q = tl.arange(0, 8 * WARPS * BLOCK_T) + zero
    row = (q // 32 % WARPS * 8 + q // (32 * WARPS) % 2 * 4 + q % 4) * V
    return q // (64 * WARPS) * 8 + q // 4 % 8, row[:, None] + tl.arange(0, V)[None, :]


@triton.jit
def _from_state(tokens, tiles, FIRST: tl.constexpr, INTERPRET: tl.constexpr):
    """``S0 C_t`` of the rows of `tiles` from FIRST on, one for each chunk of the channels."""
    ROWS: tl.constexpr = tiles[0].shape[0] // 8
    y = tl.zeros([tokens[0][0].shape[0], 2 * ROWS], tl.float32)
    for i in tl.static_range(len(tokens)):
        y = add_terms(y, tokens[i], lines_as_operand(tiles[FIRST + i], INTERPRET))
    return matching_halves(y)


@triton.jit
def _one_by_one(
    scores_ptr, weight_ptr, inside_ptr, scale_ptr, x_ptr, row_x_ptr, table_ptr, skip,
    history, tokens, width, stride_x_t, stride_row_page, stride_row_row, pages,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    """The sum over rows where one is not finite.

    A matrix product would multiply it by a weight of 0 for the tokens that do not read it.
    """
    t, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    since = tl.load(scale_ptr + BLOCK_T + t, mask=t < tokens, other=0.0)
    y = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    j = history * 0
    while j < history + tokens:
        s = j - history
        at = row_offset(table_ptr, j, pages, stride_row_page, stride_row_row, PAGE_ROWS)
        old = tl.load(row_x_ptr + at + d, mask=(d < width) & (s < 0), other=0.0).to(tl.float32)
        new = tl.load(x_ptr + s * stride_x_t + d, mask=(d < width) & (s >= 0), other=0.0)
        weight = tl.load(weight_ptr + j, mask=s < 0, other=0.0)
        at = t * (BLOCK_T + 2) + history % 2 + s
        inside = tl.load(inside_ptr + at, mask=(t < tokens) & (s >= 0), other=-1.0)
        score = tl.load(scores_ptr + t * BLOCK_J + j, mask=t < tokens, other=0.0)
        w = tl.where(s < 0, weight * since, inside) * score + tl.where(s == t, skip, 0.0)
        reads = (t < tokens) & ((s < 0) | ~(inside < 0.0))
        term = w[:, None] * (old + new.to(tl.float32))[None, :]
        y += tl.where(reads[:, None], term, 0.0)
        j += 1
    return y


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=["stride_table_b", "pages", "steps"],
    do_not_specialize_on_alignment=[
        "scale_ptr", "d_skip_ptr", "page_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _verify_kernel(
    y_ptr, plane_ptr, scores_ptr, weight_ptr, inside_ptr, scale_ptr, x_ptr, c_ptr, z_ptr,
    d_skip_ptr, row_x_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_t, stride_y_h, stride_plane_page, stride_plane_h,
    stride_x_b, stride_x_t, stride_x_h, stride_c_b, stride_c_t, stride_c_g,
    stride_z_b, stride_z_t, stride_z_h,
    stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_table_b, pages, steps,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    V: tl.constexpr, WARPS: tl.constexpr, E: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    HAS_Z: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_D: tl.constexpr = 8 * V * WARPS
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    BLOCKS_T: tl.constexpr = BLOCK_T // 8
    LINE: tl.constexpr = 8 * E  # channels in 128 bytes of the plane
    pid = tl.program_id(0)  # all of the grid on axis 0
    first = pid % BLOCKS * BLOCK_D
    h = pid // BLOCKS % (GROUPS * HEADS)
    b = (pid // BLOCKS // (GROUPS * HEADS)).to(tl.int64)
    group = h // HEADS
    v, e = tl.arange(0, V)[None, :], tl.arange(0, E)[None, :]
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    skip = tl.load(d_skip_ptr + h)
    table_ptr += b * stride_table_b
    y_ptr += b * stride_y_b + h * stride_y_h + first
    # Row d of a head is place (warp, half, 4, V) of a block; each tile has its own order of these.
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        if PDL:
            wait_for_previous()
        t, d = _output_places(0, V, WARPS, BLOCK_T)
        zeros = tl.zeros([8 * WARPS * BLOCK_T, V], y_ptr.dtype.element_ty)
        at = (t * stride_y_t)[:, None] + d
        tl.store(y_ptr + at, zeros, mask=(t < steps)[:, None] & (first + d < DIM))
        return

    # What a step reads or writes once is first to leave L2; what the prepass wrote is worth more.
    q = tl.arange(0, 8 * WARPS * BLOCK_J)
    j = q // (64 * WARPS) * 8 + q % 4 * 2 + q // (32 * WARPS) % 2
    s = j - history
    d = (q // 32 % WARPS * 8 + q // 4 % 2 * 4 + q // 8 % 4)[:, None] * V + v
    at = row_offset(table_ptr, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    row_x_ptr += h * stride_row_x_h + first
    x_ptr += b * stride_x_b + h * stride_x_h + first
    rows = tl.load(
        tl.where(s < 0, row_x_ptr + at, x_ptr + s * stride_x_t)[:, None] + d,
        mask=(s < tokens)[:, None] & (first + d < DIM), other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    q = tl.arange(0, 32 * V * WARPS)
    d_tile = q // 32 % WARPS * (8 * V) + q // 8 % 4 * V + q // (32 * WARPS)
    plane_ptr += page * stride_plane_page + h * stride_plane_h + first * STATE
    part = (q % 8)[:, None] * E + e
    tiles = ()
    for half in tl.static_range(2):
        for i in tl.static_range(CHUNKS):
            row = d_tile + half * (4 * V)
            in_tile = (first + row < DIM)[:, None] & (i * LINE + part < STATE)
            tiles += (
                tl.load(
                    plane_ptr + (row * STATE)[:, None] + (i * LINE + part), mask=in_tile, other=0.0,
                    eviction_policy="evict_first",
                ),
            )  # fmt: skip
    # Either of these keeps the loads above the arithmetic: mixed, too few would be in flight.
    if PDL:
        wait_for_previous()  # the prepass; all that was read so far is older
        launch_dependents()
    else:
        tl.debug_barrier()
    at_h = b * (GROUPS * HEADS) + h
    scores_ptr += (b * GROUPS + group) * (BLOCK_T * BLOCK_J)
    weight_ptr += at_h * BLOCK_J
    inside_ptr += at_h * (BLOCK_T * (BLOCK_T + 2))
    scale_ptr += at_h * (2 * BLOCK_T)
    q = tl.arange(0, BLOCK_T * BLOCK_J // 2)
    t = q // (4 * BLOCK_J) * 8 + q // 4 % 8
    pair = q // 32 % (BLOCK_J // 8) * 8 + q % 4 * 2
    both = tl.arange(0, 2)[None, :]
    even = history // 2 * 2
    old = pair < even
    there = (pair < history + tokens) & (t < tokens)
    # Whole pairs: what lies beside a live value is not used below.
    factor = tl.load(
        tl.where(old, weight_ptr + pair, inside_ptr + t * (BLOCK_T + 2) + (pair - even))[:, None]
        + both,
        mask=there[:, None], other=0.0,
    )  # fmt: skip
    score = tl.load(
        scores_ptr + (t * BLOCK_J + pair)[:, None] + both, mask=there[:, None], other=0.0
    )
    token = tl.arange(0, BLOCK_T)
    since = tl.load(scale_ptr + BLOCK_T + token, mask=token < tokens, other=0.0)
    since = since.reshape(BLOCKS_T, 1, 8, 1, 1).broadcast_to(BLOCKS_T, BLOCK_J // 8, 8, 4, 2)
    since = since.reshape(BLOCK_T * BLOCK_J // 2, 2)
    # The window's rows go after the history, where nobody reads in this step.
    q = tl.arange(0, BLOCK_T * BLOCK_D // 8)
    s = q // (BLOCK_D // 8)
    d = (q % (BLOCK_D // 8) * 8)[:, None] + tl.arange(0, 8)[None, :]
    at = row_offset(table_ptr, history + s, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    in_new = (s < tokens)[:, None] & (first + d < DIM)
    new = tl.load((x_ptr + s * stride_x_t)[:, None] + d, mask=in_new, other=0.0)
    new_ptr = (row_x_ptr + at)[:, None] + d

    s = pair[:, None] + both - history
    w = factor * tl.where(old[:, None], since, 1.0)
    w = tl.where((w < 0.0) | (s >= tokens), 0.0, w * score)
    w += tl.where(s == t[:, None], skip, 0.0)
    operand = weights_as_operand(w, BLOCK_T, INTERPRET)
    start = tl.load(scale_ptr + token, mask=token < tokens, other=0.0)
    q = tl.arange(0, 8 * BLOCK_T)
    t_c = q // 64 * 8 + q // 4 % 8
    part = (q // 32 % 2 * 4 + q % 4)[:, None] * E + e
    c_ptr += b * stride_c_b + group * stride_c_g
    c_ptr += (t_c * stride_c_t)[:, None] + part
    cs = ()
    for i in tl.static_range(CHUNKS):
        in_c = (t_c < steps)[:, None] & (i * LINE + part < STATE)
        cs += (tl.load(c_ptr + i * LINE, mask=in_c, other=0.0),)

    y = add_terms(
        tl.zeros([BLOCK_T, BLOCK_D], tl.float32), operand,
        rows_as_operand(rows, WARPS, INTERPRET),
    )  # fmt: skip
    tl.store(new_ptr, new, mask=in_new, eviction_policy="evict_first")
    # [.., V, warp, 4, half] to the order of rows.
    y = y.reshape(BLOCKS_T, 8, V, WARPS, 4, 2).permute(0, 1, 3, 5, 4, 2)
    y = y.reshape(BLOCK_T, BLOCK_D)
    if tl.max(tl.max((y != y).to(tl.int32), axis=1), axis=0) > 0:
        y = _one_by_one(
            scores_ptr, weight_ptr, inside_ptr, scale_ptr, x_ptr, row_x_ptr, table_ptr, skip,
            history, tokens, DIM - first, stride_x_t, stride_row_x_page, stride_row_x_row, pages,
            BLOCK_D, BLOCK_T, BLOCK_J, PAGE_ROWS,
        )  # fmt: skip
    operands = ()
    for i in tl.static_range(CHUNKS):
        operands += (tokens_as_operand(cs[i], INTERPRET),)
    read = tl.join(
        _from_state(operands, tiles, 0, INTERPRET), _from_state(operands, tiles, CHUNKS, INTERPRET)
    )
    read = read.reshape(BLOCKS_T, 8, V, WARPS, 4, 2)
    read = read.permute(0, 1, 3, 5, 4, 2).reshape(BLOCK_T, BLOCK_D)
    y = tl.where((token < tokens)[:, None], y + read * start[:, None], 0.0)
    y = y.reshape(BLOCKS_T, 8, WARPS, 2, 4, V).permute(0, 3, 2, 1, 4, 5)
    y = y.reshape(8 * WARPS * BLOCK_T, V)
    # Unknown to the compiler, which would keep the places of zeros in registers all along.
    t, d = _output_places(tl.minimum(tokens, 0) * 8, V, WARPS, BLOCK_T)
    in_y = (t < steps)[:, None] & (first + d < DIM)
    if HAS_Z:
        z_ptr += b * stride_z_b + h * stride_z_h + first
        at = (t * stride_z_t)[:, None] + d
        z = tl.load(z_ptr + at, mask=in_y & (t < tokens)[:, None], other=0.0)
        y *= silu(z.to(tl.float32))
    at = (t * stride_y_t)[:, None] + d
    tl.store(y_ptr + at, round_to(y, y_ptr.dtype.element_ty), mask=in_y)


def verify(
    y: torch.Tensor,
    plane: torch.Tensor,
    scores: torch.Tensor,
    weight: torch.Tensor,
    inside: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    d_skip: torch.Tensor,
    row_x: torch.Tensor,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, heads, dim]`` inputs of one layer; see the module.

    A head's ``dim * state`` values are contiguous in `plane`.
    """
    batch, steps, heads, dim = x.shape
    groups, state = c.shape[2], c.shape[3]
    warps = config.num_warps
    # 16 rows at least: the matrix units take no fewer.
    v = max(2, min((config.rows or 32) // (8 * warps), triton.next_power_of_2(dim) // (8 * warps)))
    e = 16 // plane.element_size()
    gate = x if z is None else z
    _verify_kernel[(batch * heads * triton.cdiv(dim, 8 * v * warps),)](
        y, plane, scores, weight, inside, scale, x, c, gate,
        d_skip, row_x,
        page, history, window, table,
        y.stride(0), y.stride(1), y.stride(2), plane.stride(0), plane.stride(1),
        x.stride(0), x.stride(1), x.stride(2), c.stride(0), c.stride(1), c.stride(2),
        gate.stride(0), gate.stride(1), gate.stride(2),
        row_x.stride(0), row_x.stride(1), row_x.stride(2),
        table.stride(0), table.shape[1], steps,
        GROUPS=groups, HEADS=heads // groups, DIM=dim, STATE=state,
        V=v, WARPS=warps, E=e, CHUNKS=triton.cdiv(state, 8 * e),
        BLOCK_T=scores.shape[2], BLOCK_J=scores.shape[3], PAGE_ROWS=row_x.shape[1],
        HAS_Z=z is not None, INTERPRET=interpreting(), PDL=pdl,
        num_warps=warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
