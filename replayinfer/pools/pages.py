"""Page ids with reference counts, on the host; the tensors behind them live elsewhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import CapacityError

__all__ = ["IdArray", "PageAllocator"]

IdArray = NDArray[np.int32]


class PageAllocator:
    """Ids ``0 .. count-1`` of one pool, each free or held by ``refs[id]`` sequences.

    All operations take arrays and cost microseconds; none loops over ids.

    Parameters
    ----------
    name : str
        What the pool is called when it runs out, e.g. ``"input pages"``.
    count : int
    advice : str
        What a caller can do about exhaustion.
    """

    def __init__(self, name: str, count: int, advice: str) -> None:
        self.name = name
        self.count = count
        self.refs: NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.peak = 0
        self._advice = advice
        # A stack: the page released last is taken first, while it is still in a cache. Reversed so
        # that a fresh pool hands out 0, 1, 2, ...
        self._stack: IdArray = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._free = count

    @property
    def free(self) -> int:
        return self._free

    @property
    def used(self) -> int:
        return self.count - self._free

    def require(self, needed: int) -> None:
        """Raise `CapacityError` unless `needed` ids are free; takes nothing."""
        if needed > self._free:
            raise CapacityError(self.name, needed, self._free, self._advice)

    def take(self, needed: int) -> IdArray:
        """Take `needed` free ids, each with one reference, or raise and take none."""
        self.require(needed)
        self._free -= needed
        ids = self._stack[self._free : self._free + needed][::-1].copy()
        self.refs[ids] = 1
        self.peak = max(self.peak, self.used)
        return ids

    def share(self, ids: IdArray) -> None:
        """Add one reference per occurrence in `ids`; every id must be held already."""
        assert bool((self.refs[ids] > 0).all()), f"{self.name}: a free page was shared"
        np.add.at(self.refs, ids, 1)

    def release(self, ids: IdArray) -> None:
        """Drop one reference per occurrence in `ids`; what nobody holds any more becomes free."""
        if not ids.size:
            return
        np.subtract.at(self.refs, ids, 1)
        left = self.refs[ids]
        assert bool((left >= 0).all()), f"{self.name}: a page was released more often than held"
        gone = ids[left == 0]
        if gone.size > 1:
            gone = np.unique(gone)  # one id may occur twice in `ids`
        self._stack[self._free : self._free + gone.size] = gone[::-1]
        self._free += int(gone.size)

    def resize(self, count: int) -> IdArray:
        """Change the number of ids; at most `count` may be held.

        Held ids beyond the new end move to free ones below it.

        Returns
        -------
        int32 [old count]
            The new id of every held one, -1 for the others.
        """
        assert self.used <= count, f"{self.name}: resized below what is held"
        held = np.flatnonzero(self.refs)
        moved = np.full(self.count, -1, dtype=np.int32)
        stay = held[held < count]
        moved[stay] = stay
        go = held[held >= count]
        room = np.ones(count, dtype=bool)
        room[stay] = False
        moved[go] = np.flatnonzero(room)[: go.size]

        refs = np.zeros(count, dtype=np.int32)
        refs[moved[held]] = self.refs[held]
        self.count, self.refs = count, refs
        free = np.flatnonzero(refs == 0)[::-1].astype(np.int32)
        self._free = int(free.size)
        self._stack = np.empty(count, dtype=np.int32)
        self._stack[: free.size] = free
        return moved
