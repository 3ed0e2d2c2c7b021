"""Plans and cursors on the device: one launch each, and one more for the plan of a tree."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ...planner.device import DeviceStep, StepRequest
from ...pools import StatePool

__all__ = ["abort_step", "accept_paths", "commit_step", "fold_step", "plan_step"]


def plan_step(pool: StatePool, step: DeviceStep, request: StepRequest) -> None:
    """Write the plan of `request` into `step`."""
    from replayinfer.kernels.planner.plan import plan_step as launch

    out = step.arrays
    launch(
        out.slot, out.page, out.history, out.window, out.conv_place, out.table,
        out.fold_count, out.fold_source, out.fold_target, out.fold_rows, out.fold_table,
        out.ancestors, step.handle,
        request.sequences, request.windows, request.force, _records(pool),
        uniform=request.uniform, most=request.most, capacity=pool.capacity, ring=pool.conv.ring,
        spread=request.spread, budget=request.budget, direct=request.direct,
    )  # fmt: skip
    if request.parents is not None and out.ancestors.shape[1]:
        from replayinfer.kernels.planner.trees import tree_masks

        tree_masks(out.ancestors, out.slot, out.window, request.parents)


def accept_paths(pool: StatePool, step: DeviceStep, paths: torch.Tensor) -> None:
    """Write the nodes and counts of `paths`."""
    from replayinfer.kernels.planner.trees import accept_paths as launch

    out = step.arrays
    launch(
        step.nodes, step.counts, paths, out.slot, out.window, out.ancestors, step.handle,
        _records(pool),
    )  # fmt: skip


def fold_step(pool: StatePool, step: DeviceStep) -> None:
    """Move the cursors of the sequences that fold."""
    _move("fold", pool, step)


def commit_step(
    pool: StatePool, step: DeviceStep, accepted: torch.Tensor | None, *, direct: bool = False
) -> None:
    """Advance histories, or the bases of a direct step, by the accepted counts."""
    _move("direct" if direct else "commit", pool, step, counts=step.counts, accepted=accepted)


def abort_step(pool: StatePool, step: DeviceStep) -> None:
    """Drop the windows of a step that has folded."""
    _move("abort", pool, step, max_window=pool.max_window)


def _move(
    action: Literal["fold", "commit", "abort", "direct"],
    pool: StatePool,
    step: DeviceStep,
    **options: Any,
) -> None:
    from replayinfer.kernels.planner.commit import move_cursors

    out = step.arrays
    move_cursors(
        action, out.slot, out.page, out.history, out.window, out.table, step.handle,
        _records(pool), **options,
    )  # fmt: skip


def _records(pool: StatePool) -> torch.Tensor:
    assert pool.on_device is not None
    return pool.on_device.records.words
