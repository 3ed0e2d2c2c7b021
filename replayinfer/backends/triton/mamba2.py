"""Mamba-2: plans to kernel launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...planner import Plan
from ...planner.plan import PlanArrays
from ...pools import StatePool
from ..scratch import scratch
from .workspace import (
    FoldArrays,
    bit_planes,
    config,
    has_pdl,
    processors,
    require_pairs,
)

__all__ = ["fold", "readout", "verify"]


def fold(
    pool: StatePool,
    layers: slice,
    out: torch.Tensor,
    out_low: torch.Tensor | None,
    arrays: PlanArrays | FoldArrays,
    bucket: int,
) -> None:
    """Fold `layers` of the pool into `out` ``[layers, pages, heads, dim, state]``."""
    from replayinfer.kernels.mamba2.fold import fold as launch

    rows = pool.inputs.fields
    plane, low = bit_planes(pool, layers)
    if out_low is not None:
        out = out.view(torch.int16)
    choice = config(pool, "fold" if pool.capacity <= 32 else "fold64", bucket)
    launch(
        out, out_low, plane, low, pool.weights["A"][layers],
        rows["x"][layers], rows["B"][layers], rows["dt"][layers],
        arrays.fold_source, arrays.fold_target, arrays.fold_rows, arrays.fold_table,
        arrays.fold_count,
        capacity=pool.capacity,
        programs=processors(pool.device) * choice.programs_per_sm,
        config=choice,
    )  # fmt: skip


def readout(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """One token of every sequence in one layer: one kernel for small batches, else two."""
    from replayinfer.kernels.mamba2.fused import fused
    from replayinfer.kernels.mamba2.prepass import prepass
    from replayinfer.kernels.mamba2.readout import readout as stream

    spec: Any = pool.spec
    arrays, weights, rows = plan.arrays, pool.weights, pool.inputs.fields
    y, plane = out[:, 0], pool.checkpoints.plane[layer]
    x, dt, b, c = (inputs[name][:, 0] for name in ("x", "dt", "B", "C"))
    z = inputs["z"][:, 0] if "z" in inputs else None
    a, d_skip, dt_bias = (weights[name][layer] for name in ("A", "D", "dt_bias"))
    row_x, row_b, row_dt = (rows[name][layer] for name in ("x", "B", "dt"))
    gate = {"dt_limit": spec.dt_limit, "dt_softplus": spec.dt_softplus}
    pdl = has_pdl(pool.device)

    if (whole := config(pool, "fused", plan.bucket)) is not None:
        fused(
            y, plane, x, dt, b, c, z, a, d_skip, dt_bias, row_x, row_b, row_dt,
            arrays.page, arrays.history, arrays.window, arrays.table,
            capacity=pool.capacity, **gate, pdl=pdl, config=whole,
        )  # fmt: skip
        return
    require_pairs(B=b, C=c)
    depth = max(16, 1 << (pool.capacity - 1).bit_length())
    weight = scratch(arrays, "weight", plan.bucket, spec.heads, depth)
    scale = scratch(arrays, "scale", plan.bucket, spec.heads, 2)
    prepass(
        weight, scale, dt, b, c, a, d_skip, dt_bias, row_b, row_dt,
        arrays.history, arrays.window, arrays.table,
        **gate, pdl=pdl, config=config(pool, "prepass", plan.bucket),
    )  # fmt: skip
    stream(
        y, plane, weight, scale, x, c, z, row_x,
        arrays.page, arrays.history, arrays.window, arrays.table,
        pdl=pdl, config=config(pool, "readout", plan.bucket),
    )  # fmt: skip


def verify(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """A window of several tokens of every sequence in one layer; some may have none."""
    from replayinfer.kernels.mamba2.verify import verify as stream
    from replayinfer.kernels.mamba2.verify_prepass import verify_prepass as prepass

    spec: Any = pool.spec
    arrays, weights, rows = plan.arrays, pool.weights, pool.inputs.fields
    x, dt, b, c = (inputs[name] for name in ("x", "dt", "B", "C"))
    a, d_skip, dt_bias = (weights[name][layer] for name in ("A", "D", "dt_bias"))
    row_x, row_b, row_dt = (rows[name][layer] for name in ("x", "B", "dt"))
    pdl = has_pdl(pool.device)
    tokens = 8 if plan.window <= 8 else 16
    depth = max(16, 1 << (pool.capacity - 1).bit_length())
    scores = scratch(arrays, "scores", plan.bucket, spec.groups, tokens, depth)
    weight = scratch(arrays, "weight", plan.bucket, spec.heads, depth)
    inside = scratch(arrays, "inside", plan.bucket, spec.heads, tokens, tokens + 2)
    scale = scratch(arrays, "scale", plan.bucket, spec.heads, 2, tokens)
    prepass(
        scores, weight, inside, scale, dt, b, c, a, dt_bias, row_b, row_dt,
        arrays.history, arrays.window, arrays.ancestors, arrays.table,
        dt_limit=spec.dt_limit, dt_softplus=spec.dt_softplus,
        pdl=pdl, config=config(pool, "verify_prepass", plan.bucket),
    )  # fmt: skip
    stream(
        out, pool.checkpoints.plane[layer], scores, weight, inside, scale, x, c, inputs.get("z"),
        d_skip, row_x,
        arrays.page, arrays.history, arrays.window, arrays.table,
        pdl=pdl, config=config(pool, "verify" if depth <= 32 else "verify64", plan.bucket),
    )  # fmt: skip
