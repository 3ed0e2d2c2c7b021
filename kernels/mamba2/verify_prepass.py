"""Mamba-2 verify prepass: all about the rows of a window that does not depend on ``dim``.

::

    score_tj = B_j . C_t                          per group, j over history and window
    weight_j = dt_j exp(A d(j,0))                 of the history, to the start of the window
    inside_ts = dt_s exp(A d(s,t))                of the window; -1 where s does not lead to t
    scale_t = exp(A d(t)), exp(A d(0,t))          since the checkpoint; inside the window

with ``d`` sums of ``dt`` over the rows that lead from one to the other: in a draft tree the
ancestors of a node. A bit mask per node says which those are. Writes what the readout multiplies
(``scores [batch, groups, tokens, rows]``, ``weight [batch, heads, rows]``, ``inside [batch, heads,
tokens, tokens + 2]``, ``scale [batch, heads, 2, tokens]``; live entries only) and the window's
``B`` and ``dt`` rows. A program has some rows of one group, or the decays of some heads.

The readout takes pairs of rows. So the places of `inside` begin with the pair in which the window
begins: of an odd history its first place is of the row before the window, `weight` times `scale`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dot import add_terms
from ..common.gates import clamp, softplus
from ..common.lines import lines_as_operand, matching_halves, tokens_as_operand
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..launch.config import LaunchConfig, interpreting

__all__ = ["verify_prepass"]


@triton.jit
def _scores(
    scores_ptr, b_ptr, c_ptr, row_b_ptr, table_ptr, first, history, tokens, steps,
    stride_b_t, stride_c_t, stride_row_page, stride_row_row, pages,
    STATE: tl.constexpr, BLOCK_T: tl.constexpr, PART: tl.constexpr, CHUNKS: tl.constexpr,
    E: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Products of the tokens with rows `first` to ``first + PART`` of one group; new rows move."""
    LINE: tl.constexpr = 8 * E
    NEXT: tl.constexpr = PART // 4  # rows that a thread holds lie next to each other
    p, e = tl.arange(0, PART * 8), tl.arange(0, E)[None, :]
    j = first + p // 8 % 4 * NEXT + p // 32
    at = row_offset(table_ptr, j, pages, stride_row_page, stride_row_row, PAGE_ROWS)
    q = tl.arange(0, BLOCK_T * 8)
    t = q // 64 * 8 + q // 4 % 8
    part_c = (q // 32 % 2 * 4 + q % 4)[:, None] * E + e
    c_ptr += (t * stride_c_t)[:, None] + part_c
    cs = ()
    for i in tl.static_range(CHUNKS):
        in_c = (t < steps)[:, None] & (i * LINE + part_c < STATE)
        cs += (tl.load(c_ptr + i * LINE, mask=in_c, other=0.0),)
    new = (j >= history) & (j < history + tokens)
    here = j < history + tokens
    part_b = (p % 8)[:, None] * E + e
    rows_ptr = (row_b_ptr + at)[:, None] + part_b
    new_ptr = (b_ptr + (j - history) * stride_b_t)[:, None] + part_b
    from_ptr = tl.where(new[:, None], new_ptr, rows_ptr)
    rows = ()
    for i in tl.static_range(CHUNKS):
        in_row = here[:, None] & (i * LINE + part_b < STATE)
        rows += (
            tl.load(from_ptr + i * LINE, mask=in_row, other=0.0, eviction_policy="evict_first"),
        )
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    score = tl.zeros([2 * BLOCK_T, 2 * PART], tl.float32)
    for i in tl.static_range(CHUNKS):
        tokens_of = tokens_as_operand(cs[i], INTERPRET)
        score = add_terms(score, tokens_of, lines_as_operand(rows[i], INTERPRET))
    V: tl.constexpr = min(NEXT, 4)
    score = matching_halves(score).reshape(BLOCK_T // 8, 8, NEXT // V, V, 4)
    score = score.permute(0, 2, 1, 4, 3).reshape(BLOCK_T * PART // V, V)
    q = tl.arange(0, BLOCK_T * PART // V)
    t = q // (32 * (NEXT // V)) * 8 + q // 4 % 8
    j = first + q % 4 * NEXT + q // 32 % (NEXT // V) * V
    j = j[:, None] + tl.arange(0, V)[None, :]
    # Overwritten by the next layer: kept in L2 until then, it need never go to memory.
    tl.store(
        scores_ptr + (t * BLOCK_J)[:, None] + j, score,
        mask=(t < tokens)[:, None] & (j < history + tokens), eviction_policy="evict_last",
    )  # fmt: skip
    # New rows come after the history, where nobody reads in this step.
    for i in tl.static_range(CHUNKS):
        in_row = new[:, None] & (i * LINE + part_b < STATE)
        tl.store(rows_ptr + i * LINE, rows[i], mask=in_row, eviction_policy="evict_first")


@triton.jit
def _decays(
    weight_ptr, inside_ptr, scale_ptr, dt_ptr, a_ptr, dt_bias_ptr, row_dt_ptr,
    ancestors_ptr, table_ptr, first, history, tokens,
    stride_dt_t, stride_row_page, stride_row_row, pages, dt_min, dt_max,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Decays and step sizes of heads `first` to ``first + BLOCK_H``; the window's `dt` rows."""
    h = first + tl.arange(0, BLOCK_H)
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    i = WINDOW - 1 - tl.arange(0, WINDOW)
    in_h = h < HEADS
    rate = tl.load(a_ptr + h, mask=in_h, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + h, mask=in_h, other=0.0)
    at = row_offset(table_ptr, j, pages, stride_row_page, stride_row_row, PAGE_ROWS)
    at_next = row_offset(table_ptr, j + 1, pages, stride_row_page, stride_row_row, PAGE_ROWS)
    at_new = row_offset(table_ptr, history + i, pages, stride_row_page, stride_row_row, PAGE_ROWS)
    live, more, new = j < history, j + 1 < history, i < tokens
    own = tl.load(
        row_dt_ptr + at[:, None] + h[None, :], mask=live[:, None] & in_h[None, :], other=0.0
    )
    following = tl.load(
        row_dt_ptr + at_next[:, None] + h[None, :], mask=more[:, None] & in_h[None, :], other=0.0
    )
    dt_ptr += (i * stride_dt_t)[:, None] + h[None, :]
    dt = tl.load(dt_ptr, mask=new[:, None] & in_h[None, :], other=0.0).to(tl.float32)
    after = tl.load(
        dt_ptr + stride_dt_t, mask=(i + 1 < tokens)[:, None] & in_h[None, :], other=0.0
    ).to(tl.float32)
    at_last = row_offset(
        table_ptr, tl.maximum(history - 1, 0), pages, stride_row_page, stride_row_row, PAGE_ROWS
    )
    last = tl.load(row_dt_ptr + at_last + h, mask=in_h & (history > 0), other=0.0)
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    dt += dt_bias[None, :]
    after += dt_bias[None, :]
    if SOFTPLUS:
        dt, after = softplus(dt), softplus(after)
    dt = clamp(dt, dt_min, dt_max)
    after = clamp(after, dt_min, dt_max)
    tl.store(row_dt_ptr + at_new[:, None] + h[None, :], dt, mask=new[:, None] & in_h[None, :])
    # Sums over (j, t]: shifted by one, then scanned from the end. Never a difference.
    weight = own * tl.exp(rate[None, :] * tl.cumsum(following, axis=0))
    tl.store(
        weight_ptr + (h * BLOCK_J)[None, :] + j[:, None], weight,
        mask=in_h[None, :] & live[:, None], eviction_policy="evict_last",
    )  # fmt: skip
    total = tl.sum(own, axis=0)
    WIDE: tl.constexpr = BLOCK_T + 2
    t = tokens * 0
    while t < tokens:
        leads = tl.load(ancestors_ptr + t)
        reach = tl.cumsum(tl.where((leads >> (i + 1) & 1)[:, None] != 0, after, 0.0), axis=0)
        mine = (leads >> i & 1)[:, None] != 0
        inside = tl.where(mine, dt * tl.exp(rate[None, :] * reach), -1.0)
        tl.store(
            inside_ptr + (h * (BLOCK_T * WIDE))[None, :] + (t * WIDE + history % 2 + i)[:, None],
            inside, mask=in_h[None, :] & new[:, None], eviction_policy="evict_last",
        )  # fmt: skip
        since = tl.sum(tl.where(mine, dt, 0.0), axis=0)
        # Where the history is odd, the row before the window shares a pair with its first row.
        tl.store(
            inside_ptr + h * (BLOCK_T * WIDE) + t * WIDE, last * tl.exp(rate * since),
            mask=in_h & (history % 2 != 0),
        )  # fmt: skip
        at_scale = scale_ptr + h * (2 * BLOCK_T) + t
        tl.store(at_scale, tl.exp(rate * (total + since)), mask=in_h)
        tl.store(at_scale + BLOCK_T, tl.exp(rate * since), mask=in_h)
        t += 1


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_dt_b", "stride_dt_t", "stride_row_dt_page", "stride_row_dt_row",
        "stride_ancestors_b", "stride_table_b", "pages", "steps",
    ],
    do_not_specialize_on_alignment=[
        "inside_ptr", "scale_ptr", "dt_ptr", "a_ptr", "dt_bias_ptr", "row_dt_ptr",
        "history_ptr", "window_ptr", "ancestors_ptr", "table_ptr",
    ],
)  # fmt: skip
def _verify_prepass_kernel(
    scores_ptr, weight_ptr, inside_ptr, scale_ptr, dt_ptr, b_ptr, c_ptr,
    a_ptr, dt_bias_ptr,
    row_b_ptr, row_dt_ptr,
    history_ptr, window_ptr, ancestors_ptr, table_ptr,
    stride_dt_b, stride_dt_t, stride_b_b, stride_b_t, stride_b_g,
    stride_c_b, stride_c_t, stride_c_g,
    stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_page, stride_row_dt_row,
    stride_ancestors_b, stride_table_b, pages, steps, dt_min, dt_max,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr,
    BLOCK_T: tl.constexpr, WINDOW: tl.constexpr, BLOCK_H: tl.constexpr,
    PART: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr, BLOCK_J: tl.constexpr,
    PAGE_ROWS: tl.constexpr, SOFTPLUS: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK_J // PART
    ITEMS: tl.constexpr = GROUPS * PARTS + (GROUPS * HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)  # all of the grid on axis 0
    item = pid % ITEMS
    b = (pid // ITEMS).to(tl.int64)
    if PDL:
        wait_for_previous()  # whatever made the inputs, or folded
        launch_dependents()  # only now: the readout reads those before it waits for this kernel
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return
    table_ptr += b * stride_table_b
    if item < GROUPS * PARTS:
        group, first = item // PARTS, item % PARTS * PART
        if first < history + tokens:
            _scores(
                scores_ptr + (b * GROUPS + group) * (BLOCK_T * BLOCK_J),
                b_ptr + b * stride_b_b + group * stride_b_g,
                c_ptr + b * stride_c_b + group * stride_c_g,
                row_b_ptr + group * stride_row_b_g, table_ptr, first, history, tokens, steps,
                stride_b_t, stride_c_t, stride_row_b_page, stride_row_b_row, pages,
                STATE, BLOCK_T, PART, CHUNKS, E, BLOCK_J, PAGE_ROWS, INTERPRET,
            )  # fmt: skip
    else:
        at = b * (GROUPS * HEADS)
        _decays(
            weight_ptr + at * BLOCK_J, inside_ptr + at * (BLOCK_T * (BLOCK_T + 2)),
            scale_ptr + at * (2 * BLOCK_T), dt_ptr + b * stride_dt_b,
            a_ptr, dt_bias_ptr, row_dt_ptr, ancestors_ptr + b * stride_ancestors_b, table_ptr,
            (item - GROUPS * PARTS) * BLOCK_H, history, tokens,
            stride_dt_t, stride_row_dt_page, stride_row_dt_row, pages, dt_min, dt_max,
            GROUPS * HEADS, BLOCK_T, WINDOW, BLOCK_H, BLOCK_J, PAGE_ROWS, SOFTPLUS,
        )  # fmt: skip


def verify_prepass(
    scores: torch.Tensor,
    weight: torch.Tensor,
    inside: torch.Tensor,
    scale: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    ancestors: torch.Tensor,
    table: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, ...]`` inputs of one layer; see the module.

    `ancestors` int32 ``[batch, window]`` has bit ``s`` of node ``t`` where ``s`` is ``t`` or leads
    to it.
    """
    batch, steps, groups, state = b.shape
    heads = dt.shape[2]
    block_t, block_j = scores.shape[2], scores.shape[3]
    part = min(config.rows or 32, block_j)
    width = triton.next_power_of_2(steps)
    # 16 at least: Triton does not compile a scan of fewer values than threads.
    block_h = 16
    e = 16 // b.element_size()
    items = groups * (block_j // part) + triton.cdiv(heads, block_h)
    _verify_prepass_kernel[(batch * items,)](
        scores, weight, inside, scale, dt, b, c,
        a, dt_bias,
        row_b, row_dt,
        history, window, ancestors, table,
        dt.stride(0), dt.stride(1), b.stride(0), b.stride(1), b.stride(2),
        c.stride(0), c.stride(1), c.stride(2),
        row_b.stride(0), row_b.stride(1), row_b.stride(2),
        row_dt.stride(0), row_dt.stride(1),
        ancestors.stride(0), table.stride(0), table.shape[1], steps, dt_limit[0], dt_limit[1],
        GROUPS=groups, HEADS=heads // groups, STATE=state,
        BLOCK_T=block_t, WINDOW=max(2, width), BLOCK_H=block_h,
        PART=part, CHUNKS=triton.cdiv(state, 8 * e), E=e, BLOCK_J=block_j,
        PAGE_ROWS=row_b.shape[1], SOFTPLUS=dt_softplus, INTERPRET=interpreting(), PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
