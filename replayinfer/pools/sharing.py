"""Forks and rollbacks: who holds which page, and the one page that is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..checks import positive_int
from ..errors import InputError
from .cursors import SequenceId
from .pages import IdArray

if TYPE_CHECKING:
    from .pool import StatePool

__all__ = ["drop_shared_pages", "fork", "rollback"]


def fork(pool: StatePool, sequence: int, count: int, rows: int | None) -> list[SequenceId]:
    """See `StatePool.fork`."""
    slot = pool.cursors.one(sequence)
    count = positive_int("count", count)
    pool.refresh(slot)
    cur = pool.cursors
    history = int(cur.history[slot])
    kept = history if rows is None else positive_int("rows", rows, minimum=0)
    _check_rollback(pool, slot, history - kept)
    full, partial = divmod(kept, pool.sizes.page_rows)
    owned = None
    if pool.on_device:
        owned = _reserve(pool, slot, count, full)
        copies = owned[:, full] if partial else _NO_IDS
    else:
        pool.slot_ids.require(count)
        copies = pool.input_ids.take(count if partial else 0)
    slots = pool.slot_ids.take(count)
    handles = cur.open(slots)
    if owned is not None and pool.on_device:
        pool.on_device.give(slots, pool.checkpoint_ids.take(count), owned)

    cur.base[slots] = cur.base[slot]
    cur.history[slots] = kept
    cur.undo[slots] = max(int(cur.undo[slot]) - (history - kept), 0)
    cur.given[slots] = cur.given[slot]
    cur.checkpoint[slots] = cur.checkpoint[slot]
    pool.checkpoint_ids.share(np.full(count, cur.checkpoint[slot], dtype=np.int32))
    shared = cur.table[slot, :full]
    cur.table[slots, :full] = shared
    pool.input_ids.share(np.tile(shared, count))
    if partial:
        cur.table[slots, full] = copies
        source = np.full(count, cur.table[slot, full], dtype=np.int32)
        pool.inputs.copy_rows(pool.device_ids(source), pool.device_ids(copies), partial)
    pool.conv.copy(pool.device_ids(np.full(count, slot)), pool.device_ids(slots))
    pool.push(np.array([slot, *slots]))
    return handles


def _reserve(pool: StatePool, slot: int, count: int, full: int) -> IdArray:
    """Take what `count` copies will own, and spares for what their parent lends them.

    Returns the input pages of the copies, ``[count, pages]``; their checkpoint pages are free.
    """
    ours = pool.on_device
    assert ours is not None
    pages = ours.pages
    lends, entries = ours.spares_to_lend(slot, full)
    pool.require(count, count + lends, count * pages + entries.size)
    # What the parent lends it goes on using until it folds, but no longer owns.
    ours.own_table[slot, entries] = pool.input_ids.take(int(entries.size))
    if lends:
        ours.own_checkpoint[slot] = pool.checkpoint_ids.take(1)[0]
    return pool.input_ids.take(count * pages).reshape(count, pages)


def rollback(pool: StatePool, sequence: int, rows: int) -> None:
    """See `StatePool.rollback`."""
    slot = pool.cursors.one(sequence)
    rows = positive_int("rows", rows, minimum=0)
    pool.refresh(slot)
    cur = pool.cursors
    history = int(cur.history[slot])
    _check_rollback(pool, slot, rows)
    left = history - rows
    page, offset = divmod(left, pool.sizes.page_rows)
    table = cur.table[slot]
    if pool.on_device:
        own = pool.on_device.own_table[slot]
        if offset and table[page] != own[page]:
            source, target = (pool.device_ids(ids[page : page + 1]) for ids in (table, own))
            pool.inputs.copy_rows(source, target, offset)
        pool.on_device.return_borrowed(slot, first=page)
        _roll(pool, slot, left, rows)
        return
    # The page that takes the next row must be private; shared pages after it are let go.
    shared = (table >= 0) & (pool.input_ids.refs[table] > 1)
    shared[:page] = False
    dropped = table[shared]
    if offset and shared[page]:
        fresh = pool.input_ids.take(1)
        pool.inputs.copy_rows(
            pool.device_ids(table[page : page + 1]), pool.device_ids(fresh), offset
        )
        table[shared] = -1
        table[page] = fresh[0]
    else:
        table[shared] = -1
    pool.input_ids.release(dropped)
    _roll(pool, slot, left, rows)


def _roll(pool: StatePool, slot: int, left: int, rows: int) -> None:
    cur = pool.cursors
    cur.history[slot] = left
    cur.undo[slot] = max(int(cur.undo[slot]) - rows, 0)
    pool.push(np.array([slot]))


def drop_shared_pages(pool: StatePool, slot: int) -> None:
    """Let go of the input pages of a slot that others hold too; its own stay for later rows."""
    if pool.on_device:
        pool.on_device.return_borrowed(slot)
        return
    table = pool.cursors.table[slot]
    gone = (table >= 0) & (pool.input_ids.refs[table] > 1)
    pool.input_ids.release(table[gone])
    table[gone] = -1


_NO_IDS: IdArray = np.empty(0, dtype=np.int32)


def _check_rollback(pool: StatePool, slot: int, rows: int) -> None:
    history = int(pool.cursors.history[slot])
    limit = history if pool.restore == "any" else min(int(pool.cursors.undo[slot]), history)
    if not 0 <= rows <= limit:
        why = "rows after the checkpoint" if limit == history else "rows of the last commit"
        raise InputError(
            f"rows: got {rows} to drop; allowed 0..{limit} of {history} ({why}); "
            'a pool made with restore="any" reaches back to the checkpoint'
        )
