"""What a device planner and a backend agree on: a step's arrays, its request, and the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..pools import StatePool
from .plan import PlanArrays

__all__ = ["CursorBackend", "DeviceStep", "StepRequest"]


@dataclass(frozen=True)
class StepRequest:
    """What a device plan is made from.

    Attributes
    ----------
    sequences : int32 or int64 [entries]
        Handles, or slots where they are below 2^20. Anything else is a pad: negative numbers, free
        slots, stale handles.
    windows : int32 or int64 [entries], or None
        Clamped to ``0..most``; without it every window is `uniform`.
    force : bool [entries], or None
    spread : bool
        Whether sequences fold early, as the policies ``"spread"`` and ``"deadline"`` have it.
    direct : bool
        Whether the step moves states in place: what takes a token folds all its rows, and leaves a
        checkpoint page that it does not own. Nothing folds early then.
    budget : int
        Where `spread`: the folds of a step that ``"deadline"`` grants, at most `entries`; 0 for
        ``"spread"``.
    parents : int32 or int64 [entries, most], or None
        Of the nodes of draft trees. A parent that does not come before its node counts as -1; what
        lies beyond a window, and the rows of pads, do not matter.
    """

    sequences: torch.Tensor
    windows: torch.Tensor | None
    force: torch.Tensor | None
    uniform: int
    most: int
    spread: bool
    direct: bool = False
    budget: int = 0
    parents: torch.Tensor | None = None


@dataclass(frozen=True)
class DeviceStep:
    """The device arrays of a step, at fixed addresses.

    Attributes
    ----------
    arrays : PlanArrays
    handle : int64 [bucket]
        Of the sequences when they were planned, -1 for pads.
    counts : int32 [bucket]
        Accepted tokens, once committed.
    nodes : int32 [bucket, max_window]
        Accepted nodes of draft trees from the root down, -1 for none, once `accept_paths` ran.
    """

    arrays: PlanArrays
    handle: torch.Tensor
    counts: torch.Tensor
    nodes: torch.Tensor

    @classmethod
    def make(cls, arrays: PlanArrays, max_window: int) -> DeviceStep:
        """Of no sequences."""
        bucket, device = arrays.slot.shape[0], arrays.slot.device
        return cls(
            arrays,
            torch.full((bucket,), -1, dtype=torch.int64, device=device),
            torch.zeros(bucket, dtype=torch.int32, device=device),
            torch.full((bucket, max_window), -1, dtype=torch.int32, device=device),
        )


@runtime_checkable
class CursorBackend(Protocol):
    """Plans and moves cursors on the device of a pool, without a sync."""

    def plan_step(self, pool: StatePool, step: DeviceStep, request: StepRequest) -> None:
        """Write the whole plan into `step`, but no counts and nodes; no cursor moves."""

    def fold_step(self, pool: StatePool, step: DeviceStep) -> None:
        """Move the cursors of the sequences that fold, or leave a shared page without rows."""

    def accept_paths(self, pool: StatePool, step: DeviceStep, paths: torch.Tensor) -> None:
        """Write the nodes and counts of accepted `paths`, int32 or int64 ``[entries, width]``.

        A path ends before the first entry that is no child of the one before it (-1 is none), and
        one of a pad, or of a sequence that is gone, is empty. No cursor moves.
        """

    def commit_step(
        self,
        pool: StatePool,
        step: DeviceStep,
        accepted: torch.Tensor | None,
        *,
        direct: bool = False,
    ) -> None:
        """Advance histories by `accepted` ``[entries]``, clamped to 0..window, or by windows.

        A `direct` step advances bases instead. `accepted` may be the step's own counts.
        """

    def abort_step(self, pool: StatePool, step: DeviceStep) -> None:
        """Drop the windows of a step that has folded."""
