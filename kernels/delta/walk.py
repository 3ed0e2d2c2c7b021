"""Gated DeltaNet over short windows without replay, on a caller's own states: token after token.

::

    S = S e^g        u = beta (v - S k)        S = S + u k^T        y = S q

in float32, with ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``, `q` scaled, and
`q` and `k` normalised where asked. A program holds a block of one value head's state rows and walks
the tokens of one sequence. It reads the slot that `source` names, and writes, as asked, the last
state to `target`, or each token's state to its own `target` (and the last one to a further
`target`), or to `each`.

A sequence whose source is negative, or no slot, gets zeros (or keeps its outputs, as asked) and no
other write; a target that is negative, or no slot, is skipped. Slots may be updated in place as
long as no sequence writes what another one reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import log_decay, sigmoid
from ..common.split import encode, round_to

__all__ = ["walk"]


@triton.jit(do_not_specialize=["heads", "ratio", "window", "slots", "query_scale", "norm_eps"])
def _walk_kernel(
    y_ptr, state_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, beta_ptr, a_log_ptr, dt_bias_ptr,
    each_ptr, source_ptr, target_ptr,
    stride_y_b, stride_y_t, stride_y_h, stride_state_slot, stride_state_h, stride_state_d,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, stride_gate_b, stride_gate_t, stride_beta_b, stride_beta_t,
    stride_each_b, stride_each_t, stride_source_b, stride_target_b, stride_target_t,
    heads, ratio, window, slots, query_scale, norm_eps,
    DIM: tl.constexpr, STATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    NORM: tl.constexpr, WRITE: tl.constexpr, KEEP_PADS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = (pid // BLOCKS % heads).to(tl.int64)  # a head's states may lie far apart
    b = (pid // BLOCKS // heads).to(tl.int64)
    key_head = h // ratio
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    in_d, in_n = d < DIM, n < STATE
    in_tile = in_d[:, None] & in_n[None, :]
    a_log = tl.load(a_log_ptr + h).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + h).to(tl.float32)
    slot = b
    if source_ptr is not None:
        slot = tl.load(source_ptr + b * stride_source_b).to(tl.int64)
    y_ptr += b * stride_y_b + h * stride_y_h + d
    t = window * 0
    if (slot < 0) | (slot >= slots):  # pad: zeros at most, and no other write
        if not KEEP_PADS:
            zeros = tl.zeros([BLOCK_R], y_ptr.dtype.element_ty)
            while t < window:
                tl.store(y_ptr + t * stride_y_t, zeros, mask=in_d)
                t += 1
        return

    in_state = h * stride_state_h + d[:, None].to(tl.int64) * stride_state_d + n[None, :]
    state = tl.load(state_ptr + slot * stride_state_slot + in_state, mask=in_tile, other=0.0)
    state = state.to(tl.float32)
    q_ptr += b * stride_q_b + key_head * stride_q_h + n
    k_ptr += b * stride_k_b + key_head * stride_k_h + n
    v_ptr += b * stride_v_b + h * stride_v_h + d
    gate_ptr += b * stride_gate_b + h
    beta_ptr += b * stride_beta_b + h
    while t < window:
        q = tl.load(q_ptr + t * stride_q_t, mask=in_n, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + t * stride_k_t, mask=in_n, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * stride_v_t, mask=in_d, other=0.0).to(tl.float32)
        raw = tl.load(gate_ptr + t * stride_gate_t).to(tl.float32)
        beta = sigmoid(tl.load(beta_ptr + t * stride_beta_t).to(tl.float32))
        if NORM:
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + norm_eps)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + norm_eps)
        q *= query_scale
        state *= tl.exp(log_decay(raw, a_log, dt_bias, 0.0, "softplus"))
        u = beta * (v - tl.sum(state * k[None, :], axis=1))
        state += u[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], axis=1)
        tl.store(y_ptr + t * stride_y_t, round_to(y, y_ptr.dtype.element_ty), mask=in_d)
        if each_ptr is not None:
            at = b * stride_each_b + t.to(tl.int64) * stride_each_t + h * (DIM * STATE)
            at += d[:, None] * STATE + n[None, :]
            tl.store(each_ptr + at, encode(state, each_ptr.dtype.element_ty), mask=in_tile)
        if (WRITE == "each") | (WRITE == "all"):
            target = tl.load(target_ptr + b * stride_target_b + t * stride_target_t).to(tl.int64)
            there = (target >= 0) & (target < slots)
            at = tl.where(there, target, 0) * stride_state_slot + in_state
            tl.store(
                state_ptr + at, encode(state, state_ptr.dtype.element_ty), mask=in_tile & there
            )
        t += 1
    if (WRITE == "last") | (WRITE == "all"):
        target = slot
        if target_ptr is not None:
            at = b * stride_target_b
            if WRITE == "all":
                at += window * stride_target_t
            target = tl.load(target_ptr + at).to(tl.int64)
        there = (target >= 0) & (target < slots)
        at = tl.where(there, target, 0) * stride_state_slot + in_state
        tl.store(state_ptr + at, encode(state, state_ptr.dtype.element_ty), mask=in_tile & there)


def walk(
    y: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    each: torch.Tensor | None,
    write: str,
    norm: bool,
    norm_eps: float,
    query_scale: float,
    keep_pads: bool,
) -> None:
    """Launch over ``[batch, window, heads, dim]`` inputs.

    `source` is ``[batch]`` and `target` ``[batch, columns]``; `write` is ``"none"``, ``"last"``,
    ``"each"`` or ``"all"``. A state's innermost stride is 1; in `each` ``[batch, steps, heads, dim,
    state]`` a token's states are contiguous. The heads of `gate` and `beta` are contiguous.
    """
    batch, window, heads, dim = v.shape
    size = k.shape[3]
    if batch == 0 or window == 0:
        return
    block_r = min(16, triton.next_power_of_2(dim))
    _walk_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, state, q, k, v, gate, beta, a_log, dt_bias,
        each, source, target,
        *y.stride()[:3], *state.stride()[:3],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *gate.stride()[:2], *beta.stride()[:2],
        0 if each is None else each.stride(0), 0 if each is None else each.stride(1),
        0 if source is None else source.stride(0),
        0 if target is None else target.stride(0), 0 if target is None else target.stride(1),
        heads, heads // k.shape[2], window, state.shape[0], query_scale, norm_eps,
        DIM=dim, STATE=size, BLOCK_R=block_r, BLOCK_N=triton.next_power_of_2(size),
        NORM=norm, WRITE=write, KEEP_PADS=keep_pads,
        num_warps=4,
    )  # fmt: skip
