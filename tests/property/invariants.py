"""What holds of a pool after every operation, whatever the operation was."""

from __future__ import annotations

import numpy as np
import torch

from replayinfer import Plan, StatePool
from replayinfer.pools import PageAllocator


def allocators(pool: StatePool) -> dict[str, PageAllocator]:
    """The pool's three kinds of ids by the names that errors use."""
    return {p.name: p for p in (pool.slot_ids, pool.checkpoint_ids, pool.input_ids)}


def check_references(pool: StatePool, plan: Plan | None) -> None:
    """Counts equal occurrences; what the next rows overwrite is private; nothing is lost.

    `plan` is the one that is neither committed nor aborted, if there is one.
    """
    cur, R = pool.cursors, pool.sizes.page_rows
    live = cur.live
    held = {
        "sequence slots": [live],
        "checkpoint pages": [cur.checkpoint[live]],
        "input pages": [cur.table[live][cur.table[live] >= 0]],
    }
    planned = plan is not None and plan.state == "planned"
    if planned:  # pages that a plan has taken and no cursor shows yet
        held["checkpoint pages"].append(plan.taken_checkpoints)
        held["input pages"].append(plan.taken_inputs)
    for name, ids in allocators(pool).items():
        counts = np.bincount(np.concatenate(held[name]), minlength=ids.count)
        assert (ids.refs == counts).all(), f"{name}: {ids.refs} for {counts}"
        assert ids.free + ids.used == ids.count
        stack = ids._stack[: ids.free]
        assert sorted(stack) == np.flatnonzero(counts == 0).tolist(), f"{name}: free list"

    history, table = cur.history[live], cur.table[live]
    assert ((history >= 0) & (history <= pool.capacity)).all()
    place = np.arange(table.shape[1])
    assert (table[place < -(-history[:, None] // R)] >= 0).all(), "a row without a page"
    writable = (place >= history[:, None] // R) & (table >= 0)
    assert (pool.input_ids.refs[table[writable]] == 1).all(), "the next row is in a shared page"
    busy = set() if plan is None else set(plan.slots.tolist())
    assert set(np.flatnonzero(cur.busy).tolist()) == busy
    if plan is not None and plan.direct:
        pages = plan.pages[plan.windows > 0]
        assert (pool.checkpoint_ids.refs[pages] == 1).all(), "a direct step in a shared page"
        assert not plan.starts[plan.windows > 0].any(), "a direct step over rows"
    elif plan is not None:
        for table, start, window in zip(plan.table, plan.starts, plan.windows, strict=True):
            rows = start + np.arange(window)
            assert (pool.input_ids.refs[table[rows // R]] == 1).all(), "window rows are shared"
    if planned:
        target = plan.pages[plan.fold_index]
        assert (pool.checkpoint_ids.refs[target] == 1).all(), "a fold into a shared page"


def everything(pool: StatePool) -> dict[str, torch.Tensor]:
    """All that a refused call must leave alone."""
    cur = pool.cursors
    named = {"checkpoints": pool.checkpoints.storage, "conv": pool.conv.rows}
    named |= {f"row {name}": t for name, t in pool.inputs.fields.items()}
    for name in ("base", "history", "undo", "checkpoint", "table", "generation", "busy"):
        named[f"cursor {name}"] = torch.from_numpy(getattr(cur, name))
    for name, ids in allocators(pool).items():
        named[f"{name} refs"] = torch.from_numpy(ids.refs)
        named[f"{name} stack"] = torch.from_numpy(ids._stack[: ids.free])
    return named


def poison(pool: StatePool) -> None:
    """NaN into dead rows, free pages, and convolution rows that no token needs any more."""
    cur, R = pool.cursors, pool.sizes.page_rows
    live = cur.live
    kept = torch.zeros(pool.sizes.input_pages, R, dtype=torch.bool)
    seq, row = np.nonzero(np.arange(pool.capacity) < cur.history[live][:, None])
    kept[cur.table[live][seq, row // R], row % R] = True
    for values in pool.inputs.fields.values():
        values[:, ~kept] = np.nan
    free = torch.from_numpy(pool.checkpoint_ids.refs == 0)
    nan = 0x7FC0 if pool.checkpoints.storage.dtype == torch.int16 else np.nan
    pool.checkpoints.storage[:, free] = nan
    tokens = cur.base[live] + cur.history[live]
    oldest = pool.conv.taps + (cur.history if pool.restore == "any" else cur.undo)[live]
    age = np.arange(1, pool.conv.ring + 1)
    seq, back = np.nonzero(age <= oldest[:, None])
    ring = torch.zeros(pool.sizes.max_sequences, pool.conv.ring, dtype=torch.bool)
    ring[live[seq], (tokens[seq] - age[back]) % pool.conv.ring] = True
    pool.conv.rows[:, ~ring] = np.nan
