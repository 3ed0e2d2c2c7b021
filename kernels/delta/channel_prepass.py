"""Kimi Delta Attention decode prepass: as `prepass`, with a gate for every key channel.

::

    weight_q_j = k_j . e^{g(j,t)} q      decayed_q = e^{g(0,t)} q      own = k . q      and so for k

with ``g(j, t)`` the sum of gates over the rows ``(j, t]``, keys and queries normalised where the
layer does that, ``q`` scaled too. A decay stands inside the sum over channels, as one exponential
of its own: no product or quotient of others. Reads the ``k`` and ``g`` rows; writes for the readout
``decayed [batch, heads, 2, state]``, ``weight [batch, heads, 2, rows]`` (each q, k; weights of
live rows only) and ``scale [batch, heads, 4]`` (1, 1, beta, own), and the token's ``k``, ``g`` and,
where kept, ``beta`` row. A program is one value head of one sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.gates import decay, log_decay, write_strength
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..launch.config import LaunchConfig

__all__ = ["channel_prepass"]


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_beta_b", "stride_row_scale_page", "stride_row_scale_row",
        "stride_row_beta_page", "stride_row_beta_row", "stride_table_b", "pages",
    ],
    do_not_specialize_on_alignment=[
        "scale_ptr", "beta_ptr", "a_log_ptr", "row_scale_ptr", "row_beta_ptr",
        "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _channel_prepass_kernel(
    weight_ptr, scale_ptr, decayed_ptr, q_ptr, k_ptr, gate_ptr, beta_ptr, a_log_ptr, dt_bias_ptr,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_beta_ptr,
    history_ptr, window_ptr, table_ptr,
    stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_gate_b, stride_gate_h, stride_beta_b,
    stride_row_k_page, stride_row_k_h, stride_row_scale_page, stride_row_scale_row,
    stride_row_g_page, stride_row_g_h, stride_row_beta_page, stride_row_beta_row,
    stride_table_b, pages, query_scale, norm_eps, lower_bound,
    HEADS: tl.constexpr, RATIO: tl.constexpr, STATE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, PAGE_ROWS: tl.constexpr,
    STRIDE_ROW_K: tl.constexpr, STRIDE_ROW_G: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # all of the grid on axis 0
    h = pid % HEADS
    key_head = h // RATIO
    b = (pid // HEADS).to(tl.int64)
    n = tl.arange(0, BLOCK_K)
    in_n = n < STATE
    a_log, dt_bias = 0.0, 0.0
    if GATE != "log":
        a_log = tl.load(a_log_ptr + h)
        dt_bias = tl.load(dt_bias_ptr + h * STATE + n, mask=in_n, other=0.0)
    if PDL:
        wait_for_previous()  # whatever made the inputs, or folded
        launch_dependents()  # only now: the readout reads those before it waits for this kernel

    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    new_q = tl.load(q_ptr + b * stride_q_b + key_head * stride_q_h + n, mask=in_n, other=0.0)
    new_k = tl.load(k_ptr + b * stride_k_b + key_head * stride_k_h + n, mask=in_n, other=0.0)
    gate = tl.load(gate_ptr + b * stride_gate_b + h * stride_gate_h + n, mask=in_n, other=0.0)
    beta = tl.load(beta_ptr + b * stride_beta_b + h).to(tl.float32)
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return

    row_g_ptr += h * stride_row_g_h
    row_k_ptr += key_head * stride_row_k_h
    here = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    g = log_decay(gate.to(tl.float32), a_log, dt_bias, lower_bound, GATE)
    beta = write_strength(beta, BETA)
    q, k = new_q.to(tl.float32), new_k.to(tl.float32)
    k_norm = 1.0
    if row_scale_ptr is not None:
        k_norm = tl.rsqrt(tl.sum(k * k, axis=0) + norm_eps)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + norm_eps)
    q *= query_scale
    k *= k_norm

    at_head = b * HEADS + h
    weight_ptr += at_head * (2 * BLOCK_J)
    since = g  # sum of the gates after a row, this token's first; never a difference
    i = tl.arange(0, ROWS)
    start = (history - 1) // ROWS * ROWS
    while start >= 0:  # blocks of rows, the last first
        rows_k, rows_g = (), ()
        for p in tl.static_range(ROWS // RUN):
            page = tl.load(
                table_ptr + start // PAGE_ROWS + p, mask=start + p * RUN < history, other=0
            ).to(tl.int64)
            first = start % PAGE_ROWS
            k_ptrs = row_k_ptr + page * stride_row_k_page + first * STRIDE_ROW_K + n
            g_ptrs = row_g_ptr + page * stride_row_g_page + first * STRIDE_ROW_G + n
            for r in tl.static_range(RUN):
                live = in_n & (start + p * RUN + r < history)
                rows_k += (tl.load(k_ptrs + r * STRIDE_ROW_K, mask=live, other=0.0),)
                row_g = tl.load(
                    g_ptrs + r * STRIDE_ROW_G, mask=live, other=0.0, eviction_policy="evict_first"
                )
                rows_g += (row_g,)
        norm = tl.full([ROWS], 1.0, tl.float32)
        if row_scale_ptr is not None:
            at = row_offset(
                table_ptr, start + i, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS
            )
            norm = tl.load(row_scale_ptr + at + key_head, mask=start + i < history, other=0.0)
        tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

        weight_q = tl.zeros([ROWS], tl.float32)
        weight_k = tl.zeros([ROWS], tl.float32)
        for r in tl.static_range(ROWS - 1, -1, -1):
            row = decay(since) * rows_k[r]
            weight_q = tl.where(i == r, tl.sum(row * q, axis=0), weight_q)
            weight_k = tl.where(i == r, tl.sum(row * k, axis=0), weight_k)
            since += rows_g[r]
        live = start + i < history
        # Overwritten by the next layer: kept in L2 until then, they need never go to memory.
        out_ptr = weight_ptr + start + i
        tl.store(out_ptr, norm * weight_q, mask=live, eviction_policy="evict_last")
        tl.store(out_ptr + BLOCK_J, norm * weight_k, mask=live, eviction_policy="evict_last")
        start -= ROWS

    read = exact_decay(since)
    order = n
    if PAIRS:  # as the readout takes them: the even channels, then the odd ones
        order = n // 2 + n % 2 * (STATE // 2)
    decayed_ptr += at_head * (2 * STATE) + order
    tl.store(decayed_ptr, read * q, mask=in_n, eviction_policy="evict_last")
    tl.store(decayed_ptr + STATE, read * k, mask=in_n, eviction_policy="evict_last")
    scale_ptr += at_head * 4
    tl.store(scale_ptr, 1.0)
    tl.store(scale_ptr + 1, 1.0)
    tl.store(scale_ptr + 2, beta)
    tl.store(scale_ptr + 3, tl.sum(q * k, axis=0))

    # The token's own row goes to index `history`, which nobody reads in this step.
    row = history % PAGE_ROWS
    at = here * stride_row_g_page + row * STRIDE_ROW_G
    tl.store(row_g_ptr + at + n, g, mask=in_n, eviction_policy="evict_first")
    if row_beta_ptr is not None:
        at = here * stride_row_beta_page + row * stride_row_beta_row
        tl.store(row_beta_ptr + at + h, beta)
    if h % RATIO == 0:
        at = here * stride_row_k_page + row * STRIDE_ROW_K
        tl.store(row_k_ptr + at + n, new_k, mask=in_n)
        if row_scale_ptr is not None:
            at = here * stride_row_scale_page + row * stride_row_scale_row
            tl.store(row_scale_ptr + at + key_head, k_norm)


def channel_prepass(
    weight: torch.Tensor,
    scale: torch.Tensor,
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
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    gate_kind: str,
    beta_rule: str,
    query_scale: float,
    norm_eps: float,
    lower_bound: float,
    pairs: bool,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, ...]`` inputs of one token and one layer; see the module.

    `pairs` is whether the readout will read the state in pairs of channels. None stands where it
    does in `prepass`.
    """
    batch, heads, state = gate.shape
    page_rows = row_k.shape[1]
    rows = min(config.rows or 8, weight.shape[3])
    norms = row_g if row_scale is None else row_scale
    betas = row_g if row_beta is None else row_beta
    _channel_prepass_kernel[(batch * heads,)](
        weight, scale, decayed, q, k, gate, beta, a_log, dt_bias,
        row_k, row_scale, row_g, row_beta,
        history, window, table,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        gate.stride(0), gate.stride(1), beta.stride(0),
        row_k.stride(0), row_k.stride(2), norms.stride(0), norms.stride(1),
        row_g.stride(0), row_g.stride(2), betas.stride(0), betas.stride(1),
        table.stride(0), table.shape[1], query_scale, norm_eps, lower_bound,
        HEADS=heads, RATIO=heads // k.shape[1], STATE=state,
        BLOCK_K=triton.next_power_of_2(state),
        BLOCK_J=weight.shape[3], ROWS=rows, RUN=min(rows, page_rows), PAGE_ROWS=page_rows,
        STRIDE_ROW_K=row_k.stride(1), STRIDE_ROW_G=row_g.stride(1),
        GATE=gate_kind, BETA=beta_rule, PAIRS=pairs, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
