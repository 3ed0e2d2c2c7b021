"""Gated DeltaNet by replay, in plain torch. Names as in `replayinfer.spec.gdn`.

With ``g(j, t)`` the sum of gates over the rows ``(j, t]`` and ``u`` as the row holds it::

    S_t = e^{g(0,t)} S0 + sum_{j <= t} e^{g(j,t)} u_j k_j^T
    u_t = b_t (v_t - e^{g(0,t)} S0 k_t - sum_{j < t} e^{g(j,t)} (k_j . k_t) u_j)
    y_t = scale (e^{g(0,t)} S0 q_t + sum_{j <= t} e^{g(j,t)} (k_j . q_t) u_j)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...pools import StatePool
from ...spec import GDNSpec
from .gates import beta as beta_rule
from .gates import log_decay, norm_scale
from .rows import Window, gather_rows, pairwise_sums, suffix_sums

__all__ = ["advance", "readout"]


def advance(
    pool: StatePool,
    spec: GDNSpec,
    layer: int,
    state: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """States ``[n, heads, dim, state]`` advanced over the first `counts` rows of `table`.

    Where readouts saw a rounded checkpoint the rows' ``u`` is provisional, and is solved for again
    from ``v`` with the full-precision state, so that its error never enters the recurrence.
    """
    rows = gather_rows(pool, layer, table, counts)
    k = _keys(rows)
    after, total = suffix_sums(rows["g"])
    u = _solve_rows(spec, state, k, rows) if spec.resolves(pool.format) else rows["u"]
    decayed = torch.exp(after)[..., None] * u  # [n, j, h, v]
    update = torch.einsum("njhv,njhk->nhvk", decayed, _to_heads(k, spec))
    return torch.exp(total)[..., None, None] * state + update


def readout(
    pool: StatePool,
    spec: GDNSpec,
    layer: int,
    window: Window,
    inputs: Mapping[str, torch.Tensor],
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Append the window's rows and return ``y``, float32 ``[n, window, heads, dim]``."""
    q, k_given, v = (window.take(inputs[name]) for name in ("q", "k", "v"))
    if spec.gate == "softplus":
        weights = pool.weights
        g = log_decay(window.take(inputs["a"]), weights["A_log"][layer], weights["dt_bias"][layer])
    else:
        g = window.take(inputs["g"])
    g = torch.where(window.live[..., None], g, 0.0)
    b = torch.where(window.live[..., None], beta_rule(spec, window.take(inputs["b"])), 0.0)
    rows = {"k": k_given, "g": g, "v": v, "beta": b}
    if spec.norm == "l2":
        rows["k_scale"] = norm_scale(k_given, spec.norm_eps)
        q = q * norm_scale(q, spec.norm_eps)[..., None]
    k = _keys(rows)
    q = q * spec.query_scale

    past = gather_rows(pool, layer, table, starts)
    past_k = _keys(past)
    after, total = suffix_sums(past["g"])  # to the end of the history
    since = g.cumsum(1)  # from there to each token: a forward sum
    reach = torch.exp(after[:, None] + since[:, :, None])  # [n, t, j, h]
    whole = torch.exp(total[:, None] + since)[..., None]  # [n, t, h, 1]

    def from_past(x: torch.Tensor) -> torch.Tensor:
        """``S x`` at each token from the checkpoint and the history: ``[n, t, h, v]``."""
        scores = torch.einsum("njgk,ntgk->ntjg", past_k, x).repeat_interleave(
            spec.head_ratio, dim=-1
        )
        replayed = torch.einsum("ntjh,njhv->nthv", reach * scores, past["u"])
        return replayed + whole * torch.einsum("nhvk,nthk->nthv", state, _to_heads(x, spec))

    pair = torch.exp(pairwise_sums(g))  # [n, t, s, h]
    overlap = _scores(spec, k, k) * pair
    u = _substitute(b[..., None] * (v - from_past(k)), b, overlap)
    rows["u"] = u
    window.append(pool, layer, {name: rows[name] for name in pool.inputs.fields})

    causal = torch.ones(pair.shape[1], pair.shape[1], device=pair.device).tril()[None, :, :, None]
    reads = _scores(spec, k, q) * pair * causal
    return from_past(q) + torch.einsum("ntsh,nshv->nthv", reads, u)


def _solve_rows(
    spec: GDNSpec, state: torch.Tensor, k: torch.Tensor, rows: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """``(I + A) u = b (v - e^{g(0,.)} S0 k)`` over a fold's rows, ``[n, rows, heads, dim]``."""
    since = rows["g"].cumsum(1)
    seen = torch.exp(since)[..., None] * torch.einsum("nhvk,njhk->njhv", state, _to_heads(k, spec))
    b = rows["beta"]
    overlap = _scores(spec, k, k) * torch.exp(pairwise_sums(rows["g"]))
    return _substitute(b[..., None] * (rows["v"] - seen), b, overlap)


def _substitute(rhs: torch.Tensor, b: torch.Tensor, overlap: torch.Tensor) -> torch.Tensor:
    """Solve ``u_t + b_t sum_{s < t} overlap_ts u_s = rhs_t`` from the first row down."""
    u = torch.zeros_like(rhs)
    for t in range(rhs.shape[1]):
        known = torch.einsum("nsh,nshv->nhv", overlap[:, t, :t], u[:, :t])
        u[:, t] = rhs[:, t] - b[:, t, :, None] * known
    return u


def _scores(spec: GDNSpec, keys: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``k_s . x_t`` per value head: ``[n, t, s, heads]``."""
    return torch.einsum("nsgk,ntgk->ntsg", keys, x).repeat_interleave(spec.head_ratio, dim=-1)


def _keys(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Keys as the recurrence uses them: normalised where the rows hold a norm."""
    return rows["k"] * rows["k_scale"][..., None] if "k_scale" in rows else rows["k"]


def _to_heads(per_key_head: torch.Tensor, spec: GDNSpec) -> torch.Tensor:
    """``[n, t, key_heads, state]`` repeated to value heads."""
    return per_key_head.repeat_interleave(spec.head_ratio, dim=2)
