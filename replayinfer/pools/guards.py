"""Allocations of pages that can be watched: with checks on, a guard page on either side.

A kernel that multiplies a page id of -1, or one past the end, writes into a guard instead of into a
neighbour's memory, and is found out.
"""

from __future__ import annotations

import torch

from ..env import checks_enabled

__all__ = ["GuardedPages"]

_PATTERN = 0xA5


class GuardedPages:
    """``[layers, pages, ...]`` zeros; `pages` is the usable part.

    Attributes
    ----------
    whole : Tensor
        The allocation.
    pages : Tensor
        The allocation without its guards. Not contiguous over layers where there are guards.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self._guards: list[torch.Tensor] = []
        if not checks_enabled():
            self.whole = self.pages = torch.zeros(shape, dtype=dtype, device=device)
            return
        layers, count, *rest = shape
        whole = torch.zeros((layers, count + 2, *rest), dtype=dtype, device=device)
        self.whole, self.pages = whole, whole[:, 1:-1]
        if whole[:, 0].numel():
            self._guards = [whole[:, place].view(torch.uint8) for place in (0, -1)]
        self.refill()

    @classmethod
    def around(cls, name: str, pages: torch.Tensor) -> GuardedPages:
        """Memory that a caller lends: what lies on either side of it is not ours to watch."""
        guarded = cls.__new__(cls)
        guarded.name, guarded._guards = name, []
        guarded.whole = guarded.pages = pages
        return guarded

    def refill(self) -> None:
        """Write the pattern into the guards."""
        for guard in self._guards:
            guard.fill_(_PATTERN)

    def damaged(self) -> str | None:
        """Which guard was written, or None; syncs."""
        for side, guard in zip(("before the first", "after the last"), self._guards, strict=False):
            if not bool((guard == _PATTERN).all()):
                return f"{self.name}, {side} page"
        return None
