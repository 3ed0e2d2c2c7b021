"""Mamba-2 by replay, in plain torch. Names as in `replayinfer.spec.mamba2`.

With ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``::

    y_t = exp(A d(0,t)) S0 C_t + sum_{j <= t} dt_j exp(A d(j,t)) (B_j . C_t) x_j + D x_t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...pools import StatePool
from ...spec import Mamba2Spec
from .gates import silu, step_sizes
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
    spec: Mamba2Spec,
    layer: int,
    state: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """States ``[n, heads, dim, state]`` advanced over the first `counts` rows of `table`."""
    rows = gather_rows(pool, layer, table, counts)
    return _absorb(spec, pool.weights["A"][layer], state, rows)


def readout(
    pool: StatePool,
    spec: Mamba2Spec,
    layer: int,
    window: Window,
    inputs: Mapping[str, torch.Tensor],
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Append the window's rows and return ``y``, float32 ``[n, window, heads, dim]``."""
    tokens = _prepare(pool, spec, layer, inputs, window.take)
    tokens["dt"] = window.only_live(tokens["dt"])  # softplus(0) is not 0
    window.append(pool, layer, {name: tokens[name] for name in pool.inputs.fields})
    past = gather_rows(pool, layer, table, starts)
    return _attend(pool, spec, layer, state, tokens, window.allowed, past)


def step(
    pool: StatePool,
    spec: Mamba2Spec,
    layer: int,
    state: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token ``[n, 1, ...]`` of the plain recurrence: outputs ``[n, 1, heads, dim]``, states."""
    tokens = _prepare(pool, spec, layer, inputs, torch.Tensor.float)
    state = _absorb(spec, pool.weights["A"][layer], state, tokens)
    y = apply_state(state, _to_heads(spec, tokens["C"], axis=2))
    y = y + pool.weights["D"][layer][:, None] * tokens["x"]
    return (y * silu(tokens["z"]) if "z" in tokens else y), state


def prefill_chunk(
    pool: StatePool,
    spec: Mamba2Spec,
    layer: int,
    state: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of some tokens ``[1, tokens, ...]`` that continue `state`."""
    tokens = _prepare(pool, spec, layer, inputs, torch.Tensor.float)
    steps = tokens["dt"].shape[1]
    allowed = torch.ones(1, steps, steps, dtype=torch.bool, device=state.device).tril()
    y = _attend(pool, spec, layer, state, tokens, allowed, None)
    return y, _absorb(spec, pool.weights["A"][layer], state, tokens)


def _prepare(
    pool: StatePool,
    spec: Mamba2Spec,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    take: Callable[[torch.Tensor], torch.Tensor],
) -> Rows:
    tokens = {name: take(value) for name, value in inputs.items()}
    tokens["dt"] = step_sizes(spec, tokens["dt"], pool.weights["dt_bias"][layer])
    return tokens


def _attend(
    pool: StatePool,
    spec: Mamba2Spec,
    layer: int,
    state: torch.Tensor,
    tokens: Rows,
    allowed: torch.Tensor,
    past: Rows | None,
) -> torch.Tensor:
    """``y`` of tokens that read the state, the rows since it and, where allowed, each other."""
    rate = pool.weights["A"][layer]
    x, b, c, dt = (tokens[name] for name in ("x", "B", "C", "dt"))
    pair, since = pairwise_sums(dt, allowed)  # inside the window, and from its start
    inside = torch.exp(rate * pair) * dt[:, None]
    y = weighted_sum(inside * _scores(spec, b, c), x, allowed)
    whole = since
    if past is not None:
        after, total = suffix_sums(past["dt"])  # to the end of the history
        reach = torch.exp(rate * (after[:, None] + since[:, :, None])) * past["dt"][:, None]
        y = y + weighted_sum(reach * _scores(spec, past["B"], c), past["x"])
        whole = total[:, None] + since
    from_state = apply_state(state, _to_heads(spec, c, axis=2))
    y = y + torch.exp(rate * whole)[..., None] * from_state
    y = y + pool.weights["D"][layer][:, None] * x
    return y * silu(tokens["z"]) if "z" in tokens else y


def _absorb(spec: Mamba2Spec, rate: torch.Tensor, state: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The state after `rows`.

    With one row this is the plain recurrence, bit for bit: ``exp(A dt) S + (dt x) B^T``.
    """
    after, total = suffix_sums(rows["dt"])  # [n, j, h], [n, h]
    x = (torch.exp(rate * after) * rows["dt"])[..., None] * rows["x"]
    update = outer_sum(x, _to_heads(spec, rows["B"], axis=2))
    return torch.exp(rate * total)[..., None, None] * state + update


def _scores(spec: Mamba2Spec, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``B_j . C_t`` per head: ``[n, t, j, heads]``."""
    return _to_heads(spec, (b[:, None] * c[:, :, None]).sum(-1), axis=3)


def _to_heads(spec: Mamba2Spec, per_group: torch.Tensor, *, axis: int) -> torch.Tensor:
    return per_group.repeat_interleave(spec.heads // spec.groups, dim=axis)
