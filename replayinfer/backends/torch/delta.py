"""Gated DeltaNet and Kimi Delta Attention by replay, in plain torch.

With ``g(j, t)`` the sum of gates over the rows ``(j, t]``, per head (GDN) or per head and key
channel (KDA, where it stands inside every sum over channels), and ``u`` as the row holds it::

    S_t = S0 e^{g(0,t)} + sum_{j <= t} u_j (e^{g(j,t)} k_j)^T
    u_t = b_t (v_t - S0 (e^{g(0,t)} k_t) - sum_{j < t} (k_j . e^{g(j,t)} k_t) u_j)
    y_t = scale (S0 (e^{g(0,t)} q_t) + sum_{j <= t} (k_j . e^{g(j,t)} q_t) u_j)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...pools import StatePool
from ...spec import DeltaSpec
from .gates import beta as beta_rule
from .gates import log_decay, norm_scale
from .rows import Window, gather_rows, pairwise_sums, suffix_sums

__all__ = ["advance", "readout"]


def advance(
    pool: StatePool,
    spec: DeltaSpec,
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
    k = _to_heads(_keys(rows), spec)
    g = _per_channel(rows["g"])
    after, total = suffix_sums(g)
    u = _solve_rows(state, k, g, rows) if spec.resolves(pool.format) else rows["u"]
    update = torch.einsum("njhv,njhk->nhvk", u, torch.exp(after) * k)
    return torch.exp(total)[:, :, None] * state + update


def readout(
    pool: StatePool,
    spec: DeltaSpec,
    layer: int,
    window: Window,
    inputs: Mapping[str, torch.Tensor],
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Append the window's rows and return ``y``, float32 ``[n, window, heads, dim]``."""
    q, k_given, v = (window.take(inputs[name]) for name in ("q", "k", "v"))
    rows = {"k": k_given, "v": v}
    rows["g"] = window.only_live(log_decay(spec, pool.weights, layer, window, inputs))
    rows["beta"] = window.only_live(beta_rule(spec, window.take(inputs["b"])))
    if spec.norm == "l2":
        rows["k_scale"] = norm_scale(k_given, spec.norm_eps)
        q = q * norm_scale(q, spec.norm_eps)[..., None]
    k = _to_heads(_keys(rows), spec)
    q = _to_heads(q * spec.query_scale, spec)
    g = _per_channel(rows["g"])

    past = gather_rows(pool, layer, table, starts)
    past_k = _to_heads(_keys(past), spec)
    after, total = suffix_sums(_per_channel(past["g"]))  # to the end of the history
    pair, since = pairwise_sums(g, window.allowed)  # inside the window, and from its start
    reach = after[:, None] + since[:, :, None]  # [n, t, j, h, 1 or k]
    whole = torch.exp(total[:, None] + since)  # [n, t, h, 1 or k]

    def from_past(x: torch.Tensor) -> torch.Tensor:
        """``S x`` at each token from the checkpoint and the history: ``[n, t, h, v]``."""
        replayed = torch.einsum("ntjh,njhv->nthv", _scores(past_k, x, reach), past["u"])
        return replayed + torch.einsum("nhvk,nthk->nthv", state, whole * x)

    b = rows["beta"]
    allowed = window.allowed[..., None]
    rows["u"] = _substitute(b[..., None] * (v - from_past(k)), b, _scores(k, k, pair) * allowed)
    window.append(pool, layer, {name: rows[name] for name in pool.inputs.fields})

    reads = _scores(k, q, pair) * allowed
    return from_past(q) + torch.einsum("ntsh,nshv->nthv", reads, rows["u"])


def _solve_rows(
    state: torch.Tensor, k: torch.Tensor, g: torch.Tensor, rows: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """``(I + A) u = b (v - S0 e^{g(0,.)} k)`` over a fold's rows, ``[n, rows, heads, dim]``."""
    pair, since = pairwise_sums(g)
    seen = torch.einsum("nhvk,njhk->njhv", state, torch.exp(since) * k)
    b = rows["beta"]
    return _substitute(b[..., None] * (rows["v"] - seen), b, _scores(k, k, pair))


def _substitute(rhs: torch.Tensor, b: torch.Tensor, overlap: torch.Tensor) -> torch.Tensor:
    """Solve ``u_t + b_t sum_{s < t} overlap_ts u_s = rhs_t`` from the first row down."""
    u = torch.zeros_like(rhs)
    for t in range(rhs.shape[1]):
        known = torch.einsum("nsh,nshv->nhv", overlap[:, t, :t], u[:, :t])
        u[:, t] = rhs[:, t] - b[:, t, :, None] * known
    return u


def _scores(keys: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """``k_s . e^{g(s,t)} x_t`` per head, ``[n, t, s, h]``, from gates ``[n, t, s, h, 1 or k]``."""
    if gates.shape[-1] == 1:
        return torch.einsum("nshk,nthk->ntsh", keys, x) * torch.exp(gates[..., 0])
    return torch.einsum("nshk,ntshk,nthk->ntsh", keys, torch.exp(gates), x)


def _keys(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Keys as the recurrence uses them: normalised where the rows hold a norm."""
    return rows["k"] * rows["k_scale"][..., None] if "k_scale" in rows else rows["k"]


def _to_heads(per_key_head: torch.Tensor, spec: DeltaSpec) -> torch.Tensor:
    """``[n, t, key_heads, state]`` repeated to value heads."""
    return per_key_head.repeat_interleave(spec.head_ratio, dim=2)


def _per_channel(g: torch.Tensor) -> torch.Tensor:
    """Gates with a channel axis: ``[n, t, heads, 1]`` where one gate serves the whole head."""
    return g if g.dim() == 4 else g[..., None]
