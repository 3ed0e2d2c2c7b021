"""Kimi Delta Attention prepass of a window: as `verify_prepass`, with a gate for every key channel.

::

    weight_q_tj = k_j . e^{g(j,t)} q_t          decayed_q_t = e^{g(0,t)} q_t        and so for k
    own_ts = k_s . e^{g(s,t)} q_t               solve_ts = beta_t (k_s . e^{g(s,t)} k_t)

A decay stands inside the sum over channels. Between a row of the history and ``t`` it is a product
of two about the history's end, neither above 1: one goes to the row's key and one to ``q_t`` or
``k_t``, and the matrix units do the sums, accurate to fp32. Inside the window it is one exponential
of its own. Reads the ``k`` and ``g`` rows; writes for the readout ``decayed [batch, heads, window,
2, state]`` (q, k), `weight`, `scale` (with 1 for the reads) and `pairs` as `verify` has them, and
the tokens' ``k``, ``g`` and, where kept, ``beta`` rows. A program is one value head of one
sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.dot import add_products
from ..common.gates import decay, log_decay, write_strength
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..launch.config import LaunchConfig, interpreting
from .operands import interleave, operand_terms

__all__ = ["channel_verify_prepass"]


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_beta_b", "stride_beta_t", "stride_row_scale_page", "stride_row_scale_row",
        "stride_row_beta_page", "stride_row_beta_row", "stride_ancestors_b", "stride_table_b",
        "pages",
    ],
    do_not_specialize_on_alignment=[
        "beta_ptr", "a_log_ptr", "row_scale_ptr", "row_beta_ptr",
        "ancestors_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _channel_verify_prepass_kernel(
    weight_ptr, scale_ptr, pairs_ptr, decayed_ptr,
    q_ptr, k_ptr, gate_ptr, beta_ptr, a_log_ptr, dt_bias_ptr,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_beta_ptr,
    ancestors_ptr, history_ptr, window_ptr, table_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_gate_b, stride_gate_t, stride_gate_h, stride_beta_b, stride_beta_t,
    stride_row_k_page, stride_row_k_row, stride_row_k_h,
    stride_row_scale_page, stride_row_scale_row,
    stride_row_g_page, stride_row_g_row, stride_row_g_h,
    stride_row_beta_page, stride_row_beta_row,
    stride_ancestors_b, stride_table_b, pages, query_scale, norm_eps, lower_bound,
    HEADS: tl.constexpr, RATIO: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PAGE_ROWS: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_J: tl.constexpr = 16  # the matrix units take no fewer
    pid = tl.program_id(0)  # all of the grid on axis 0
    h = pid % HEADS
    key_head = h // RATIO
    b = (pid // HEADS).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_K)
    in_n = n < STATE
    a_log, dt_bias = 0.0, 0.0
    if GATE != "log":
        a_log = tl.load(a_log_ptr + h)
        dt_bias = tl.load(dt_bias_ptr + h * STATE + n, mask=in_n, other=0.0)[None, :]
    if PDL:
        wait_for_previous()  # whatever made the inputs, or folded
        launch_dependents()  # only now: the readout reads those before it waits for this kernel

    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return

    own = t < tokens
    inside = own[:, None] & in_n[None, :]
    q_ptr += b * stride_q_b + key_head * stride_q_h
    k_ptr += b * stride_k_b + key_head * stride_k_h
    gate_ptr += b * stride_gate_b + h * stride_gate_h
    new_q = tl.load(q_ptr + t[:, None] * stride_q_t + n[None, :], mask=inside, other=0.0)
    new_k = tl.load(k_ptr + t[:, None] * stride_k_t + n[None, :], mask=inside, other=0.0)
    gate = tl.load(gate_ptr + t[:, None] * stride_gate_t + n[None, :], mask=inside, other=0.0)
    beta = tl.load(beta_ptr + b * stride_beta_b + t * stride_beta_t + h, mask=own, other=0.0)
    bits = tl.load(ancestors_ptr + b * stride_ancestors_b + t, mask=t < WINDOW, other=0)
    entry = (history + t) // PAGE_ROWS
    new_page = tl.load(table_ptr + entry, mask=entry < pages, other=0).to(tl.int64)
    new_row = (history + t) % PAGE_ROWS
    first_page = tl.load(table_ptr).to(tl.int64)
    row_g_ptr += h * stride_row_g_h
    first = tl.load(
        row_g_ptr + first_page * stride_row_g_page + n, mask=in_n & (history > 0), other=0.0
    )

    g = log_decay(gate.to(tl.float32), a_log, dt_bias, lower_bound, GATE)
    g = tl.where(inside, g, 0.0)
    beta = write_strength(beta.to(tl.float32), BETA)
    q, k = new_q.to(tl.float32), new_k.to(tl.float32)
    k_norm = tl.full([BLOCK_T], 1.0, tl.float32)
    if row_scale_ptr is not None:
        k_norm = tl.rsqrt(tl.sum(k * k, axis=1) + norm_eps)
        q *= tl.rsqrt(tl.sum(q * q, axis=1) + norm_eps)[:, None]
    q *= query_scale
    k *= k_norm[:, None]

    # The window's own rows go after the history, where nobody reads in this step.
    at = new_page * stride_row_g_page + new_row * stride_row_g_row
    tl.store(row_g_ptr + at[:, None] + n[None, :], g, mask=inside, eviction_policy="evict_first")
    if row_beta_ptr is not None:
        at = new_page * stride_row_beta_page + new_row * stride_row_beta_row
        tl.store(row_beta_ptr + at + h, beta, mask=own)
    row_k_ptr += key_head * stride_row_k_h
    if h % RATIO == 0:
        at = new_page * stride_row_k_page + new_row * stride_row_k_row
        tl.store(row_k_ptr + at[:, None] + n[None, :], new_k, mask=inside)
        if row_scale_ptr is not None:
            at = new_page * stride_row_scale_page + new_row * stride_row_scale_row
            tl.store(row_scale_ptr + at + key_head, k_norm, mask=own)

    # Sums over (s, t] of the rows that lead to t, from t down; then those since the history.
    at_head = b * HEADS + h
    pairs_ptr += at_head * (2 * BLOCK_T * BLOCK_T) + t
    since = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for s in tl.static_range(WINDOW - 1, -1, -1):
        this = (t == s)[:, None]
        row = decay(since) * tl.sum(tl.where(this, k, 0.0), axis=0)[None, :]
        solve, give = beta * tl.sum(row * k, axis=1), tl.sum(row * q, axis=1)
        reaches = ((bits >> s) & 1) != 0
        solve, give = tl.where(reaches & (t > s), solve, 0.0), tl.where(reaches, give, 0.0)
        # Overwritten by the next layer: kept in L2 until then, they need never go to memory.
        pair_ptr = pairs_ptr + s * BLOCK_T
        tl.store(pair_ptr, solve, mask=t < WINDOW, eviction_policy="evict_last")
        tl.store(pair_ptr + BLOCK_T * BLOCK_T, give, mask=t < WINDOW, eviction_policy="evict_last")
        g_s = tl.sum(tl.where(this, g, 0.0), axis=0)
        since += tl.where(reaches[:, None], g_s[None, :], 0.0)

    c = tl.arange(0, 2 * BLOCK_T)
    step = decay(since)
    wanted = operand_terms(tl.trans(interleave(step * q, step * k)), INTERPRET)
    weight_ptr += at_head * (ROWS * 2 * BLOCK_T)
    later = tl.zeros([BLOCK_K], tl.float32)  # sum over the rows of the blocks that follow
    start = (history - 1) // BLOCK_J * BLOCK_J
    while start >= 0:  # blocks of rows, the last first
        # From the end: sums over later rows scan forwards; the gates shifted by one row.
        j = start + BLOCK_J - 1 - tl.arange(0, BLOCK_J)
        live, more = j < history, j + 1 < history
        at_k = row_offset(table_ptr, j, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
        rows = tl.load(
            row_k_ptr + at_k[:, None] + n[None, :], mask=live[:, None] & in_n[None, :], other=0.0
        )
        at_g = row_offset(table_ptr, j + 1, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
        following = tl.load(
            row_g_ptr + at_g[:, None] + n[None, :], mask=more[:, None] & in_n[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        norm = tl.full([BLOCK_J], 1.0, tl.float32)
        if row_scale_ptr is not None:
            at_norm = row_offset(
                table_ptr, j, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS
            )
            norm = tl.load(row_scale_ptr + at_norm + key_head, mask=live, other=0.0)
        tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

        faded = decay(tl.cumsum(following, axis=0) + later[None, :]) * rows.to(tl.float32)
        later += tl.sum(following, axis=0)
        large = tl.zeros([BLOCK_J, 2 * BLOCK_T], tl.float32)
        large, small = add_products(large, large, operand_terms(faded, INTERPRET), wanted)
        tl.store(
            weight_ptr + j[:, None] * (2 * BLOCK_T) + c[None, :], norm[:, None] * (large + small),
            mask=live[:, None] & (c < 2 * WINDOW)[None, :], eviction_policy="evict_last",
        )  # fmt: skip
        start -= BLOCK_J

    read = exact_decay(since + (later + first)[None, :])
    decayed_ptr += at_head * (2 * BLOCK_T * STATE)
    tl.store(
        decayed_ptr + c[:, None] * STATE + n[None, :], interleave(read * q, read * k),
        mask=(c < 2 * WINDOW)[:, None] & in_n[None, :], eviction_policy="evict_last",
    )  # fmt: skip
    scale_ptr += at_head * (3 * BLOCK_T)
    tl.store(scale_ptr + c, tl.full([2 * BLOCK_T], 1.0, tl.float32), mask=c < 2 * WINDOW)
    tl.store(scale_ptr + 2 * BLOCK_T + t, beta, mask=t < WINDOW)


def channel_verify_prepass(
    weight: torch.Tensor,
    scale: torch.Tensor,
    pairs: torch.Tensor,
    decayed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    row_k: torch.Tensor,
    row_scale: torch.Tensor | None,
    row_g: torch.Tensor,
    row_beta: torch.Tensor | None,
    ancestors: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    gate_kind: str,
    beta_rule: str,
    query_scale: float,
    norm_eps: float,
    lower_bound: float,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, ...]`` inputs of one layer; see the module.

    None stands where it does in `verify_prepass`.
    """
    batch, width, heads, state = gate.shape
    block_t = scale.shape[2] // 3
    norms = row_g if row_scale is None else row_scale
    betas = row_g if row_beta is None else row_beta
    _channel_verify_prepass_kernel[(batch * heads,)](
        weight, scale, pairs, decayed, q, k, gate, beta, a_log, dt_bias,
        row_k, row_scale, row_g, row_beta,
        ancestors, history, window, table,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        gate.stride(0), gate.stride(1), gate.stride(2), beta.stride(0), beta.stride(1),
        row_k.stride(0), row_k.stride(1), row_k.stride(2), norms.stride(0), norms.stride(1),
        row_g.stride(0), row_g.stride(1), row_g.stride(2), betas.stride(0), betas.stride(1),
        ancestors.stride(0), table.stride(0), table.shape[1], query_scale, norm_eps, lower_bound,
        HEADS=heads, RATIO=heads // k.shape[2], STATE=state, WINDOW=width,
        BLOCK_T=block_t, BLOCK_K=max(16, triton.next_power_of_2(state)),
        ROWS=weight.shape[2], PAGE_ROWS=row_k.shape[1],
        GATE=gate_kind, BETA=beta_rule, INTERPRET=interpreting(), PDL=pdl,
        num_warps=max(config.num_warps, block_t // 4),  # a warp has registers for four tokens
        maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
