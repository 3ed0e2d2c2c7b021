"""What ``REPLAYINFER_CHECK=1`` checks around every step; nothing of it runs otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import CheckError, NonFiniteStateError
from .planner import Plan
from .pools import StatePool

__all__ = ["check_finite_outputs", "check_finite_states", "check_guards", "check_plan"]


def check_plan(pool: StatePool, plan: Plan) -> None:
    """Bounds of every index, and who else could see what the plan writes.

    Raises
    ------
    CheckError
        An index out of bounds, a page that two rows of the plan write, or one that is shared.
    """
    sizes, cur = pool.sizes, pool.cursors
    for handle, slot in zip(plan.handles.tolist(), plan.slots.tolist(), strict=True):
        if cur.peek(handle) != slot:
            raise CheckError(f"plan: {cur.describe(handle)} does not live in slot {slot}")
    _within("checkpoint page", plan.pages, sizes.checkpoint_pages, low=0)
    _within("input page", plan.table, sizes.input_pages, low=-1)
    _within("history + window", plan.starts + plan.windows, pool.capacity + 1, low=0)

    targets = plan.pages[plan.fold_index]
    _unshared("checkpoint page", targets, pool.checkpoint_ids.refs)
    rows = sizes.page_rows
    place = np.arange(plan.table.shape[1])
    first = (plan.starts // rows)[:, None]
    last = ((plan.starts + plan.windows - 1) // rows)[:, None]
    written = plan.table[(place >= first) & (place <= last) & (plan.windows > 0)[:, None]]
    if (written < 0).any():
        raise CheckError("plan: a window row has no input page")
    _unshared("input page", written, pool.input_ids.refs)


def check_guards(pool: StatePool) -> None:
    """Raise `CheckError` if anything was written outside the pools' pages; syncs."""
    for guarded in pool.guarded():
        if where := guarded.damaged():
            raise CheckError(f"guard: something wrote into {where}")


def check_finite_states(pool: StatePool, plan: Plan) -> None:
    """Raise `NonFiniteStateError` naming the sequences whose fold left a state that is not "
    "finite."""
    index = plan.fold_index
    if not index.size:
        return
    pages = torch.from_numpy(plan.pages[index].astype(np.int64)).to(pool.device)
    finite = torch.ones(index.size, dtype=torch.bool, device=pool.device)
    for layer in range(len(pool.layers)):
        finite &= torch.isfinite(pool.checkpoints.load(layer, pages)).flatten(1).all(1)
    _refuse_nonfinite("fold", plan.handles[index], finite, "state")


def check_finite_outputs(plan: Plan, layer: int, y: torch.Tensor) -> None:
    """Raise `NonFiniteStateError` naming the sequences whose outputs of a layer are not finite."""
    finite = torch.isfinite(y[: plan.batch]).flatten(1).all(1)
    _refuse_nonfinite("run", plan.handles, finite, f"output of layer {layer}")


def _refuse_nonfinite(
    action: str, handles: NDArray[np.int64], finite: torch.Tensor, what: str
) -> None:
    bad = handles[~finite.cpu().numpy()].tolist()
    if bad:
        raise NonFiniteStateError(
            f"{action}: got a {what} that is not finite for sequences {bad}; allowed finite "
            f"values; "
            "abort the step and free them, the others are not affected",
            bad,
        )


def _within(name: str, values: NDArray[np.int32], stop: int, *, low: int) -> None:
    if values.size and (int(values.min()) < low or int(values.max()) >= stop):
        raise CheckError(f"plan: a {name} outside {low}..{stop - 1}")


def _unshared(name: str, ids: NDArray[np.int32], refs: NDArray[np.int32]) -> None:
    if _repeated(ids.tolist()):
        raise CheckError(f"plan: one {name} is written for two sequences")
    if ids.size and (refs[ids] != 1).any():
        raise CheckError(f"plan: a {name} is written that another sequence holds")


def _repeated(ids: Iterable[int]) -> bool:
    seen = list(ids)
    return len(set(seen)) != len(seen)
