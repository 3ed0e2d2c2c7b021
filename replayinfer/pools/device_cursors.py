"""Cursors that live on the device: one record a slot, and the pages that each sequence owns.

A device planner cannot allocate, so every sequence owns a checkpoint page and ``ceil(L / R)`` input
pages that nobody else may hold. It uses them, except where a fork made it share: there its record
names the shared page, and its own page is the spare that its next fold goes to. So a fold, on the
device or on the host, is ``checkpoint := own checkpoint, table := own table``, and no page changes
hands.

The host knows the pages that a sequence owns without asking. It learns that a fold has let a shared
page go only when it reads the record, and counts the page as held until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import capturing
from ..errors import PlanError
from .cursors import SlotArray
from .pages import IdArray

if TYPE_CHECKING:
    from .pool import StatePool

__all__ = ["DeviceCursors", "Records", "record_words"]

# Where the parts of a record begin, in words of their type. kernels/planner/record.py has the same.
_HANDLE, _BASE = 0, 1  # int64
_HISTORY, _UNDO, _CHECKPOINT, _OWN_CHECKPOINT, _TABLE = 4, 5, 6, 7, 8  # int32; own table after that


def record_words(pages: int) -> int:
    """int32 words of a record for tables of `pages` entries: whole sectors of 32 bytes."""
    return -(-(_TABLE + 2 * pages) // 8) * 8


@dataclass(frozen=True)
class Records:
    """One record a slot, in one tensor, and its parts as views.

    Attributes
    ----------
    words : int32 [slots, words]
        The allocation.
    handle : int64 [slots]
        Of the live sequence, -1 where the slot is free.
    base : int64 [slots]
    history, undo, checkpoint : int32 [slots]
        As in `Cursors`.
    own_checkpoint : int32 [slots]
        The page that only this sequence may hold: the one in `checkpoint`, or its spare.
    table, own_table : int32 [slots, pages]
        The same for input pages, by entry.
    """

    words: torch.Tensor
    handle: torch.Tensor
    base: torch.Tensor
    history: torch.Tensor
    undo: torch.Tensor
    checkpoint: torch.Tensor
    own_checkpoint: torch.Tensor
    table: torch.Tensor
    own_table: torch.Tensor

    @classmethod
    def make(
        cls, slots: int, pages: int, device: torch.device | None, words: torch.Tensor | None = None
    ) -> Records:
        """Records of free slots, or the parts of `words`."""
        if words is None:
            shape = (slots, record_words(pages))
            words = torch.full(shape, -1, dtype=torch.int32, device=device)
        wide = words.view(torch.int64)
        return cls(
            words, wide[:, _HANDLE], wide[:, _BASE], words[:, _HISTORY], words[:, _UNDO],
            words[:, _CHECKPOINT], words[:, _OWN_CHECKPOINT], words[:, _TABLE : _TABLE + pages],
            words[:, _TABLE + pages : _TABLE + 2 * pages],
        )  # fmt: skip


class DeviceCursors:
    """The records of a pool's slots, and the host's note of the pages that each slot owns.

    Attributes
    ----------
    records : Records
        What kernels read and move, at an address that changes in `StatePool.resize` only.
    own_checkpoint : int32 [slots]
    own_table : int32 [slots, pages]
        -1 where the slot is free.
    ahead : bool
        Whether the device may have moved records since the host last read them. From the first
        device planner on that is always so, since a CUDA graph is replayed without a word to us.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        slots, pages = pool.sizes.max_sequences, pool.sizes.pages_per_sequence
        self.pages = pages
        self.own_checkpoint: IdArray = np.full(slots, -1, dtype=np.int32)
        self.own_table: IdArray = np.full((slots, pages), -1, dtype=np.int32)
        self.ahead = False
        self.records = Records.make(slots, pages, pool.device)

    @property
    def nbytes(self) -> int:
        return self.records.words.nbytes

    # Ownership, on the host -------------------------------------------------------------------

    def give(self, slots: NDArray[np.int32], checkpoints: IdArray, inputs: IdArray) -> None:
        """Slots that have just been opened own these pages, ``[n]`` and ``[n, pages]``."""
        cur = self._pool.cursors
        self.own_checkpoint[slots] = cur.checkpoint[slots] = checkpoints
        self.own_table[slots] = cur.table[slots] = inputs

    def borrowed(self, slots: SlotArray) -> tuple[IdArray, IdArray]:
        """Pages that the slots use, as far as the host knows, but do not own."""
        cur = self._pool.cursors
        checkpoints, tables = cur.checkpoint[slots], cur.table[slots]
        shared = checkpoints[checkpoints != self.own_checkpoint[slots]]
        return shared, tables[tables != self.own_table[slots]]

    def take_back(self, slots: SlotArray) -> None:
        """Release all that slots hold, before they are closed."""
        pool = self._pool
        checkpoints, inputs = self.borrowed(slots)
        pool.checkpoint_ids.release(np.concatenate([self.own_checkpoint[slots], checkpoints]))
        pool.input_ids.release(np.concatenate([self.own_table[slots].ravel(), inputs]))
        self.own_checkpoint[slots] = -1
        self.own_table[slots] = -1

    def return_borrowed(self, slot: int, *, first: int = 0, checkpoint: bool = False) -> None:
        """Use own input pages from entry `first` on, and the own `checkpoint` page."""
        pool, cur = self._pool, self._pool.cursors
        table, own = cur.table[slot, first:], self.own_table[slot, first:]
        pool.input_ids.release(table[table != own])
        table[:] = own
        if checkpoint and (page := cur.checkpoint[slot]) != self.own_checkpoint[slot]:
            pool.checkpoint_ids.release(np.array([page], dtype=np.int32))
            cur.checkpoint[slot] = self.own_checkpoint[slot]

    def spares_to_lend(self, slot: int, full: int) -> tuple[int, SlotArray]:
        """What a sequence needs before others share its state and its first `full` input pages.

        Returns
        -------
        (int, int64 array)
            Checkpoint pages (0 or 1), and the entries of its table that need a spare.
        """
        cur = self._pool.cursors
        lends = cur.checkpoint[slot] == self.own_checkpoint[slot]
        entries = np.flatnonzero(cur.table[slot, :full] == self.own_table[slot, :full])
        return int(lends), entries

    # Host to device and back ------------------------------------------------------------------

    def push(self, slots: SlotArray | NDArray[np.int32]) -> None:
        """Send what the host knows of `slots`: one upload and one scatter, without a sync."""
        cur = self._pool.cursors
        if not slots.size:
            return
        count = int(slots.size)
        words = torch.full((count, self.records.words.shape[1]), -1, dtype=torch.int32)
        new = Records.make(count, self.pages, None, words)
        new.handle.numpy()[:] = cur.handle_or_none(slots)
        new.base.numpy()[:] = cur.base[slots]
        new.history.numpy()[:] = cur.history[slots]
        new.undo.numpy()[:] = cur.undo[slots]
        new.checkpoint.numpy()[:] = cur.checkpoint[slots]
        new.own_checkpoint.numpy()[:] = self.own_checkpoint[slots]
        new.table.numpy()[:] = cur.table[slots]
        new.own_table.numpy()[:] = self.own_table[slots]
        self.records.words[self._pool.device_ids(slots)] = self._pool.upload(words)

    def pull(self, slots: SlotArray) -> None:
        """Make the host's cursors of `slots` those of the device, and release what folds let go.

        Waits for what is enqueued on the current stream.

        Raises
        ------
        PlanError
            The stream captures a CUDA graph.
        """
        pool, cur = self._pool, self._pool.cursors
        if not self.ahead or not slots.size:
            return
        if capturing(pool.device):
            raise PlanError(
                "pool: got a call that reads the device's cursors while the stream captures a CUDA "
                "graph; allowed outside; fork, roll back and read between steps"
            )
        words = self.records.words[pool.device_ids(slots)].cpu()
        now = Records.make(int(slots.size), self.pages, None, words)
        assert (now.handle.numpy() == cur.handle_or_none(slots)).all(), "a record is another's"
        checkpoints, tables = self.borrowed(slots)
        cur.base[slots] = now.base.numpy()
        cur.history[slots] = now.history.numpy()
        cur.undo[slots] = now.undo.numpy()
        cur.checkpoint[slots] = now.checkpoint.numpy()
        cur.table[slots] = now.table.numpy()
        # A record moves from a shared page to its own, and nowhere else.
        kept_checkpoints, kept_tables = self.borrowed(slots)
        pool.checkpoint_ids.release(_without(checkpoints, kept_checkpoints))
        pool.input_ids.release(_without(tables, kept_tables))

    def resize(self, slots: int) -> None:
        """Change the number of slots; those cut off must be free."""
        keep = min(slots, self.own_checkpoint.size)
        for name in ("own_checkpoint", "own_table"):
            old = getattr(self, name)
            new = np.full((slots, *old.shape[1:]), -1, dtype=np.int32)
            new[:keep] = old[:keep]
            setattr(self, name, new)
        if slots != self.records.words.shape[0]:
            self.records = Records.make(slots, self.pages, self._pool.device)


def _without(ids: IdArray, kept: IdArray) -> IdArray:
    """`ids` less one occurrence for each of `kept`."""
    if not ids.size:
        return ids
    counts = np.bincount(ids)
    counts -= np.bincount(kept, minlength=counts.size)
    return np.repeat(np.arange(counts.size, dtype=np.int32), counts)
