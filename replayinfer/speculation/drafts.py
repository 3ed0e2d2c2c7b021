"""What drafters propose, and one that looks it up in the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..checks import positive_int

__all__ = ["Draft", "Drafter", "NGramDrafter"]


@dataclass(frozen=True)
class Draft:
    """Tokens proposed after a sequence's newest one.

    Attributes
    ----------
    tokens : tuple of int
    parents : tuple of int, optional
        Of each draft: an earlier draft, or -1 where it continues the newest token. A chain if
        omitted.
    probabilities : float tensor [drafts, vocabulary], optional
        What each draft was drawn from; none where drafts were chosen. See `sampled_path`.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probabilities: torch.Tensor | None = None

    def first(self, count: int) -> Draft:
        """Its first `count` drafts; parents come before their children, so they are a tree too."""
        return Draft(
            self.tokens[:count],
            None if self.parents is None else self.parents[:count],
            None if self.probabilities is None else self.probabilities[:count],
        )


class Drafter(Protocol):
    """Proposes what may follow; it may keep what it likes by sequence."""

    def __call__(self, contexts: Mapping[int, Sequence[int]]) -> Mapping[int, Draft]:
        """A draft for each sequence, or none, from all tokens of its text."""
        ...


@dataclass(frozen=True)
class NGramDrafter:
    """Proposes what followed the last time that the text ended as it does now.

    Attributes
    ----------
    drafts : int
        Most tokens to propose.
    longest, shortest : int
        Ends of that many tokens are looked for, the longest first.
    """

    drafts: int
    longest: int = 4
    shortest: int = 1

    def __post_init__(self) -> None:
        positive_int("drafts", self.drafts)
        positive_int("shortest", self.shortest)
        positive_int("longest", self.longest, minimum=self.shortest)

    def __call__(self, contexts: Mapping[int, Sequence[int]]) -> dict[int, Draft]:
        return {sequence: self._propose(text) for sequence, text in contexts.items()}

    def _propose(self, context: Sequence[int]) -> Draft:
        text = np.asarray(context)
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            places = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            found = np.flatnonzero((places == text[-length:]).all(axis=1))
            if found.size:
                start = int(found[-1]) + length
                return Draft(tuple(text[start : start + self.drafts].tolist()))
        return Draft()
