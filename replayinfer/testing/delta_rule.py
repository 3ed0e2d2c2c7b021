"""Float64 oracles of the delta-rule families: Gated DeltaNet and Kimi Delta Attention.

The two differ in one thing: GDN has one gate per head and token, KDA one per key channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gates import beta_value, bounded_gate, l2_normalise, softplus_gate


def gdn_recurrence(
    state0: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "softplus",
    beta_rule: str = "sigmoid",
    norm: str = "l2",
    norm_eps: float = 1e-6,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    state_rounding: torch.dtype | None = None,
    trace: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run Gated DeltaNet over the tokens; leading batch axes are allowed everywhere.

    Parameters
    ----------
    state0 : [..., heads, dim, state], the state before the first token
    q, k : [..., tokens, key_heads, state]; value head ``h`` uses key head ``h // ratio``
    v : [..., tokens, heads, dim]
    g : [..., tokens, heads], the log decay itself, for ``gate="log"``
    beta : [..., tokens, heads], the write strength itself
    a, A_log, dt_bias : [..., tokens, heads], [heads], [heads] or None: the raw gate of
        ``gate="softplus"``
    b : [..., tokens, heads], the raw write strength, used by ``beta_rule`` where ``beta`` is absent
    gate : ``"softplus"`` or ``"log"``
    beta_rule : ``"sigmoid"``, ``"sigmoid2"`` or ``"given"``
    norm, norm_eps : ``"l2"`` normalises ``q`` and ``k`` first; ``"none"`` takes them as given
    scale : of the query, applied after the norm; None means ``state ** -0.5``
    dtype : type that everything is computed in
    state_rounding : type that the state is rounded to after each token
    trace : a list to which the state after each token is appended

    Returns
    -------
    y : [..., tokens, heads, dim] in ``dtype``
    state : [..., heads, dim, state] in ``dtype``
    """
    raw = [None if t is None else t.to(dtype) for t in (g, a, A_log, dt_bias)]
    log_decay = _log_decay(raw[0], raw[1], raw[2], raw[3], gate, allowed=("softplus", "log"))
    return _delta_rule(
        state0.to(dtype),
        *_scaled_qk(q.to(dtype), k.to(dtype), norm, norm_eps, scale),
        v.to(dtype),
        log_decay[..., None],  # the same for every key channel
        _beta(beta, b, beta_rule, dtype),
        state_rounding,
        trace,
    )


def kda_recurrence(
    state0: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "softplus",
    lower_bound: float = -5.0,
    beta_rule: str = "sigmoid",
    norm: str = "l2",
    norm_eps: float = 1e-6,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    state_rounding: torch.dtype | None = None,
    trace: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run Kimi Delta Attention over the tokens: as GDN, with a gate per key channel.

    Parameters
    ----------
    g : [..., tokens, heads, state], the log decay itself, for ``gate="log"``
    a : [..., tokens, heads, state], the raw gate
    A_log : [heads]
    dt_bias : [heads, state], or the same flat, or None
    gate : ``"softplus"``, ``"bounded"`` or ``"log"``
    lower_bound : of the log decay in the bounded form
    state0, q, k, v, beta, b, beta_rule, norm, norm_eps, scale, dtype, state_rounding, trace :
        as in :func:`gdn_recurrence`

    Returns
    -------
    y, state : as in :func:`gdn_recurrence`

    Notes
    -----
    Source: the gate forms are those of flash-linear-attention, ``fla/ops/kda/gate.py``
    (``naive_kda_gate`` and ``naive_kda_lowerbound_gate``).
    """
    heads, channels = state0.shape[-3], state0.shape[-1]
    if dt_bias is not None:
        dt_bias = dt_bias.to(dtype).reshape(heads, channels)
    if A_log is not None:
        A_log = A_log.to(dtype)[:, None]  # the same for every key channel
    g, a = (None if t is None else t.to(dtype) for t in (g, a))
    log_decay = _log_decay(
        g, a, A_log, dt_bias, gate, allowed=("softplus", "bounded", "log"), lower_bound=lower_bound
    )
    return _delta_rule(
        state0.to(dtype),
        *_scaled_qk(q.to(dtype), k.to(dtype), norm, norm_eps, scale),
        v.to(dtype),
        log_decay,
        _beta(beta, b, beta_rule, dtype),
        state_rounding,
        trace,
    )


def _delta_rule(
    state: Tensor,  # [..., heads, dim, state]
    q: Tensor,  # [..., tokens, key_heads, state]
    k: Tensor,
    v: Tensor,  # [..., tokens, heads, dim]
    log_decay: Tensor,  # [..., tokens, heads, state or 1]
    beta: Tensor,  # [..., tokens, heads]
    state_rounding: torch.dtype | None,
    trace: list[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Decay, correct, write, read: the recurrence of both families."""
    ratio = v.shape[-2] // k.shape[-2]
    q = q.repeat_interleave(ratio, dim=-2)  # [..., tokens, heads, state]
    k = k.repeat_interleave(ratio, dim=-2)

    y = torch.empty_like(v)
    for t in range(v.shape[-3]):
        q_t, k_t = q[..., t, :, None, :], k[..., t, :, None, :]  # [..., heads, 1, state]
        state = torch.exp(log_decay[..., t, :, None, :]) * state
        recalled = (state * k_t).sum(-1)  # [..., heads, dim]
        corrected = beta[..., t, :, None] * (v[..., t, :, :] - recalled)
        state = state + corrected[..., :, None] * k_t
        y[..., t, :, :] = (state * q_t).sum(-1)
        if state_rounding is not None:
            state = state.to(state_rounding).to(state.dtype)
        if trace is not None:
            trace.append(state)
    return y, state


def _scaled_qk(
    q: Tensor, k: Tensor, norm: str, norm_eps: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    if norm == "l2":
        q, k = l2_normalise(q, norm_eps), l2_normalise(k, norm_eps)
    elif norm != "none":
        raise ValueError(f"norm: got {norm!r}; allowed 'l2', 'none'")
    return q * (q.shape[-1] ** -0.5 if scale is None else scale), k


def _log_decay(
    g: Tensor | None,
    a: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: str,
    *,
    allowed: tuple[str, ...],
    lower_bound: float = 0.0,
) -> Tensor:
    if gate not in allowed:
        raise ValueError(f"gate: got {gate!r}; allowed {allowed}")
    if gate == "log":
        if g is None or a is not None:
            raise ValueError("gate: got 'log' without g or with a; pass g, the log decay, alone")
        return g
    if a is None or A_log is None or g is not None:
        raise ValueError(f"gate: got {gate!r} without a and A_log, or with g; pass a and A_log")
    if gate == "softplus":
        return softplus_gate(a, A_log, dt_bias)
    return bounded_gate(a, A_log, dt_bias, lower_bound=lower_bound)


def _beta(beta: Tensor | None, b: Tensor | None, rule: str, dtype: torch.dtype) -> Tensor:
    if (beta is None) == (b is None):
        raise ValueError("beta: got both or neither of beta and b; pass exactly one of them")
    if beta is not None:
        return beta.to(dtype)
    assert b is not None
    return beta_value(b.to(dtype), rule)
