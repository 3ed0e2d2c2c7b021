"""Mamba-2 by replay, in plain torch. Names as in `replayinfer.spec.mamba2`.

With ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``::

    y_t = exp(A d(0,t)) S0 C_t + sum_{j <= t} dt_j exp(A d(j,t)) (B_j . C_t) x_j + D x_t
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...pools import StatePool
from ...spec import Mamba2Spec
from .gates import step_sizes
from .rows import Window, gather_rows, pairwise_sums, suffix_sums

__all__ = ["advance", "readout"]


def advance(
    pool: StatePool,
    spec: Mamba2Spec,
    layer: int,
    state: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """States ``[n, heads, dim, state]`` advanced over the first `counts` rows of `table`.

    With one row this is the plain recurrence, bit for bit: ``exp(A dt) S + (dt x) B^T``.
    """
    rows = gather_rows(pool, layer, table, counts)
    decay_rate = pool.weights["A"][layer]
    after, total = suffix_sums(rows["dt"])  # [n, j, h], [n, h]
    weight = torch.exp(decay_rate * after) * rows["dt"]
    x = weight[..., None] * rows["x"]  # [n, j, h, d]
    b = _to_heads(rows["B"], spec)  # [n, j, h, s]
    update = torch.einsum("njhd,njhs->nhds", x, b)
    return torch.exp(decay_rate * total)[..., None, None] * state + update


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
    weights = pool.weights
    decay_rate = weights["A"][layer]
    x, b, c = (window.take(inputs[name]) for name in ("x", "B", "C"))
    dt = step_sizes(spec, window.take(inputs["dt"]), weights["dt_bias"][layer])
    dt = window.only_live(dt)
    window.append(pool, layer, {"x": x, "B": b, "dt": dt})

    past = gather_rows(pool, layer, table, starts)
    after, total = suffix_sums(past["dt"])  # to the end of the history
    pair, since = pairwise_sums(dt, window.allowed)  # inside the window, and from its start

    reach = decay_rate * (after[:, None] + since[:, :, None])  # [n, t, j, h]
    scores = _to_heads(torch.einsum("njgs,ntgs->ntjg", past["B"], c), spec, axis=3)
    y = torch.einsum("ntjh,njhd->nthd", torch.exp(reach) * past["dt"][:, None] * scores, past["x"])

    inside = torch.exp(decay_rate * pair) * dt[:, None] * window.allowed[..., None]
    scores = _to_heads(torch.einsum("njgs,ntgs->ntjg", b, c), spec, axis=3)
    y = y + torch.einsum("ntjh,njhd->nthd", inside * scores, x)

    from_state = torch.einsum("nhds,nths->nthd", state, _to_heads(c, spec))
    y = y + torch.exp(decay_rate * (total[:, None] + since))[..., None] * from_state
    y = y + weights["D"][layer][:, None] * x
    if "z" in inputs:
        y = y * torch.nn.functional.silu(window.take(inputs["z"]))
    return y


def _to_heads(per_group: torch.Tensor, spec: Mamba2Spec, *, axis: int = 2) -> torch.Tensor:
    """Repeat the groups on `axis` to heads."""
    return per_group.repeat_interleave(spec.heads // spec.groups, dim=axis)
