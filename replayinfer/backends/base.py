"""What a backend does: four operations on a pool, and an honest answer about what it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..planner import Plan
from ..planner.prefill import PrefillPlan
from ..pools import StatePool

__all__ = ["Backend", "PrefillBackend"]


class Backend(Protocol):
    """Executes plans. Arguments are checked before they arrive; `layer` is a position in the pool.

    Implementations may be stateless: everything they work on belongs to the pool and the plan.
    """

    name: str

    def supports(self, pool: StatePool) -> str | None:
        """None if every operation works on `pool`, else the reason why not."""

    def fold(self, pool: StatePool, plan: Plan) -> None:
        """Advance the checkpoints of the plan's fold list over their rows, in all layers."""

    def conv(
        self, pool: StatePool, plan: Plan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Convolve the window, and put its pre-convolution rows into the rings."""

    def readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Append the window's rows and write its outputs; checkpoints are only read."""

    def compact(self, pool: StatePool, plan: Plan, nodes: NDArray[np.int32]) -> None:
        """Move accepted tree nodes ``[batch, window]`` (-1: none) to where a chain's rows lie."""

    def materialize(
        self, pool: StatePool, layer: int, page: int, table: list[int], rows: int
    ) -> torch.Tensor:
        """The state after `rows` rows, float32 ``[heads, dim, state]``; nothing is written."""


class PrefillBackend(Protocol):
    """Executes prefill plans. Arguments are checked before they arrive."""

    name: str

    def supports(self, pool: StatePool) -> str | None:
        """None if it can prefill `pool`, else the reason why not."""

    def prefill_conv(
        self, pool: StatePool, plan: PrefillPlan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Convolve packed rows ``[tokens, channels]``; keep each sequence's last in the plan."""

    def prefill(
        self,
        pool: StatePool,
        plan: PrefillPlan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Write outputs ``[tokens, heads, dim]``, and final states into the plan's target pages."""
