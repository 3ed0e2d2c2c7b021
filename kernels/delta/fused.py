"""Delta-rule decode in one kernel, for batches that do not fill the machine.

::

    u = beta (v - S0 (e^{g(0,t)} k) - sum_j (k_j . e^{g(j,t)} k) u_j)
    y = S0 (e^{g(0,t)} q) + sum_j (k_j . e^{g(j,t)} q) u_j + (k . q) u

with ``g(j, t)`` the sum of gates over the rows ``(j, t]``, of a head (GDN) or of each of its key
channels (KDA), all keys normalised where the layer does that, and ``q`` scaled too. Reads the
checkpoint plane ``[pages, heads, dim, state]`` and the rows; writes ``y [batch, heads, dim]`` and
the token's row.

Latency is what counts here: a program is a block of one head's state rows, works out that head's
row weights by itself, and waits for memory twice: for plan and inputs, then for all the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.decay import exact_decay
from ..common.gates import decay, log_decay, write_strength
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import round_to
from ..launch.config import LaunchConfig

__all__ = ["fused"]


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=[
        "stride_beta_b", "stride_row_scale_page", "stride_row_scale_row",
        "stride_row_beta_page", "stride_row_beta_row", "stride_table_b", "pages",
    ],
    do_not_specialize_on_alignment=[
        "beta_ptr", "a_log_ptr", "row_scale_ptr", "row_beta_ptr",
        "page_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _fused_kernel(
    y_ptr, plane_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr, a_log_ptr, dt_bias_ptr,
    row_k_ptr, row_scale_ptr, row_g_ptr, row_u_ptr, row_v_ptr, row_beta_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_v_b, stride_v_h,
    stride_gate_b, stride_gate_h, stride_beta_b,
    stride_row_k_page, stride_row_k_row, stride_row_k_h,
    stride_row_scale_page, stride_row_scale_row,
    stride_row_g_page, stride_row_g_row, stride_row_g_h,
    stride_row_u_page, stride_row_u_row, stride_row_u_h,
    stride_row_v_page, stride_row_v_row, stride_row_v_h,
    stride_row_beta_page, stride_row_beta_row,
    stride_table_b, pages, query_scale, norm_eps, lower_bound,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, PER_CHANNEL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % HEADS
    b = (pid // BLOCKS // HEADS).to(tl.int64)
    key_head = h // RATIO
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    in_d, in_n = d < DIM, n < STATE
    a_log, dt_bias = 0.0, 0.0
    if GATE != "log":
        a_log = tl.load(a_log_ptr + h)
        if PER_CHANNEL:
            dt_bias = tl.load(dt_bias_ptr + h * STATE + n, mask=in_n, other=0.0)
        else:
            dt_bias = tl.load(dt_bias_ptr + h)
    if PDL:
        wait_for_previous()  # whatever made the inputs

    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    q = tl.load(q_ptr + b * stride_q_b + key_head * stride_q_h + n, mask=in_n, other=0.0)
    new_k = tl.load(k_ptr + b * stride_k_b + key_head * stride_k_h + n, mask=in_n, other=0.0)
    new_v = tl.load(v_ptr + b * stride_v_b + h * stride_v_h + d, mask=in_d, other=0.0)
    gate_ptr += b * stride_gate_b + h * stride_gate_h
    if PER_CHANNEL:
        gate = tl.load(gate_ptr + n, mask=in_n, other=0.0)
    else:
        gate = tl.load(gate_ptr)
    beta = tl.load(beta_ptr + b * stride_beta_b + h).to(tl.float32)
    table_ptr += b * stride_table_b
    at_k = row_offset(table_ptr, j, pages, stride_row_k_page, stride_row_k_row, PAGE_ROWS)
    at_u = row_offset(table_ptr, j, pages, stride_row_u_page, stride_row_u_row, PAGE_ROWS)
    at_g = row_offset(table_ptr, j + 1, pages, stride_row_g_page, stride_row_g_row, PAGE_ROWS)
    first = tl.load(table_ptr).to(tl.int64)
    y_ptr += b * stride_y_b + h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        tl.store(y_ptr, tl.zeros([BLOCK_R], y_ptr.dtype.element_ty), mask=in_d)
        return

    plane_ptr += page * stride_plane_page + h * stride_plane_h
    in_tile = in_d[:, None] & in_n[None, :]
    state = tl.load(plane_ptr + d[:, None] * STATE + n[None, :], mask=in_tile, other=0.0)
    live, more = j < history, j + 1 < history
    rows_k = tl.load(
        row_k_ptr + at_k[:, None] + key_head * stride_row_k_h + n[None, :],
        mask=live[:, None] & in_n[None, :], other=0.0,
    )  # fmt: skip
    row_u_ptr += h * stride_row_u_h + d
    rows_u = tl.load(
        row_u_ptr[None, :] + at_u[:, None], mask=live[:, None] & in_d[None, :], other=0.0
    )
    row_g_ptr += h * stride_row_g_h
    first_ptr = row_g_ptr + first * stride_row_g_page
    if PER_CHANNEL:
        following = tl.load(
            row_g_ptr + at_g[:, None] + n[None, :], mask=more[:, None] & in_n[None, :], other=0.0
        )
        first_g = tl.load(first_ptr + n, mask=in_n, other=0.0)
    else:
        following = tl.load(row_g_ptr + at_g, mask=more, other=0.0)
        first_g = tl.load(first_ptr)
    norm = tl.full([BLOCK_J], 1.0, tl.float32)
    if row_scale_ptr is not None:
        at = row_offset(table_ptr, j, pages, stride_row_scale_page, stride_row_scale_row, PAGE_ROWS)
        norm = tl.load(row_scale_ptr + at + key_head, mask=live, other=0.0)
    here = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    if PDL:
        launch_dependents()
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    g = log_decay(gate.to(tl.float32), a_log, dt_bias, lower_bound, GATE)
    beta = write_strength(beta, BETA)
    q, k = q.to(tl.float32), new_k.to(tl.float32)
    k_norm = 1.0
    if row_scale_ptr is not None:
        k_norm = tl.rsqrt(tl.sum(k * k, axis=0) + norm_eps)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + norm_eps)
    q *= query_scale
    k *= k_norm
    # Sums over (j, t]: the rows' gates shifted by one, this token's in the last place, scanned from
    # the end. Never a difference of prefix sums.
    rows_k = rows_k.to(tl.float32)
    last = j + 1 == history
    if PER_CHANNEL:
        following = tl.where(last[:, None], g[None, :], following)
        rows_k *= decay(tl.cumsum(following, axis=0))
    else:
        following = tl.where(last, g, following)
        norm *= decay(tl.cumsum(following, axis=0))
    weight_q = norm * tl.sum(rows_k * q[None, :], axis=1)
    weight_k = norm * tl.sum(rows_k * k[None, :], axis=1)
    read = exact_decay(tl.sum(following, axis=0) + tl.where(history > 0, first_g, g))
    own = tl.sum(k * q, axis=0)
    state, rows_u = state.to(tl.float32), rows_u.to(tl.float32)
    recalled = tl.sum(state * (read * k)[None, :], axis=1)
    recalled += tl.sum(weight_k[:, None] * rows_u, axis=0)
    u = beta * (new_v.to(tl.float32) - recalled)
    y = tl.sum(state * (read * q)[None, :], axis=1)
    y += tl.sum(weight_q[:, None] * rows_u, axis=0) + own * u
    tl.store(y_ptr, round_to(y, y_ptr.dtype.element_ty), mask=in_d)

    # The token's own row goes to index `history`, which nobody reads in this step.
    row = history % PAGE_ROWS
    at = here * stride_row_u_page + row * stride_row_u_row
    tl.store(row_u_ptr + at, round_to(u, row_u_ptr.dtype.element_ty), mask=in_d)
    if row_v_ptr is not None:
        at = here * stride_row_v_page + row * stride_row_v_row + h * stride_row_v_h
        tl.store(row_v_ptr + at + d, new_v, mask=in_d)
    if block == 0:
        at = here * stride_row_g_page + row * stride_row_g_row
        if PER_CHANNEL:
            tl.store(row_g_ptr + at + n, g, mask=in_n)
        else:
            tl.store(row_g_ptr + at, g)
        if row_beta_ptr is not None:
            at = here * stride_row_beta_page + row * stride_row_beta_row
            tl.store(row_beta_ptr + at + h, beta)
        if h % RATIO == 0:
            at = here * stride_row_k_page + row * stride_row_k_row + key_head * stride_row_k_h
            tl.store(row_k_ptr + at + n, new_k, mask=in_n)
            if row_scale_ptr is not None:
                at = here * stride_row_scale_page + row * stride_row_scale_row
                tl.store(row_scale_ptr + at + key_head, k_norm)


def fused(
    y: torch.Tensor,
    plane: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    row_k: torch.Tensor,
    row_scale: torch.Tensor | None,
    row_g: torch.Tensor,
    row_u: torch.Tensor,
    row_v: torch.Tensor | None,
    row_beta: torch.Tensor | None,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    capacity: int,
    gate_kind: str,
    beta_rule: str,
    query_scale: float,
    norm_eps: float,
    lower_bound: float = 0.0,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module.

    `gate` is ``[batch, heads]`` or, for a gate per channel, ``[batch, heads, state]``. `a_log` and
    `dt_bias` are None where the gate is given, `row_scale` where the layer does not normalise,
    `row_v` and `row_beta` where no fold needs them.
    """
    batch, heads, dim = v.shape
    state = k.shape[2]
    per_channel = gate.dim() == 3
    block_r = min(config.rows or 32, triton.next_power_of_2(dim))
    norms = row_g if row_scale is None else row_scale
    kept = row_u if row_v is None else row_v
    betas = row_g if row_beta is None else row_beta
    _fused_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, plane, q, k, v, gate, beta, a_log, dt_bias,
        row_k, row_scale, row_g, row_u, row_v, row_beta,
        page, history, window, table,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        gate.stride(0), gate.stride(1), beta.stride(0),
        row_k.stride(0), row_k.stride(1), row_k.stride(2),
        norms.stride(0), norms.stride(1),
        row_g.stride(0), row_g.stride(1), row_g.stride(2),
        row_u.stride(0), row_u.stride(1), row_u.stride(2),
        kept.stride(0), kept.stride(1), kept.stride(2),
        betas.stride(0), betas.stride(1),
        table.stride(0), table.shape[1], query_scale, norm_eps, lower_bound,
        HEADS=heads, RATIO=heads // k.shape[1], DIM=dim, STATE=state,
        BLOCK_R=block_r, BLOCK_N=triton.next_power_of_2(state),
        BLOCK_J=max(2, triton.next_power_of_2(capacity)), PAGE_ROWS=row_k.shape[1],
        GATE=gate_kind, BETA=beta_rule, PER_CHANNEL=per_channel, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
