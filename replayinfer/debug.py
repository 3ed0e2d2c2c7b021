"""What ``REPLAYINFER_CHECK=1`` checks around every step; nothing of it runs otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import CheckError, NonFiniteStateError
from .planner import DevicePlan, HostPlanner, Plan
from .planner.trees import ancestor_masks, mask_columns
from .pools import StatePool

__all__ = [
    "check_device_plan",
    "check_finite_outputs",
    "check_finite_states",
    "check_guards",
    "check_plan",
]


def check_plan(pool: StatePool, plan: Plan) -> None:
    """Bounds of every index, and who else could see what the plan writes.

    Raises
    ------
    CheckError
        An index out of bounds, a page that two rows of the plan write, one that somebody else
        holds, a direct step over rows, or device arrays that are not the plan; syncs.
    StaleHandleError
        A sequence of the plan that was freed.
    """
    sizes, cur = pool.sizes, pool.cursors
    for handle, slot in zip(plan.handles.tolist(), plan.slots.tolist(), strict=True):
        if cur.peek(handle) != slot:
            raise CheckError(f"plan: {cur.describe(handle)} does not live in slot {slot}")
    _within("checkpoint page", plan.pages, sizes.checkpoint_pages, low=0)
    _within("input page", plan.table, sizes.input_pages, low=-1)
    _within("history + window", plan.starts + plan.windows, pool.capacity + 1, low=0)

    slots = plan.slots
    in_place = plan.direct & (plan.windows > 0)
    if plan.starts[in_place].any():
        raise CheckError("plan: a direct step has rows before it")
    moved = plan.fold | in_place
    targets = plan.pages[moved]
    _unshared("checkpoint page", targets, pool.checkpoint_ids.refs)
    spares = pool.on_device
    own = plan.taken_checkpoints if spares is None else spares.own_checkpoint[slots]
    _own("checkpoint page", targets, cur.checkpoint[slots[moved], None], own)
    rows = sizes.page_rows
    place = np.arange(plan.table.shape[1])
    first = (plan.starts // rows)[:, None]
    last = ((plan.starts + plan.windows - 1) // rows)[:, None]
    writes = (place >= first) & (place <= last) & ((plan.windows > 0) & ~in_place)[:, None]
    written = plan.table[writes]
    if (written < 0).any():
        raise CheckError("plan: a window row has no input page")
    if (plan.table[place * rows < plan.starts[:, None]] < 0).any():
        raise CheckError("plan: a committed row has no input page")
    _unshared("input page", written, pool.input_ids.refs)
    own = plan.taken_inputs if spares is None else spares.own_table[slots].ravel()
    _own("input page", written, cur.table[slots[np.nonzero(writes)[0]]], own)
    _check_arrays(pool, plan)


def check_device_plan(pool: StatePool, plan: DevicePlan) -> None:
    """A plan that the device made is the one that the host makes of the same sequences; syncs.

    Raises
    ------
    CheckError
        It differs, or the host's own plan fails its checks.
    """
    rows = np.flatnonzero(plan.slots >= 0)
    if not plan.direct and (plan.fold[rows] & (plan.fold_rows[rows] == 0)).any():
        raise CheckError("plan: the device folds a sequence without rows")
    busy, unnamed = pool.cursors.busy.copy(), pool.cursors.unnamed
    pool.cursors.busy[:], pool.cursors.unnamed = False, 0
    try:
        # What folds early is the policy's affair: here it is told.
        planner = HostPlanner(pool)
        want = planner.plan(
            plan.handles[rows], plan.windows[rows], window=plan.window,
            force_fold=plan.fold[rows], direct=plan.direct,
            parents=None if plan.parents is None else plan.parents[rows],
        )  # fmt: skip
        try:
            check_plan(pool, want)
            for name in ("slot", "page", "history", "window", "conv_place", "table", "ancestors"):
                have, wanted = (getattr(p.arrays, name).cpu().numpy() for p in (plan, want))
                if not np.array_equal(have[rows], wanted[: rows.size]):
                    raise CheckError(f"plan: the device's {name} is not what the host plans")
                pads = np.delete(have, rows, axis=0)
                if (pads != (-1 if name in ("slot", "page", "table") else 0)).any():
                    raise CheckError(f"plan: the device's {name} has more than pads in its pads")
            for name in ("fold_source", "fold_target", "fold_rows", "fold_table"):
                have, wanted = (getattr(p.arrays, name).cpu().numpy() for p in (plan, want))
                if not np.array_equal(have[: want.fold_count], wanted[: want.fold_count]):
                    raise CheckError(f"plan: the device's {name} is not what the host plans")
                if (have[want.fold_count :] != (0 if name == "fold_rows" else -1)).any():
                    raise CheckError(f"plan: the device's {name} goes on beyond its folds")
        finally:
            planner.abort(want)
    finally:
        pool.cursors.busy[:], pool.cursors.unnamed = busy, unnamed


def check_guards(pool: StatePool) -> None:
    """Raise `CheckError` if anything was written outside the pools' pages; syncs."""
    for guarded in pool.guarded():
        if where := guarded.damaged():
            raise CheckError(f"guard: something wrote into {where}")


