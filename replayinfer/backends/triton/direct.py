"""The direct step of every family: one launch that moves the states of a layer in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...planner import Plan
from ...pools import StatePool
from .workspace import bit_planes, config, has_pdl

__all__ = ["direct", "prefers_direct"]


def direct(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """One token of every sequence in one layer."""
    launch = _mamba2 if pool.spec.family == "mamba2" else _delta
    tokens = {name: value[:, 0] for name, value in inputs.items()}
    plane, low = bit_planes(pool, layer)
    launch(pool, plan, layer, tokens, out[:, 0], plane, low)


def prefers_direct(pool: StatePool, bucket: int) -> bool:
    """Whether the launch table has the direct step ahead of replay for a bucket."""
    from replayinfer.kernels.launch.lookup import prefers_direct as of_table

    return of_table(pool.spec, pool.format.name, bucket, pool.device)


def _mamba2(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    y: torch.Tensor,
    plane: torch.Tensor,
    low: torch.Tensor | None,
) -> None:
    from replayinfer.kernels.mamba2.direct import direct as launch

    spec: Any = pool.spec
    weights = pool.weights
    launch(
        y, plane, low, inputs["x"], inputs["dt"], inputs["B"], inputs["C"], inputs.get("z"),
        weights["A"][layer], weights["D"][layer], weights["dt_bias"][layer],
        plan.arrays.page, plan.arrays.window,
        dt_limit=spec.dt_limit, dt_softplus=spec.dt_softplus,
        pdl=has_pdl(pool.device), config=config(pool, "direct", plan.bucket),
    )  # fmt: skip


def _delta(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    y: torch.Tensor,
    plane: torch.Tensor,
    low: torch.Tensor | None,
) -> None:
    from replayinfer.kernels.delta.direct import direct as launch

    spec: Any = pool.spec
    raw = spec.gate != "log"
    weights = {name: pool.weights[name][layer] for name in ("A_log", "dt_bias")} if raw else {}
    launch(
        y, plane, low, inputs["q"], inputs["k"], inputs["v"], inputs["a" if raw else "g"],
        inputs["b"],
        weights.get("A_log"), weights.get("dt_bias"),
        plan.arrays.page, plan.arrays.window,
        gate_kind=spec.gate, beta_rule=spec.beta,
        norm=spec.norm == "l2", norm_eps=spec.norm_eps, query_scale=spec.query_scale,
        lower_bound=getattr(spec, "lower_bound", 0.0),
        pdl=has_pdl(pool.device), config=config(pool, "direct", plan.bucket),
    )  # fmt: skip
