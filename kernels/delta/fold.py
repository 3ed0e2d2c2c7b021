"""Delta-rule fold: checkpoints advanced over their rows, every layer in one launch.

::

    S = S0 e^{g(0,h)} + sum_j u_j (e^{g(j,h)} s_j k_j)^T

with `s_j` the reciprocal norm of a key that is kept as given, and gates `g` per head (GDN) or per
head and key channel (KDA). Rows of plain formats hold ``u``. Where readouts saw a rounded
checkpoint they hold ``v``, and ``u`` is solved for with all bits of S0 (see `solve`)::

    u = M (v - S0 (e^{g(0,.)} s k))

Every product is accurate to fp32, yet made by bf16 matrix units: S0 is its high plane, which is
bf16, and two terms of the rest; ``u`` is three terms; a bf16 key is exact as it is, since its norm
and the decays multiply sums. With gates per channel they cannot, and the keys are three terms too.

A persistent grid walks (layer, fold, head), a head in blocks of rows; the length of the fold list
is read on the device, so the launch is the same in every step and fits into a CUDA graph. Source
and target page may be the same: a program reads its block before it writes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.dot import add_products, bf16_terms, dot_terms, narrow, upper_half
from ..common.rows import row_offset
from ..common.split import encode, join_planes, split_planes
from ..common.units import block_of, columns_to_units, from_units, rows_of_units, to_units
from ..launch.config import LaunchConfig, interpreting
from .solve import inverse, scan_channels, sums_between

__all__ = ["fold", "scratch_size"]


@triton.jit
def _operands(x, UNIT: tl.constexpr, PERMUTE: tl.constexpr, INTERPRET: tl.constexpr):
    """Keys ``[rows, channels]`` as terms for the matrix units, and those transposed."""
    if PERMUTE:
        x = columns_to_units(x, UNIT)
    terms = bf16_terms(x, INTERPRET)
    turned = ()
    for t in tl.static_range(len(terms)):
        turned += (tl.trans(terms[t]),)
    return terms, turned


@triton.jit
def _exact_state(high, low, WARPS: tl.constexpr, PERMUTE: tl.constexpr, INTERPRET: tl.constexpr):
    """The float32 state of two planes, and its terms for the matrix units: the high plane first."""
    state = join_planes(high, low)
    value = (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if INTERPRET:
        first = value
    else:
        first = high.to(tl.bfloat16, bitcast=True)
    rest = state - value
    second, value = upper_half(rest, INTERPRET)
    third = narrow(rest - value, INTERPRET)
    if PERMUTE:
        terms = to_units(first, WARPS), to_units(second, WARPS), to_units(third, WARPS)
    else:
        D: tl.constexpr = high.shape[1]
        N: tl.constexpr = high.shape[2]
        terms = first.reshape(D, N), second.reshape(D, N), third.reshape(D, N)
    return state, terms


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
def _fold_kernel(
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
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_J: tl.constexpr, CHANNELS: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, SOLVE: tl.constexpr, PERMUTE: tl.constexpr,
    OUT_SPLIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    WARPS: tl.constexpr = BLOCK_D // 16
    CHUNKS: tl.constexpr = BLOCK_N // UNIT
    r = tl.arange(0, BLOCK_D)
    n = tl.arange(0, CHUNKS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    tile = r[None, :, None] * STATE + n[:, None, :]
    if PERMUTE:
        r = rows_of_units(r, WARPS)
    if SOLVE or PER_CHANNEL:
        scratch_ptr += tl.program_id(0).to(tl.int64) * stride_scratch
        reads_ptr = scratch_ptr + BLOCK_J * BLOCK_J
        writes_ptr = reads_ptr + BLOCK_J * CHANNELS
        totals_ptr = writes_ptr + BLOCK_J * CHANNELS
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
        channel = tl.arange(0, BLOCK_N) + zero
        table = table_ptr + f * stride_table_b
        at_x = row_offset(table, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
        ks_ptr = row_k_ptr + layer * stride_row_k_layer + h // RATIO * stride_row_k_h
        gs_ptr = row_g_ptr + layer * stride_row_g_layer + h * stride_row_g_h
        xs_ptr = row_x_ptr + layer * stride_row_x_layer + h * stride_row_x_h
        live = j < history
        if row_scale_ptr is not None:
            scales_ptr = row_scale_ptr + layer * stride_row_scale_layer + h // RATIO
            at = row_offset(table, j, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS)
            scale = tl.load(scales_ptr + at, mask=live, other=0.0)
        else:
            scales_ptr = None
            scale = tl.where(live, 1.0, 0.0)
        if SOLVE:
            betas_ptr = row_beta_ptr + layer * stride_row_beta_layer + h
            at = row_offset(table, j, pages, stride_row_beta_page, stride_row_beta_row, PAGE_ROWS)
            beta = tl.load(betas_ptr + at, mask=live, other=0.0)
        else:
            betas_ptr = None

        # Keys as the old state meets them, `reads`, and as they enter the new one, `writes`; the
        # factors beside them are by row, `read` of the first, and `weight`, which ``u`` takes.
        reads, writes, totals = (), (), ()
        if SOLVE or PER_CHANNEL:
            tl.debug_barrier()  # the head before is done with the scratch memory
        if PER_CHANNEL:
            scan_channels(
                scratch_ptr, reads_ptr, writes_ptr, totals_ptr, zero,
                ks_ptr, scales_ptr, gs_ptr, betas_ptr, table, history, pages,
                stride_row_k_page, stride_row_k_row, stride_row_scale_page, stride_row_scale_row,
                stride_row_g_page, stride_row_g_row, stride_row_beta_page, stride_row_beta_row,
                STATE, CHANNELS, BLOCK_J, PAGE_ROWS, SOLVE,
            )  # fmt: skip
            tl.debug_barrier()
            for p in tl.static_range(PARTS):
                c = p * BLOCK_N + channel
                at = j[:, None] * CHANNELS + c[None, :]
                inside = live[:, None] & (c < STATE)[None, :]
                k = tl.load(writes_ptr + at, mask=inside, other=0.0)
                writes += (_operands(k, UNIT, PERMUTE, INTERPRET)[0],)
                if SOLVE:
                    k = tl.load(reads_ptr + at, mask=inside, other=0.0)
                    reads += (_operands(k, UNIT, PERMUTE, INTERPRET)[1],)
                total = tl.load(totals_ptr + c)
                totals += (total.reshape(CHUNKS, UNIT)[:, None, :],)
            read, weight = scale, scale
        else:
            at = row_offset(table, j, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
            g = tl.load(gs_ptr + at, mask=live, other=0.0)
            at = row_offset(table, j + 1, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
            later = tl.load(gs_ptr + at, mask=j + 1 < history, other=0.0)
            total = exact_decay(tl.sum(g, axis=0))
            gram = tl.zeros([BLOCK_J, BLOCK_J], tl.float32)
            at_k = row_offset(table, j, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
            for p in tl.static_range(PARTS):
                c = p * BLOCK_N + channel
                k = tl.load(
                    ks_ptr + at_k[:, None] + c[None, :],
                    mask=live[:, None] & (c < STATE)[None, :], other=0.0,
                )  # fmt: skip
                terms, turned = _operands(k, UNIT, PERMUTE, INTERPRET)
                writes += (terms,)
                reads += (turned,)
                totals += (total,)
                if SOLVE:
                    if len(terms) == 1:
                        gram = tl.dot(terms[0], turned[0], gram, input_precision="ieee")
                    else:
                        gram += dot_terms(terms, turned)
            read = scale * tl.exp(tl.cumsum(g, axis=0))
            weight = tl.exp(tl.cumsum(later, axis=0, reverse=True))
            if SOLVE:
                a = gram * tl.exp(sums_between(g, j, j)) * (beta * scale * scale)[:, None]
                at_a = j[:, None] * BLOCK_J + j[None, :]
                tl.store(scratch_ptr + at_a, tl.where(j[:, None] > j[None, :], a, 0.0))
                tl.debug_barrier()
            else:
                weight *= scale
        if SOLVE:
            solution = inverse(scratch_ptr, beta * scale, history, BLOCK_J, INTERPRET)
            if not PER_CHANNEL:
                solution *= weight[:, None]
            solution = _operands(solution, UNIT, False, INTERPRET)[1]  # by row, by row solved for

        old = layer * stride_in_layer + source * stride_in_page + h * stride_in_h
        new = layer * stride_out_layer + target * stride_out_page + h * stride_out_h
        for block in tl.range(0, BLOCKS):
            corner = block * BLOCK_D
            d = corner + r
            in_rows = (corner + tl.arange(0, BLOCK_D) < DIM)[None, :, None]
            before = old + corner * STATE + tile
            planes = ()
            for p in tl.static_range(PARTS):
                in_tile = in_rows & (p * BLOCK_N + n < STATE)[:, None, :]
                if SOLVE:
                    high = tl.load(in_ptr + before + p * BLOCK_N, mask=in_tile, other=0)
                    low = tl.load(in_low_ptr + before + p * BLOCK_N, mask=in_tile, other=0)
                    planes += ((high, low),)
                else:
                    plane = tl.load(in_ptr + before + p * BLOCK_N, mask=in_tile, other=0.0)
                    planes += ((plane,),)
            xs = tl.load(
                xs_ptr + at_x[:, None] + d[None, :],
                mask=live[:, None] & (d < DIM)[None, :], other=0.0,
            )  # fmt: skip
            tl.debug_barrier()  # keeps the loads above the arithmetic: all are in flight

            states = ()
            if SOLVE:
                large = tl.zeros([BLOCK_D, BLOCK_J], tl.float32)
                small = tl.zeros([BLOCK_D, BLOCK_J], tl.float32)
                for p in tl.static_range(PARTS):
                    state, parts = _exact_state(
                        planes[p][0], planes[p][1], WARPS, PERMUTE, INTERPRET
                    )
                    states += (state,)
                    large, small = add_products(large, small, parts, reads[p])
                error = tl.trans(xs).to(tl.float32) - (large + small) * read[None, :]
                us = dot_terms(bf16_terms(error, INTERPRET), solution)
            else:
                for p in tl.static_range(PARTS):
                    states += (planes[p][0].to(tl.float32),)
                us = tl.trans(weight[:, None] * xs)
            us = bf16_terms(us, INTERPRET)
            after = new + corner * STATE + tile
            for p in tl.static_range(PARTS):
                state = dot_terms(us, writes[p])
                if PERMUTE:
                    state = from_units(state, WARPS, UNIT)
                else:
                    state = state.reshape(CHUNKS, BLOCK_D, UNIT)
                state += totals[p] * states[p]
                in_tile = in_rows & (p * BLOCK_N + n < STATE)[:, None, :]
                if OUT_SPLIT:
                    high, low = split_planes(state)
                    tl.store(out_ptr + after + p * BLOCK_N, high, mask=in_tile)
                    tl.store(out_low_ptr + after + p * BLOCK_N, low, mask=in_tile)
                else:
                    if out_ptr.dtype.element_ty == tl.bfloat16:
                        state = narrow(state, INTERPRET)
                    else:
                        state = encode(state, out_ptr.dtype.element_ty)
                    tl.store(out_ptr + after + p * BLOCK_N, state, mask=in_tile)


def fold(
    out_plane: torch.Tensor,
    out_low: torch.Tensor | None,
    plane: torch.Tensor,
    low: torch.Tensor | None,
    row_k: torch.Tensor,
    row_scale: torch.Tensor | None,
    row_g: torch.Tensor,
    row_beta: torch.Tensor | None,
    row_x: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    count: torch.Tensor,
    scratch: torch.Tensor | None,
    *,
    capacity: int,
    programs: int,
    config: LaunchConfig,
) -> None:
    """Launch over ``[layers, pages, heads, dim, state]`` planes; see the module.

    Two-plane sides pass both planes as int16, with equal strides; a head's ``dim * state`` values
    are contiguous in a plane. `row_x` is ``v`` where `low` is given, and `row_beta` is needed then;
    else it is ``u``. `scratch` ``[programs, size]`` is as `scratch_size` has it.
    """
    layers, _, heads, dim, state = plane.shape
    block_d = min(config.rows or 64, block_of(dim))
    block_n = min(config.columns or 32, block_of(state))
    unit = 64 // plane.element_size()  # 16 bytes for each of 4 threads
    permute = block_n >= unit and block_d == 16 * config.num_warps
    scale_strides = (0, 0, 0) if row_scale is None else row_scale.stride()[:3]
    beta_strides = (0, 0, 0) if row_beta is None else row_beta.stride()[:3]
    _fold_kernel[(programs,)](
        out_plane, out_plane if out_low is None else out_low, plane, plane if low is None else low,
        row_k, row_scale, row_g, row_beta, row_x,
        source, target, rows, table, count, scratch,
        out_plane.stride(0), out_plane.stride(1), out_plane.stride(2),
        plane.stride(0), plane.stride(1), plane.stride(2),
        row_k.stride(0), row_k.stride(1), row_k.stride(2), row_k.stride(3),
        *scale_strides,
        row_g.stride(0), row_g.stride(1), row_g.stride(2), row_g.stride(3),
        *beta_strides,
        row_x.stride(0), row_x.stride(1), row_x.stride(2), row_x.stride(3),
        table.stride(0), 0 if scratch is None else scratch.stride(0), table.shape[1], layers,
        HEADS=heads, RATIO=heads // row_k.shape[3], DIM=dim, STATE=state,
        BLOCK_D=block_d, BLOCK_N=block_n, PARTS=triton.cdiv(state, block_n),
        UNIT=unit if permute else block_n,
        BLOCK_J=block_of(capacity), CHANNELS=block_of(state),
        PAGE_ROWS=row_k.shape[2],
        PER_CHANNEL=row_g.dim() == 5, SOLVE=low is not None, PERMUTE=permute,
        OUT_SPLIT=out_low is not None, INTERPRET=interpreting(),
        num_warps=config.num_warps, num_stages=1, maxnreg=config.registers or None,
    )  # fmt: skip


def scratch_size(capacity: int, state: int, *, solve: bool, per_channel: bool) -> int:
    """float32 values that a program needs for itself; a multiple of 16."""
    rows, channels = block_of(capacity), block_of(state)
    if per_channel:
        return rows * rows + (2 * rows + 1) * channels
    return rows * rows if solve else 0