def check_finite_states(pool: StatePool, plan: Plan, layer: int | None = None) -> None:
    """Raise `NonFiniteStateError` naming the sequences whose states are not finite.

    After the folds of all layers, or after the direct step of one.
    """
    index = plan.fold_index if layer is None else np.flatnonzero(plan.windows)
    if not index.size:
        return
    pages = torch.from_numpy(plan.pages[index].astype(np.int64)).to(pool.device)
    finite = torch.ones(index.size, dtype=torch.bool, device=pool.device)
    for i in range(len(pool.layers)) if layer is None else [pool.index(layer)]:
        finite &= torch.isfinite(pool.checkpoints.load(i, pages)).flatten(1).all(1)
    what = "state" if layer is None else f"state of layer {layer}"
    _refuse_nonfinite(plan, "fold" if layer is None else "run", index, finite, what)


def check_finite_outputs(plan: Plan, layer: int, y: torch.Tensor) -> None:
    """Raise `NonFiniteStateError` naming the sequences whose outputs of a layer are not finite."""
    finite = torch.isfinite(y[: plan.batch]).flatten(1).all(1)
    _refuse_nonfinite(plan, "run", np.arange(plan.batch), finite, f"output of layer {layer}")


def _refuse_nonfinite(
    plan: Plan, action: str, index: NDArray[np.int64], finite: torch.Tensor, what: str
) -> None:
    bad = plan.handles[index][~finite.cpu().numpy()].tolist()
    if bad:
        way = "run the other layers, commit" if plan.moved else "abort the step"
        raise NonFiniteStateError(
            f"{action}: got a {what} that is not finite for sequences {bad}; allowed finite "
            f"values; {way} and free them, the others are not affected",
            bad,
        )


def _check_arrays(pool: StatePool, plan: Plan) -> None:
    """What kernels read is what was planned, and every other entry of the bucket is a pad."""
    cur = pool.cursors
    folding = plan.slots[plan.fold_index]
    planned: dict[str, tuple[NDArray[Any], int]] = {
        "slot": (plan.slots, -1),
        "page": (plan.pages, -1),
        "history": (plan.starts, 0),
        "window": (plan.windows, 0),
        "conv_place": ((cur.base + cur.history)[plan.slots] % pool.conv.ring, 0),
        "table": (plan.table, -1),
        "fold_count": (np.array([plan.fold_count]), 0),
        "fold_source": (cur.checkpoint[folding], -1),
        "fold_target": (plan.pages[plan.fold_index], -1),
        "fold_rows": (plan.fold_rows[plan.fold_index], 0),
        "fold_table": (cur.table[folding], -1),
        "ancestors": (_masks(pool, plan), 0),
    }
    for name, (want, pad) in planned.items():
        array = getattr(plan.arrays, name).cpu().numpy()
        used = want.shape[0]
        if not np.array_equal(array[:used], want):
            raise CheckError(f"plan: its array {name} is not what was planned")
        if (array[used:] != pad).any():
            raise CheckError(f"plan: its array {name} has more than pads beyond what was planned")


def _masks(pool: StatePool, plan: Plan) -> NDArray[np.int32]:
    columns = mask_columns(pool.max_window)
    return np.broadcast_to(ancestor_masks(plan.parents, columns), (plan.batch, columns))


def _own(
    name: str, ids: NDArray[np.int32], held: NDArray[np.int32], taken: NDArray[np.int32]
) -> None:
    """`ids` ``[n]`` lie in the rows of `held` ``[n, ...]``, or were taken for the plan."""
    if not ((held == ids[:, None]).any(1) | np.isin(ids, taken)).all():
        raise CheckError(f"plan: a {name} is written that is another sequence's")


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
