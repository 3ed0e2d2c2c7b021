"""The reference backend: plain torch, any device, float32 arithmetic. Readable first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...planner import Plan
from ...pools import StatePool
from . import delta, mamba2
from .conv import conv_update
from .rows import Window, compact_rows

__all__ = ["TorchBackend"]

# family -> (advance, readout)
_FAMILIES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "mamba2": (mamba2.advance, mamba2.readout),
    "gdn": (delta.advance, delta.readout),
    "kda": (delta.advance, delta.readout),
}


class TorchBackend:
    """Executes plans with torch operators.

    Notes
    -----
    It reads the host's record of the plan rather than the device arrays, so it neither syncs for
    the fold count nor fits into a CUDA graph.
    """

    name = "torch"

    def supports(self, pool: StatePool) -> str | None:
        if pool.spec.family not in _FAMILIES:
            return f"family {pool.spec.family!r}; it serves {', '.join(_FAMILIES)}"
        return None

    def fold(self, pool: StatePool, plan: Plan) -> None:
        count = plan.fold_count
        if not count:
            return
        advance = _FAMILIES[pool.spec.family][0]
        arrays = plan.arrays
        source = arrays.fold_source[:count].long()
        target = arrays.fold_target[:count].long()
        table = arrays.fold_table[:count].long()
        rows = arrays.fold_rows[:count].long()
        for layer in range(len(pool.layers)):
            state = pool.checkpoints.load(layer, source)
            state = advance(pool, pool.spec, layer, state, table, rows)
            pool.checkpoints.store(layer, target, state)

    def conv(
        self, pool: StatePool, plan: Plan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        window = Window.of(pool, plan)
        window.put(out, conv_update(pool, plan, layer, window, x))

    def readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        n = plan.batch
        window = Window.of(pool, plan)
        arrays = plan.arrays
        state = pool.checkpoints.read(layer, arrays.page[:n].long())
        y = _FAMILIES[pool.spec.family][1](
            pool, pool.spec, layer, window, inputs, state,
            arrays.table[:n].long(), arrays.history[:n].long(),
        )  # fmt: skip
        window.put(out, y)

    def compact(self, pool: StatePool, plan: Plan, nodes: NDArray[np.int32]) -> None:
        compact_rows(pool, plan, nodes)

    def materialize(
        self, pool: StatePool, layer: int, page: int, table: list[int], rows: int
    ) -> torch.Tensor:
        def row(values: Any) -> torch.Tensor:
            return torch.tensor([values], dtype=torch.int64, device=pool.device)

        state = pool.checkpoints.load(layer, row(page))
        advance = _FAMILIES[pool.spec.family][0]
        return advance(pool, pool.spec, layer, state, row(table), row(rows))[0]
