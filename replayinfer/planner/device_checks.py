"""Values that kernels clamp, refused: with ``REPLAYINFER_CHECK=1``, which syncs.

And where the host knows them anyway, which does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError
from .device_plan import DevicePlan
from .device_step import DeviceStep, StepRequest
from .trees import check_parents, check_paths

__all__ = ["check_counts", "check_nodes", "check_request", "check_taken", "check_trees"]


def check_request(request: StepRequest) -> None:
    """Refuse what the kernel would clamp, or plan twice; syncs."""
    named = request.sequences[request.sequences >= 0].cpu().numpy()
    slots = named & ((1 << 20) - 1)
    if np.unique(slots).size != slots.size:
        twice = int(np.flatnonzero(np.bincount(slots) > 1)[0])
        raise InputError(
            f"sequences: got slot {twice} twice; allowed each once; remove the duplicate"
        )
    if request.windows is not None and request.windows.numel():
        low, high = int(request.windows.min()), int(request.windows.max())
        if low < 0 or high > request.most:
            raise InputError(
                f"windows: got {low if low < 0 else high}; allowed 0..{request.most}; without "
                "REPLAYINFER_CHECK it is clamped"
            )


def check_trees(step: DeviceStep, parents: torch.Tensor) -> None:
    """Refuse parents that make no trees of the windows that were planned; syncs."""
    entries, width = parents.shape
    check_parents(parents.cpu().numpy(), step.arrays.window[:entries].cpu().numpy(), width)


def check_counts(plan: DevicePlan, counts: torch.Tensor) -> None:
    """Refuse what the kernel would clamp; syncs."""
    given = counts.cpu().numpy()
    windows = plan.step.arrays.window.cpu().numpy()[: plan.batch]
    live = plan.step.handle.cpu().numpy()[: plan.batch] >= 0
    least = windows if plan.moved else 0 * windows
    bad = live & ((given < least) | (given > windows))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        what = "what its direct step took" if plan.moved else "its window"
        raise InputError(
            f"accepted: got {int(given[i])} for entry {i} of the plan; allowed "
            f"{least[i]}..{windows[i]}, {what}; nothing was committed; without REPLAYINFER_CHECK "
            "it is clamped"
        )


def check_nodes(plan: DevicePlan, paths: torch.Tensor) -> None:
    """Refuse paths that the kernel would cut short; syncs."""
    live = plan.step.handle.cpu().numpy()[: plan.batch] >= 0
    given = np.where(live[:, None], paths.cpu().numpy(), -1)
    parents = plan.parents
    assert parents is not None, "paths of a plan of chains"
    check_paths(given, parents, plan.step.arrays.window.cpu().numpy()[: plan.batch])


def check_taken(plan: DevicePlan, given: NDArray[Any]) -> None:
    """Refuse to drop a token of a direct step, where the host can see it without a wait."""
    if plan.taken is None or not (short := given < plan.taken).any():
        return
    i = int(np.flatnonzero(short)[0])
    raise InputError(
        f"accepted: got {int(given[i])} for entry {i} of a direct step; allowed {plan.taken[i]}, "
        "its window, since its state has moved already; commit it and free the sequence, or plan "
        "with direct=False where a token may be refused"
    )
