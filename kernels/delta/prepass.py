"""Gated DeltaNet decode prepass: all about the rows that does not depend on ``dim``.

::

    weight_q_j = e^{g(j,t)} (k_j . q)      read_q = e^{g(0,t)}      own = k . q      and so for k

with ``g(j, t)`` the sum of gates over the rows ``(j, t]``, keys and queries normalised where the
layer does that, ``q`` scaled too. The readout takes ``q`` and ``k`` as given, so their norms are in
``read_q`` and ``read_k``. Reads the ``k`` and ``g`` rows; writes for the readout ``weight [batch,
heads, 2, rows]`` (q, k; live rows only) and ``scale [batch, heads, 4]`` (read_q, read_k, beta,
own), and the token's ``k``, ``g`` and, where kept, ``beta`` row. A program is one key head of one
sequence.

It can make ``q``, ``k`` and ``v`` itself, by the convolution of its head's channels: the traffic of
the convolution's windows then overlaps with what the readout loads before it waits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.gates import decay, log_decay, write_strength
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import load_pairs
from ..conv.shift import ShiftedWindows, convolve_shifted, load_shifted
from ..launch.config import LaunchConfig

__all__ = ["prepass"]


@triton.jit
def _convolve(
    y_ptr, x_ptr, conv_ptr, weight_ptr, bias_ptr, key_head,
    KEY_HEADS: tl.constexpr, STATE: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    CONV: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr, X_H: tl.constexpr,
):  # fmt: skip
    """A key head's channels of the line ``q | k | v``; VALUES of ``v``, in blocks of pairs.

    X_H is the stride of key heads whose channels lie together in `x`; -1: `x` is a line as well.
    """
    BLOCKS: tl.constexpr = 2 + (VALUES // 2 + BLOCK - 1) // BLOCK
    loaded, pairs, masks = (), (), ()
    for s in tl.static_range(BLOCKS):
        n = tl.arange(0, BLOCK)
        if s < 2:
            start = (s * KEY_HEADS + key_head) * (STATE // 2)
            before = s * STATE
            mask = n < STATE // 2
        else:
            n += (s - 2) * BLOCK
            start = KEY_HEADS * STATE + key_head * (VALUES // 2)
            before = 2 * STATE
            mask = n < VALUES // 2
        x_from = x_ptr
        if X_H >= 0:
            x_from += key_head * X_H + before - 2 * start
        pairs += (start + n,)
        masks += (mask,)
        loaded += (
            load_shifted(
                x_from, conv_ptr, weight_ptr, bias_ptr, pairs[s], masks[s], CONV, PACKED
            ),
        )  # fmt: skip
    for s in tl.static_range(BLOCKS):
        convolve_shifted(
            y_ptr, conv_ptr, loaded[s][0], loaded[s][1], loaded[s][2], pairs[s], masks[s],
            CONV, PACKED, SILU,
        )  # fmt: skip


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_gate_b", "stride_beta_b", "stride_row_scale_page", "stride_row_scale_row",
        "stride_row_g_page", "stride_row_g_row", "stride_row_beta_page", "stride_row_beta_row",
        "stride_table_b", "pages", "stride_x_b", "stride_conv_slot", "stride_z_b",
    ],
    do_not_specialize_on_alignment=[
        "conv_bias_ptr", "slot_ptr", "scale_ptr", "gate_ptr", "beta_ptr", "a_log_ptr",
        "dt_bias_ptr", "row_scale_ptr", "row_g_ptr", "row_beta_ptr", "history_ptr", "window_ptr",
        "table_ptr",
    ],
)  # fmt: skip
def _prepass_kernel(
    weight_ptr, scale_ptr, q_ptr, k_ptr, gate_ptr, beta_ptr, a_log_ptr, dt_bias_ptr,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_beta_ptr,
    history_ptr, window_ptr, table_ptr,
    x_ptr, conv_ptr, conv_weight_ptr, conv_bias_ptr, slot_ptr, z_ptr, z_out_ptr,
    stride_x_b, stride_conv_slot, stride_z_b,
    stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_gate_b, stride_beta_b,
    stride_row_k_page, stride_row_k_row, stride_row_k_h,
    stride_row_scale_page, stride_row_scale_row,
    stride_row_g_page, stride_row_g_row, stride_row_beta_page, stride_row_beta_row,
    stride_table_b, pages, query_scale, norm_eps,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, STATE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, PDL: tl.constexpr, GATE_H: tl.constexpr,
    BETA_H: tl.constexpr, CONV: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr,
    SILU: tl.constexpr, X_H: tl.constexpr, Z_H: tl.constexpr, BLOCK_Z: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # all of the grid on axis 0
    key_head = pid % KEY_HEADS
    b = (pid // KEY_HEADS).to(tl.int64)
    h = key_head * RATIO + tl.arange(0, BLOCK_H)
    in_h = tl.arange(0, BLOCK_H) < RATIO
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    a_log, dt_bias = 0.0, 0.0
    if GATE != "log":
        a_log = tl.load(a_log_ptr + h, mask=in_h, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + h, mask=in_h, other=0.0)
    if PDL:
        wait_for_previous()  # whatever made the inputs, or folded
        launch_dependents()  # only now: the readout reads those before it waits for this kernel

    tokens = tl.load(window_ptr + b)
    if Z_H >= 0:  # pads too
        n = tl.arange(0, BLOCK_Z)
        z_out_ptr += (b * KEY_HEADS + key_head) * (RATIO * DIM) + n
        z_ptr += b * stride_z_b + key_head * Z_H + n
        z = tl.load(z_ptr, mask=n < RATIO * DIM, other=0.0)
    if CONV > 0:  # its width; 0: q and k are given
        if tokens == 0:  # a pad has no window either
            if Z_H >= 0:
                tl.store(z_out_ptr, z, mask=n < RATIO * DIM)
            return
        slot = tl.load(slot_ptr + b).to(tl.int64)
        _convolve(
            q_ptr + b * stride_q_b, x_ptr + b * stride_x_b, conv_ptr + slot * stride_conv_slot,
            conv_weight_ptr, conv_bias_ptr, key_head,
            KEY_HEADS, STATE, RATIO * DIM, BLOCK_C, CONV, PACKED, SILU, X_H,
        )  # fmt: skip
        if Z_H >= 0:
            tl.store(z_out_ptr, z, mask=n < RATIO * DIM)
        tl.debug_barrier()  # other threads of this program made what the next ones read
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    at_k = row_offset(table_ptr, j, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
    at_g = row_offset(table_ptr, j + 1, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
    channel = tl.arange(0, BLOCK_K)
    q_ptr += b * stride_q_b + key_head * stride_q_h
    k_ptr += b * stride_k_b + key_head * stride_k_h
    new_q = tl.load(q_ptr + channel, mask=channel < STATE, other=0.0)
    new_k = tl.load(k_ptr + channel, mask=channel < STATE, other=0.0)
    # Pairs of channels in chunks of 64 bytes: two shuffles to a sum. SIDE as in the readout.
    n = tl.arange(0, BLOCK_N)
    q, q_odd, k, k_odd = (), (), (), ()
    for c in tl.static_range(CHUNKS):
        at = c * BLOCK_N + tl.arange(0, SIDE * BLOCK_N) % BLOCK_N
        even, odd = load_pairs(q_ptr, at, at < STATE // 2, False)
        q += (even.reshape(1, SIDE, BLOCK_N),)
        q_odd += (odd.reshape(1, SIDE, BLOCK_N),)
        even, odd = load_pairs(k_ptr, at, at < STATE // 2, False)
        k += (even.reshape(1, SIDE, BLOCK_N),)
        k_odd += (odd.reshape(1, SIDE, BLOCK_N),)
    r = tl.arange(0, BLOCK_H)
    gate_ptr += b * stride_gate_b + key_head * GATE_H
    beta_ptr += b * stride_beta_b + key_head * BETA_H
    gate = tl.load(gate_ptr + r, mask=in_h, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + r, mask=in_h, other=0.0).to(tl.float32)
    first_page = tl.load(table_ptr).to(tl.int64)
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return

    row_k_ptr += key_head * stride_row_k_h
    live = j < history
    rows, rows_odd = (), ()
    for c in tl.static_range(CHUNKS):
        at = c * BLOCK_N + n[None, :]
        even, odd = load_pairs(
            row_k_ptr, at_k[:, None] // 2 + at, live[:, None] & (at < STATE // 2), ONCE=True
        )
        rows += (even.reshape(BLOCK_J // SIDE, SIDE, BLOCK_N),)
        rows_odd += (odd.reshape(BLOCK_J // SIDE, SIDE, BLOCK_N),)
    following = tl.load(
        row_g_ptr + at_g[:, None] + h[None, :],
        mask=(j + 1 < history)[:, None] & in_h[None, :], other=0.0,
    )  # fmt: skip
    first = tl.load(row_g_ptr + first_page * stride_row_g_page + h, mask=in_h, other=0.0)
    row_norm = tl.full([BLOCK_J], 1.0, tl.float32)
    if row_scale_ptr is not None:
        at = row_offset(table_ptr, j, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS)
        row_norm = tl.load(row_scale_ptr + at + key_head, mask=live, other=0.0)
    here = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    g = log_decay(gate, a_log, dt_bias, 0.0, GATE)
    beta = write_strength(beta, BETA)
    seen_q = tl.zeros([BLOCK_J // SIDE, SIDE, BLOCK_N], tl.float32)
    seen_k = tl.zeros([BLOCK_J // SIDE, SIDE, BLOCK_N], tl.float32)
    for c in tl.static_range(CHUNKS):
        seen_q += rows[c] * q[c]
        seen_q += rows_odd[c] * q_odd[c]
        seen_k += rows[c] * k[c]
        seen_k += rows_odd[c] * k_odd[c]
    new_qs, new_ks = new_q.to(tl.float32), new_k.to(tl.float32)
    own = tl.sum(new_qs * new_ks, axis=0)
    k_norm, q_norm = 1.0, query_scale
    if row_scale_ptr is not None:
        k_norm = tl.rsqrt(tl.sum(new_ks * new_ks, axis=0) + norm_eps)
        q_norm = query_scale * tl.rsqrt(tl.sum(new_qs * new_qs, axis=0) + norm_eps)
    seen_q = q_norm * tl.sum(seen_q, axis=2).reshape(BLOCK_J)
    seen_k = k_norm * tl.sum(seen_k, axis=2).reshape(BLOCK_J)

    # Sums over (j, t]: the rows' gates shifted by one, this token's in the last place, scanned from
    # the end. Never a difference of prefix sums.
    following = tl.where((j + 1 == history)[:, None], g[None, :], following)
    factor = decay(tl.cumsum(following, axis=0)) * row_norm[:, None]
    since = tl.sum(following, axis=0) + tl.where(history > 0, first, g)
    at = b * (KEY_HEADS * RATIO) + h
    weight_ptr += at[None, :] * (2 * BLOCK_J) + j[:, None]
    used = in_h[None, :] & live[:, None]
    # Overwritten by the next layer: kept in L2 until then, they need never go to memory.
    tl.store(weight_ptr, factor * seen_q[:, None], mask=used, eviction_policy="evict_last")
    tl.store(
        weight_ptr + BLOCK_J, factor * seen_k[:, None], mask=used, eviction_policy="evict_last"
    )
    scale_ptr += at * 4
    read = exact_decay(since)
    tl.store(scale_ptr, read * q_norm, mask=in_h)
    tl.store(scale_ptr + 1, read * k_norm, mask=in_h)
    tl.store(scale_ptr + 2, beta, mask=in_h)
    tl.store(scale_ptr + 3, tl.zeros([BLOCK_H], tl.float32) + own * q_norm * k_norm, mask=in_h)

    # The token's own row goes to index `history`, which nobody reads in this step.
    row = history % PAGE_ROWS
    at = here * stride_row_k_page + row * stride_row_k_row
    tl.store(row_k_ptr + at + channel, new_k, mask=channel < STATE, eviction_policy="evict_first")
    tl.store(row_g_ptr + here * stride_row_g_page + row * stride_row_g_row + h, g, mask=in_h)
    if row_scale_ptr is not None:
        at = here * stride_row_scale_page + row * stride_row_scale_row
        tl.store(row_scale_ptr + at + key_head, k_norm)
    if row_beta_ptr is not None:
        at = here * stride_row_beta_page + row * stride_row_beta_row
        tl.store(row_beta_ptr + at + h, beta, mask=in_h)


def prepass(
    weight: torch.Tensor,
    scale: torch.Tensor,
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
    pdl: bool,
    config: LaunchConfig,
    conv: ShiftedWindows | None = None,
    dim: int = 0,
) -> None:
    """Launch over ``[batch, ...]`` inputs of one token and one layer; see the module.

    `a_log` and `dt_bias` are None where the gate is given, `row_scale` where the layer does not
    normalise, `row_beta` where no fold needs it. With `conv`, whose channels are ``q | k | v`` and
    `dim` those of a value head, they are written: `q` and `k` are the head of one line. Gates are
    ``[batch, heads]``, or ``[batch, key_heads, ratio]``.
    """
    batch, key_heads, state = k.shape
    windows: Any = conv or (*[None] * 5, False, None, None)
    x, states, slot, conv_weight, conv_bias, silu, z, z_out = windows
    ratio = gate.shape[2] if gate.dim() == 3 else gate.shape[1] // key_heads
    gate_h, beta_h = (t.stride(1) if t.dim() == 3 else ratio for t in (gate, beta))
    rows = weight.shape[3]
    norms = row_g if row_scale is None else row_scale
    betas = row_g if row_beta is None else row_beta
    block_n = min(16, triton.next_power_of_2(state // 2))
    _prepass_kernel[(batch * key_heads,)](
        weight, scale, q, k, gate, beta, a_log, dt_bias,
        row_k, row_scale, row_g, row_beta,
        history, window, table,
        x, states, conv_weight, conv_bias, slot, z, z_out,
        *(0 if t is None else t.stride(0) for t in (x, states, z)),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), gate.stride(0), beta.stride(0),
        row_k.stride(0), row_k.stride(1), row_k.stride(2),
        norms.stride(0), norms.stride(1),
        row_g.stride(0), row_g.stride(1), betas.stride(0), betas.stride(1),
        table.stride(0), table.shape[1], query_scale, norm_eps,
        KEY_HEADS=key_heads, RATIO=ratio, STATE=state,
        # Triton does not compile every scan of fewer values than threads.
        BLOCK_H=max(triton.next_power_of_2(ratio), triton.cdiv(32 * config.num_warps, rows)),
        BLOCK_K=triton.next_power_of_2(state),
        # Each warp reads 512 bytes at a time.
        SIDE=min(rows, 128 * config.num_warps // block_n), CHUNKS=triton.cdiv(state, 2 * block_n),
        BLOCK_N=block_n, BLOCK_J=rows, PAGE_ROWS=row_k.shape[1],
        GATE=gate_kind, BETA=beta_rule, PDL=pdl, GATE_H=gate_h, BETA_H=beta_h,
        CONV=0 if conv_weight is None else conv_weight.shape[1], DIM=dim,
        PACKED=conv is not None and conv.packed, SILU=silu,
        X_H=x.stride(1) if x is not None and x.dim() == 3 else -1,
        Z_H=-1 if z is None else z.stride(1), BLOCK_Z=triton.next_power_of_2(max(ratio * dim, 2)),
        # Pairs of channels: no more than eight blocks of values, whose registers a thread has.
        BLOCK_C=max(
            triton.next_power_of_2(state) // 2, triton.next_power_of_2(triton.cdiv(ratio * dim, 16))
        ),
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
