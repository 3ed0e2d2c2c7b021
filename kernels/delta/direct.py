"""Delta-rule decode without replay: one launch reads and writes every state, in place.

::

    u = beta (v - e^g S k)        y = e^g S q + u (k . q)        S = e^g S + u k^T

with `q` scaled, and `q` and `k` normalised where the layer does that; the gate is one number for a
head (GDN) or one for each of its key channels (KDA). All in float32 on the decoded state, which is
encoded again; `y` is of the new state before that, from sums over the old one. Reads and writes
the pages ``[pages, heads, dim, state]``, both planes of a split one, and writes ``y [batch, heads,
dim]``. A pad or an empty window gets zeros and no other write.

A program is a block of one head's state rows, which do not depend on each other. It writes what it
alone read, so pages may be updated in place as long as no two sequences of the batch share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import log_decay, write_strength
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.split import load_state, round_to, store_state
from ..launch.config import LaunchConfig

__all__ = ["direct"]


@triton.jit
def _direct_kernel(
    y_ptr, plane_ptr, low_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr,
    a_log_ptr, dt_bias_ptr,
    page_ptr, window_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_v_b, stride_v_h,
    stride_gate_b, stride_gate_h, stride_beta_b,
    query_scale, norm_eps, lower_bound,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PER_CHANNEL: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % HEADS
    b = (pid // BLOCKS // HEADS).to(tl.int64)
    key_head = h // RATIO
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    in_d, in_n = d < DIM, n < STATE
    a_log, dt_bias = 0.0, 0.0
    if GATE != "log":
        a_log = tl.load(a_log_ptr + h)
        if PER_CHANNEL:
            dt_bias = tl.load(dt_bias_ptr + h * STATE + n, mask=in_n, other=0.0)
        else:
            dt_bias = tl.load(dt_bias_ptr + h)
    if PDL:
        wait_for_previous()  # whatever made the inputs, folded, or moved these states before
        launch_dependents()

    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    q = tl.load(q_ptr + b * stride_q_b + key_head * stride_q_h + n, mask=in_n, other=0.0)
    k = tl.load(k_ptr + b * stride_k_b + key_head * stride_k_h + n, mask=in_n, other=0.0)
    v = tl.load(v_ptr + b * stride_v_b + h * stride_v_h + d, mask=in_d, other=0.0)
    gate_ptr += b * stride_gate_b + h * stride_gate_h
    if PER_CHANNEL:
        gate = tl.load(gate_ptr + n, mask=in_n, other=0.0)
    else:
        gate = tl.load(gate_ptr)
    beta = tl.load(beta_ptr + b * stride_beta_b + h).to(tl.float32)
    y_ptr += b * stride_y_b + h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        tl.store(y_ptr, tl.zeros([BLOCK_R], y_ptr.dtype.element_ty), mask=in_d)
        return

    in_tile = in_d[:, None] & in_n[None, :]
    tile = page * stride_plane_page + h * stride_plane_h + d[:, None] * STATE + n[None, :]
    state = load_state(plane_ptr, low_ptr, tile, in_tile)

    # Every sum over channels at once, of the old state and of keys as given: one wait, where the
    # recurrence as it is written would be three.
    q, k = q.to(tl.float32), k.to(tl.float32)
    beta = write_strength(beta, BETA)
    decay = tl.exp(log_decay(gate.to(tl.float32), a_log, dt_bias, lower_bound, GATE))
    if PER_CHANNEL:
        seen_k = tl.sum(state * (decay * k)[None, :], axis=1)
        seen_q = tl.sum(state * (decay * q)[None, :], axis=1)
    else:
        seen_k = decay * tl.sum(state * k[None, :], axis=1)
        seen_q = decay * tl.sum(state * q[None, :], axis=1)
    own = tl.sum(k * q, axis=0)
    k_norm, q_norm = 1.0, query_scale
    if NORM:
        k_norm = tl.rsqrt(tl.sum(k * k, axis=0) + norm_eps)
        q_norm *= tl.rsqrt(tl.sum(q * q, axis=0) + norm_eps)
    u = beta * (v.to(tl.float32) - k_norm * seen_k) * k_norm
    y = q_norm * (seen_q + u * own)
    if PER_CHANNEL:
        state = state * decay[None, :] + u[:, None] * k[None, :]
    else:
        state = state * decay + u[:, None] * k[None, :]
    tl.store(y_ptr, round_to(y, y_ptr.dtype.element_ty), mask=in_d)
    store_state(plane_ptr, low_ptr, tile, state, in_tile)


def direct(
    y: torch.Tensor,
    plane: torch.Tensor,
    low: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    page: torch.Tensor,
    window: torch.Tensor,
    *,
    gate_kind: str,
    beta_rule: str,
    norm: bool,
    norm_eps: float,
    query_scale: float,
    lower_bound: float,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` values of one token and one layer; see the module.

    `gate` is ``[batch, heads]`` or ``[batch, heads, state]``. A split state passes both planes as
    int16, with equal strides; a head's ``dim * state`` values are contiguous in a plane.
    """
    batch, heads, dim = v.shape
    key_heads, state = k.shape[1], k.shape[2]
    block_r = min(config.rows or 16, triton.next_power_of_2(dim))
    _direct_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, plane, low, q, k, v, gate, beta,
        a_log, dt_bias,
        page, window,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        gate.stride(0), gate.stride(1), beta.stride(0),
        query_scale, norm_eps, lower_bound,
        HEADS=heads, RATIO=heads // key_heads, DIM=dim, STATE=state,
        BLOCK_R=block_r, BLOCK_N=triton.next_power_of_2(state),
        PER_CHANNEL=gate.dim() == 3, GATE=gate_kind, BETA=beta_rule, NORM=norm, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
