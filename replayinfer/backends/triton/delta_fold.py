"""The fold of Gated DeltaNet and Kimi Delta Attention: a plan's fold list to one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...planner.plan import PlanArrays
from ...pools import StatePool
from ..scratch import scratch
from .workspace import FoldArrays, bit_planes, config, processors

__all__ = ["fold"]


def fold(
    pool: StatePool,
    layers: slice,
    out: torch.Tensor,
    out_low: torch.Tensor | None,
    arrays: PlanArrays | FoldArrays,
    bucket: int,
) -> None:
    """Fold `layers` of the pool into `out` ``[layers, pages, heads, dim, state]``.

    Notes
    -----
    A fold list that is not a plan's, as for `materialize`, gets its scratch memory anew.
    """
    from replayinfer.kernels.delta.fold import fold, scratch_size
    from replayinfer.kernels.delta.fold_channels import fold_channels
    from replayinfer.kernels.delta.fold_channels import scratch_size as channels_size

    spec: Any = pool.spec
    rows = {name: field[layers] for name, field in pool.inputs.fields.items()}
    plane, low = bit_planes(pool, layers)
    if out_low is not None:
        out = out.view(torch.int16)
    # More rows leave fewer registers: choices of their own.
    choice = config(pool, "fold" if pool.capacity <= 16 else "fold32", bucket)
    programs = processors(pool.device) * choice.programs_per_sm
    solves = spec.resolves(pool.format)
    per_channel = "state" in spec.gate_dims
    launch: Callable[..., None] = fold
    if solves and per_channel and not choice.columns:
        launch, size = fold_channels, channels_size(pool.capacity, spec.state)
    else:
        size = scratch_size(pool.capacity, spec.state, solve=solves, per_channel=per_channel)
    own = None
    if size and isinstance(arrays, PlanArrays):
        own = scratch(arrays, "fold", programs, size)
    elif size:
        own = torch.empty((programs, size), device=pool.device)
    launch(
        out, out_low, plane, low,
        rows["k"], rows.get("k_scale"), rows["g"], rows.get("beta"), rows["v" if solves else "u"],
        arrays.fold_source, arrays.fold_target, arrays.fold_rows, arrays.fold_table,
        arrays.fold_count, own,
        capacity=pool.capacity,
        programs=programs,
        config=choice,
    )  # fmt: skip
