"""Gated DeltaNet and Kimi Delta Attention by replay, in plain torch.

With ``g(j, t)`` the sum of gates over the rows ``(j, t]``, per head (GDN) or per head and key
channel (KDA, where it stands inside every sum over channels), and ``u`` as the row holds it::

    S_t = S0 e^{g(0,t)} + sum_{j <= t} u_j (e^{g(j,t)} k_j)^T
    u_t = b_t (v_t - S0 (e^{g(0,t)} k_t) - sum_{j < t} (k_j . e^{g(j,t)} k_t) u_j)
    y_t = scale (S0 (e^{g(0,t)} q_t) + sum_{j <= t} (k_j . e^{g(j,t)} q_t) u_j)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...pools import StatePool
from ...spec import DeltaSpec
from .gates import beta as beta_rule
from .gates import log_decay, norm_scale
from .rows import (
    Rows,
    Window,
    apply_state,
    gather_rows,
    outer_sum,
    pairwise_sums,
    suffix_sums,
    weighted_sum,
)

__all__ = ["advance", "prefill_chunk", "readout", "step"]


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
    u = _solve(state, k, g, rows["beta"], rows["v"]) if spec.resolves(pool.format) else rows["u"]
    return _absorb(state, k, g, u)


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
    tokens = _prepare(pool, spec, layer, inputs, window.take)
    # The gate or beta of an absent token is not 0 by itself.
    tokens["g"], tokens["beta"] = (window.only_live(tokens[name]) for name in ("g", "beta"))
    past = gather_rows(pool, layer, table, starts)
    y, tokens["u"] = _attend(spec, state, tokens, window.allowed, past)
    window.append(pool, layer, {name: tokens[name] for name in pool.inputs.fields})
    return y


def step(
    pool: StatePool,
    spec: DeltaSpec,
    layer: int,
    state: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token ``[n, 1, ...]`` of the plain recurrence: outputs ``[n, 1, heads, dim]``, states."""
    tokens = _prepare(pool, spec, layer, inputs, torch.Tensor.float)
    q, k = (_to_heads(x, spec) for x in (tokens["q"], _keys(tokens)))
    state = torch.exp(_per_channel(tokens["g"]))[:, 0, :, None] * state
    u = tokens["beta"][..., None] * (tokens["v"] - apply_state(state, k))
    state = state + outer_sum(u, k)
    return apply_state(state, q), state


def prefill_chunk(
    pool: StatePool,
    spec: DeltaSpec,
    layer: int,
    state: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of some tokens ``[1, tokens, ...]`` that continue `state`."""
    tokens = _prepare(pool, spec, layer, inputs, torch.Tensor.float)
    steps = tokens["v"].shape[1]
    allowed = torch.ones(1, steps, steps, dtype=torch.bool, device=state.device).tril()
    y, u = _attend(spec, state, tokens, allowed, None)
    return y, _absorb(state, _to_heads(_keys(tokens), spec), _per_channel(tokens["g"]), u)


def _prepare(
    pool: StatePool,
    spec: DeltaSpec,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    take: Callable[[torch.Tensor], torch.Tensor],
) -> Rows:
    """Queries normalised and scaled, keys as given beside their norm, gates and beta applied."""
    q, k, v = (take(inputs[name]) for name in ("q", "k", "v"))
    gate = take(inputs["g" if spec.gate == "log" else "a"])
    tokens = {
        "k": k,
        "v": v,
        "g": log_decay(spec, pool.weights, layer, gate),
        "beta": beta_rule(spec, take(inputs["b"])),
    }
    if spec.norm == "l2":
        tokens["k_scale"] = norm_scale(k, spec.norm_eps)
        q = q * norm_scale(q, spec.norm_eps)[..., None]
    tokens["q"] = q * spec.query_scale
    return tokens


def _attend(
    spec: DeltaSpec,
    state: torch.Tensor,
    tokens: Rows,
    allowed: torch.Tensor,
    past: Rows | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, u)`` of tokens that read the state, the rows since it and, as allowed, each other."""
    q, k = (_to_heads(x, spec) for x in (tokens["q"], _keys(tokens)))
    pair, since = pairwise_sums(_per_channel(tokens["g"]), allowed)  # in the window, from its start
    whole = torch.exp(since)  # [n, t, h, 1 or k]
    if past is not None:
        past_k = _to_heads(_keys(past), spec)
        after, total = suffix_sums(_per_channel(past["g"]))  # to the end of the history
        reach = after[:, None] + since[:, :, None]  # [n, t, j, h, 1 or k]
        whole = torch.exp(total[:, None] + since)

    def before_window(x: torch.Tensor) -> torch.Tensor:
        """``S x`` at each token without the window's own rows: ``[n, t, h, v]``."""
        read = apply_state(state, whole * x)
        if past is None:
            return read
        return read + weighted_sum(_scores(past_k, x, reach), past["u"])

    b = tokens["beta"]
    rhs = b[..., None] * (tokens["v"] - before_window(k))
    u = _substitute(rhs, b, _scores(k, k, pair), allowed)
    return before_window(q) + weighted_sum(_scores(k, q, pair), u, allowed), u


def _absorb(state: torch.Tensor, k: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The state after rows with keys ``[n, j, h, k]``, gates and corrected values."""
    after, total = suffix_sums(g)
    return torch.exp(total)[:, :, None] * state + outer_sum(u, torch.exp(after) * k)


def _solve(
    state: torch.Tensor, k: torch.Tensor, g: torch.Tensor, b: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """``(I + A) u = b (v - S0 e^{g(0,.)} k)`` over a fold's rows, ``[n, rows, heads, dim]``."""
    pair, since = pairwise_sums(g)
    seen = apply_state(state, torch.exp(since) * k)
    return _substitute(b[..., None] * (v - seen), b, _scores(k, k, pair))


def _substitute(
    rhs: torch.Tensor,
    b: torch.Tensor,
    overlap: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Solve ``u_t + b_t sum_{s < t} overlap_ts u_s = rhs_t`` from the first row down.

    The sum is over the `allowed` ``[n, t, s]`` of them, by default all.
    """
    u = torch.zeros_like(rhs)
    for t in range(rhs.shape[1]):
        terms = overlap[:, t, :t, :, None] * u[:, :t]
        if allowed is not None:
            terms = torch.where(allowed[:, t, :t, None, None], terms, 0.0)
        u[:, t] = rhs[:, t] - b[:, t, :, None] * terms.sum(1)
    return u


def _scores(keys: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """``k_s . e^{g(s,t)} x_t`` per head, ``[n, t, s, h]``, from gates ``[n, t, s, h, 1 or k]``."""
    if gates.shape[-1] == 1:
        return (keys[:, None] * x[:, :, None]).sum(-1) * torch.exp(gates[..., 0])
    return (torch.exp(gates) * keys[:, None] * x[:, :, None]).sum(-1)


def _keys(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Keys as the recurrence uses them: normalised where the rows hold a norm."""
    return rows["k"] * rows["k_scale"][..., None] if "k_scale" in rows else rows["k"]


def _to_heads(per_key_head: torch.Tensor, spec: DeltaSpec) -> torch.Tensor:
    """``[n, t, key_heads, state]`` repeated to value heads."""
    return per_key_head.repeat_interleave(spec.head_ratio, dim=2)


def _per_channel(g: torch.Tensor) -> torch.Tensor:
    """Gates with a channel axis: ``[n, t, heads, 1]`` where one gate serves the whole head."""
    return g if g.dim() == 4 else g[..., None]
