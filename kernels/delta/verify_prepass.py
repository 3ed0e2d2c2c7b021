"""Gated DeltaNet prepass of a window of tokens: all about the rows that does not depend on ``dim``.

::

    weight_q_tj = e^{g(j,t)} (k_j . q_t)        read_q_t = e^{g(0,t)}           and so for k
    own_ts = e^{g(s,t)} (k_s . q_t)             solve_ts = beta_t e^{g(s,t)} (k_s . k_t)

with ``j`` a row of the history and ``s`` one of the window that leads to ``t``: ``s <= t`` for
`own`, ``s < t`` for `solve`, else both are 0. ``g(j, t)`` is the sum of gates over the rows after
``j`` that lead to ``t``, itself included; which they are, the bits of ``ancestors_t`` say. Keys and
queries are normalised where the layer does that, ``q`` scaled too.

A sum from a row of the history to ``t`` is one to the history's end and one from there, so its
exponential is a product of two, neither above 1. The readout takes ``q`` and ``k`` as given, so
their norms are in ``read_q`` and ``read_k``. Reads the ``k`` and ``g`` rows; writes for the readout
`weight`, `scale` and `pairs` (see `verify`), and the tokens' ``k``, ``g`` and, where kept, ``beta``
rows. A program is one key head of one sequence.
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
from .operands import operand_terms

__all__ = ["verify_prepass"]


@triton.jit
def _overlaps(keys, x, INTERPRET: tl.constexpr):
    """``keys @ x^T`` in float32, of two that have one type; products of 16-bit values are exact."""
    out = tl.zeros([keys.shape[0], x.shape[0]], tl.float32)
    x = tl.trans(x)
    if keys.dtype == tl.float32:
        out, small = add_products(
            out, out, operand_terms(keys, INTERPRET), operand_terms(x, INTERPRET)
        )
        out += small
    elif INTERPRET:
        out = tl.dot(keys.to(tl.float32), x.to(tl.float32), out, input_precision="ieee")
    else:
        out = tl.dot(keys, x, out)
    return out


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_gate_b", "stride_gate_t", "stride_beta_b", "stride_beta_t",
        "stride_row_scale_page", "stride_row_scale_row",
        "stride_row_g_page", "stride_row_g_row", "stride_row_beta_page", "stride_row_beta_row",
        "stride_ancestors_b", "stride_table_b", "pages",
    ],
    do_not_specialize_on_alignment=[
        "gate_ptr", "beta_ptr", "a_log_ptr", "dt_bias_ptr", "row_scale_ptr", "row_g_ptr",
        "row_beta_ptr", "ancestors_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _verify_prepass_kernel(
    weight_ptr, scale_ptr, pairs_ptr, q_ptr, k_ptr, gate_ptr, beta_ptr, a_log_ptr, dt_bias_ptr,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_beta_ptr,
    ancestors_ptr, history_ptr, window_ptr, table_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_gate_b, stride_gate_t, stride_beta_b, stride_beta_t,
    stride_row_k_page, stride_row_k_row, stride_row_k_h,
    stride_row_scale_page, stride_row_scale_row,
    stride_row_g_page, stride_row_g_row, stride_row_beta_page, stride_row_beta_row,
    stride_ancestors_b, stride_table_b, pages, query_scale, norm_eps,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr, ROWS: tl.constexpr,
    PAGE_ROWS: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # all of the grid on axis 0
    key_head = pid % KEY_HEADS
    b = (pid // KEY_HEADS).to(tl.int64)
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    t = tl.arange(0, BLOCK_T)
    s = tl.arange(0, 16)  # the window's rows; the matrix units take no fewer
    n = tl.arange(0, BLOCK_K)
    in_n = n < STATE
    if PDL:
        wait_for_previous()  # whatever made the inputs, or folded
        launch_dependents()  # only now: the readout reads those before it waits for this kernel

    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    at_k = row_offset(table_ptr, j, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
    at_g = row_offset(table_ptr, j + 1, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
    q_ptr += b * stride_q_b + key_head * stride_q_h
    k_ptr += b * stride_k_b + key_head * stride_k_h
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return

    own, here = t < tokens, s < tokens
    inside = own[:, None] & in_n[None, :]
    q = tl.load(q_ptr + t[:, None] * stride_q_t + n[None, :], mask=inside, other=0.0)
    k = tl.load(k_ptr + t[:, None] * stride_k_t + n[None, :], mask=inside, other=0.0)
    keys = tl.load(
        k_ptr + s[:, None] * stride_k_t + n[None, :], mask=here[:, None] & in_n[None, :], other=0.0
    )
    row_k_ptr += key_head * stride_row_k_h
    live, more = j < history, j + 1 < history
    rows = tl.load(
        row_k_ptr + at_k[:, None] + n[None, :], mask=live[:, None] & in_n[None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    row_norm = tl.full([BLOCK_J], 1.0, tl.float32)
    if row_scale_ptr is not None:
        at = row_offset(table_ptr, j, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS)
        row_norm = tl.load(row_scale_ptr + at + key_head, mask=live, other=0.0)
    first_page = tl.load(table_ptr).to(tl.int64)
    entry = (history + t) // PAGE_ROWS
    new_page = tl.load(table_ptr + entry, mask=entry < pages, other=0).to(tl.int64)
    new_row = (history + t) % PAGE_ROWS
    gate_ptr += b * stride_gate_b + t * stride_gate_t
    beta_ptr += b * stride_beta_b + t * stride_beta_t
    gates, betas, following, firsts = (), (), (), ()
    for i in tl.static_range(RATIO):
        h = key_head * RATIO + i
        gates += (tl.load(gate_ptr + h, mask=own, other=0.0).to(tl.float32),)
        betas += (tl.load(beta_ptr + h, mask=own, other=0.0).to(tl.float32),)
        following += (tl.load(row_g_ptr + at_g + h, mask=more, other=0.0),)
        first = tl.load(row_g_ptr + first_page * stride_row_g_page + h, mask=history > 0, other=0.0)
        firsts += (first,)
    bits = tl.load(ancestors_ptr + b * stride_ancestors_b + t, mask=t < WINDOW, other=0)
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    seen_q, seen_k = _overlaps(rows, q, INTERPRET), _overlaps(rows, k, INTERPRET)
    near_q, near_k = _overlaps(keys, q, INTERPRET), _overlaps(keys, k, INTERPRET)
    k_norm = tl.full([BLOCK_T], 1.0, tl.float32)
    q_norm = tl.full([BLOCK_T], query_scale, tl.float32)
    key_norm = tl.full([16], 1.0, tl.float32)
    if row_scale_ptr is not None:
        wide = q.to(tl.float32)
        q_norm = query_scale * tl.rsqrt(tl.sum(wide * wide, axis=1) + norm_eps)
        wide = k.to(tl.float32)
        k_norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + norm_eps)
        key_norm = tl.sum(tl.where(s[:, None] == t[None, :], k_norm[None, :], 0.0), axis=1)
    near_q *= key_norm[:, None] * q_norm[None, :]
    near_k *= key_norm[:, None] * k_norm[None, :]
    reaches = ((bits[None, :] >> s[:, None]) & 1) != 0
    earlier = s[:, None] < t[None, :]

    at_pairs = s[:, None] * BLOCK_T + t[None, :]
    to_pairs = (s[:, None] < WINDOW) & (t[None, :] < WINDOW)
    at_weight = j[:, None] * (2 * BLOCK_T) + 2 * t[None, :]
    used = live[:, None] & own[None, :]
    at_new_g = new_page * stride_row_g_page + new_row * stride_row_g_row
    for i in tl.static_range(RATIO):
        h = key_head * RATIO + i
        a_log, dt_bias = 0.0, 0.0
        if GATE != "log":
            a_log, dt_bias = tl.load(a_log_ptr + h), tl.load(dt_bias_ptr + h)
        g = log_decay(gates[i], a_log, dt_bias, 0.0, GATE)
        beta = write_strength(betas[i], BETA)
        # Sums over (s, t] of the rows that lead to t, from t down; then those since the history.
        since = tl.zeros([BLOCK_T], tl.float32)
        between = tl.zeros([16, BLOCK_T], tl.float32)
        for r in tl.static_range(WINDOW - 1, -1, -1):
            between = tl.where((s == r)[:, None], since[None, :], between)
            g_r = tl.sum(tl.where(t == r, g, 0.0), axis=0)
            since += tl.where(((bits >> r) & 1) != 0, g_r, 0.0)
        near = decay(between)
        at_head = b * (KEY_HEADS * RATIO) + h
        pairs_head = pairs_ptr + at_head * (2 * BLOCK_T * BLOCK_T) + at_pairs
        solve = tl.where(reaches & earlier, near * near_k * beta[None, :], 0.0)
        give = tl.where(reaches, near * near_q, 0.0)
        # Overwritten by the next layer: kept in L2 until then, they need never go to memory.
        tl.store(pairs_head, solve, mask=to_pairs, eviction_policy="evict_last")
        tl.store(pairs_head + BLOCK_T * BLOCK_T, give, mask=to_pairs, eviction_policy="evict_last")

        # Sums over (j, history): the rows' gates shifted by one, scanned from the end. Never a
        # difference of prefix sums.
        factor = decay(tl.cumsum(following[i], axis=0)) * row_norm
        total = tl.sum(following[i], axis=0) + firsts[i]
        step = decay(since)
        weight_head = weight_ptr + at_head * (ROWS * 2 * BLOCK_T) + at_weight
        weight_q = factor[:, None] * (seen_q * (step * q_norm)[None, :])
        weight_k = factor[:, None] * (seen_k * (step * k_norm)[None, :])
        tl.store(weight_head, weight_q, mask=used, eviction_policy="evict_last")
        tl.store(weight_head + 1, weight_k, mask=used, eviction_policy="evict_last")
        read = exact_decay(total + since)
        scale_head = scale_ptr + at_head * (3 * BLOCK_T)
        tl.store(scale_head + 2 * t, read * q_norm, mask=t < WINDOW)
        tl.store(scale_head + 2 * t + 1, read * k_norm, mask=t < WINDOW)
        tl.store(scale_head + 2 * BLOCK_T + t, beta, mask=t < WINDOW)
        tl.store(row_g_ptr + at_new_g + h, g, mask=own)
        if row_beta_ptr is not None:
            at = new_page * stride_row_beta_page + new_row * stride_row_beta_row
            tl.store(row_beta_ptr + at + h, beta, mask=own)

    # The window's own rows go after the history, where nobody reads in this step.
    at = new_page * stride_row_k_page + new_row * stride_row_k_row
    tl.store(row_k_ptr + at[:, None] + n[None, :], k, mask=inside, eviction_policy="evict_first")
    if row_scale_ptr is not None:
        at = new_page * stride_row_scale_page + new_row * stride_row_scale_row
        tl.store(row_scale_ptr + at + key_head, k_norm, mask=own)


def verify_prepass(
    weight: torch.Tensor,
    scale: torch.Tensor,
    pairs: torch.Tensor,
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
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, ...]`` inputs of one layer; see the module.

    `ancestors` is int32 ``[batch, at least window]``. `a_log` and `dt_bias` are None where the gate
    is given, `row_scale` where the layer does not normalise, `row_beta` where no fold needs it.
    """
    batch, width, key_heads, state = k.shape
    rows = weight.shape[2]
    block_t = scale.shape[2] // 3
    # Many tokens, or wide ones, need the registers of two warps. Four would take wgmma, which has
    # no use for so few columns.
    warps = min(max(config.num_warps, block_t // 8, k.element_size() // 2), 2)
    few = block_t <= 4 and k.element_size() == 2  # what a choice of registers is for
    norms = row_g if row_scale is None else row_scale
    betas = row_g if row_beta is None else row_beta
    _verify_prepass_kernel[(batch * key_heads,)](
        weight, scale, pairs, q, k, gate, beta, a_log, dt_bias,
        row_k, row_scale, row_g, row_beta,
        ancestors, history, window, table,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        gate.stride(0), gate.stride(1), beta.stride(0), beta.stride(1),
        row_k.stride(0), row_k.stride(1), row_k.stride(2),
        norms.stride(0), norms.stride(1),
        row_g.stride(0), row_g.stride(1), betas.stride(0), betas.stride(1),
        ancestors.stride(0), table.stride(0), table.shape[1], query_scale, norm_eps,
        KEY_HEADS=key_heads, RATIO=gate.shape[2] // key_heads, STATE=state, WINDOW=width,
        BLOCK_T=block_t, BLOCK_K=max(16, triton.next_power_of_2(state)),
        # Triton does not compile every scan of fewer values than threads.
        BLOCK_J=max(rows, 32 * warps), ROWS=rows, PAGE_ROWS=row_k.shape[1],
        GATE=gate_kind, BETA=beta_rule, INTERPRET=interpreting(), PDL=pdl,
        num_warps=warps, maxnreg=config.registers or None if few else None, launch_pdl=pdl,
    )  # fmt: skip
