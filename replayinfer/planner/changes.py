"""What a step will change: which sequences fold, and the pages that change hands for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..pools import StatePool
from ..pools.pages import IdArray
from .policy import Policy
from .predicate import must_fold

__all__ = ["Changes", "step_changes"]


@dataclass(frozen=True)
class Changes:
    """The folds of a step and the pages that they and its rows need; nothing is taken yet.

    Attributes
    ----------
    fold : bool [batch]
    forced, early : int
        As in `Plan`.
    index : int64 [folds]
        The sequences that fold.
    moved : int64
        Those of them whose checkpoint page others hold, and that need another.
    spares : int32 or None
        The pages that they move to where they have them, as in a device-planned pool; without it
        pages have to be taken.
    starts : int32 [batch]
        Rows before the window, after the folds.
    table : int32 [batch, pages]
        Input pages after the folds, without the dropped ones.
    dropped : int32
        Shared input pages that the folds let go.
    missing : bool [batch, pages]
        Entries of `table` that the step writes and that hold no page yet.
    """

    fold: NDArray[np.bool_]
    forced: int
    early: int
    index: NDArray[np.int64]
    moved: NDArray[np.int64]
    spares: IdArray | None
    starts: NDArray[np.int32]
    table: IdArray
    dropped: IdArray
    missing: NDArray[np.bool_]

    @property
    def needed(self) -> int:
        """Input pages to take."""
        return int(np.count_nonzero(self.missing))

    def fit(self, pool: StatePool) -> bool:
        """Whether the pages to take are free."""
        return self.taken <= pool.checkpoint_ids.free and self.needed <= pool.input_ids.free

    @property
    def taken(self) -> int:
        """Checkpoint pages to take."""
        return 0 if self.spares is not None else int(self.moved.size)


def step_changes(
    pool: StatePool,
    policy: Policy,
    slots: NDArray[np.int64],
    windows: NDArray[np.int32],
    forced: NDArray[np.bool_],
    direct: bool,
) -> Changes:
    """The changes of one step over the sequences in `slots`.

    In a direct step a state moves in place, so a sequence that takes a token folds its rows first
    and leaves a page that others hold. Where it has no rows, that fold copies the page.
    """
    cur = pool.cursors
    history = cur.history[slots]
    if pool.on_device:
        shared = cur.checkpoint[slots] != pool.on_device.own_checkpoint[slots]
    else:
        shared = pool.checkpoint_ids.refs[cur.checkpoint[slots]] > 1
    must = must_fold(history, windows, pool.capacity)
    if direct:
        chosen, rows = must, np.zeros_like(windows)
    else:
        chosen, rows = must | policy(history, windows, must, pool.capacity), windows  # it only adds
    fold = (chosen | forced) & (history > 0)
    if direct:
        fold |= ((history > 0) | shared) & (windows > 0)
    index = np.flatnonzero(fold)
    starts = np.where(fold, 0, history)
    # Sharing is judged by the counts as they are now, for all folds of the launch alike.
    table = cur.table[slots]  # a copy
    dropped = _drop_shared(pool, slots, table, index)
    moved = index[shared[index]]
    return Changes(
        fold=fold,
        forced=int(np.count_nonzero(fold & ~chosen)),
        early=int(np.count_nonzero(chosen & ~must & fold)),
        index=index,
        moved=moved,
        spares=pool.on_device.own_checkpoint[slots[moved]] if pool.on_device else None,
        starts=starts,
        table=table,
        dropped=dropped,
        missing=_missing(pool, table, starts, rows),
    )


def _drop_shared(
    pool: StatePool, slots: NDArray[np.int64], table: IdArray, index: NDArray[np.int64]
) -> IdArray:
    """Take shared pages out of the rows `index` of `table`, and move private ones to the front.

    Where sequences have spares, those take the places of the shared pages.
    """
    rows = table[index]
    if pool.on_device:
        own = pool.on_device.own_table[slots[index]]
        table[index] = own
        borrowed: IdArray = rows[rows != own]
        return borrowed
    shared = (rows >= 0) & (pool.input_ids.refs[rows] > 1)
    if not shared.any():
        return _NO_IDS
    dropped = rows[shared]
    rows[shared] = -1
    table[index] = np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)
    return dropped


def _missing(
    pool: StatePool, table: IdArray, starts: NDArray[np.int32], rows: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Entries of `table` where `rows` new rows from `starts` on find no page."""
    size = pool.sizes.page_rows
    place = np.arange(table.shape[1], dtype=np.int32)
    first = (starts // size)[:, None]
    last = ((starts + rows - 1) // size)[:, None]  # before `first` where there are none
    return (table < 0) & (place >= first) & (place <= last) & (rows > 0)[:, None]


_NO_IDS: IdArray = np.empty(0, dtype=np.int32)
