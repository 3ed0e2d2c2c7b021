"""One step that verifies windows: what a session asks of a model, and a wrapper that does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..planner import Plan
from ..wrapper import ReplayDecodeWrapper

__all__ = ["ReplayTarget", "Target"]


class Target(Protocol):
    """The model whose tokens are wanted, as a session drives it."""

    @property
    def max_window(self) -> int:
        """Most nodes of a window."""
        ...

    def verify(
        self,
        sequences: Sequence[int],
        windows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Begin a step: logits ``[batch, window, vocabulary]`` after every node."""
        ...

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """End it: keep these nodes of each window."""
        ...

    def abort(self) -> None:
        """End it: keep nothing."""
        ...


class ReplayTarget:
    """A wrapper and a model's forward over its plan: plan, fold, forward, commit.

    Parameters
    ----------
    wrapper : ReplayDecodeWrapper
    forward : function of (plan, tokens)
        Runs every layer by ``wrapper.conv`` and ``wrapper.run``, and returns logits
        ``[bucket, window, vocabulary]``. `tokens` is int64 ``[bucket, window]``, 0 where there is
        none.
    """

    def __init__(
        self, wrapper: ReplayDecodeWrapper, forward: Callable[[Plan, torch.Tensor], torch.Tensor]
    ) -> None:
        self.wrapper = wrapper
        self._forward = forward
        self._tree = False

    @property
    def max_window(self) -> int:
        return self.wrapper.pool.max_window

    def verify(
        self,
        sequences: Sequence[int],
        windows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """See `Target.verify`; nothing is left of the step if the forward fails."""
        lengths = [len(window) for window in windows]
        tree = None if parents is None else _matrix(parents, max(lengths, default=0), -1)
        # A state that has moved in place takes no token back.
        plan = self.wrapper.plan(sequences, lengths, parents=tree, direct=False)
        self._tree = tree is not None
        try:
            self.wrapper.fold()
            tokens = torch.zeros(plan.bucket, plan.window, dtype=torch.long)
            tokens[: plan.batch] = torch.from_numpy(_matrix(windows, plan.window, 0))
            logits = self._forward(plan, tokens.to(self.wrapper.pool.device))
        except BaseException:
            self.wrapper.abort()
            raise
        return logits[: plan.batch]

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Target.accept`; of chains, paths are ``0, 1, ...``."""
        if self._tree:
            self.wrapper.commit(paths=[list(path) for path in paths])
        else:
            self.wrapper.commit([len(path) for path in paths])

    def abort(self) -> None:
        """See `Target.abort`."""
        self.wrapper.abort()


def _matrix(rows: Sequence[Sequence[int]], width: int, fill: int) -> NDArray[np.int64]:
    full = np.full((len(rows), max(width, 1)), fill, dtype=np.int64)
    for place, row in enumerate(rows):
        full[place, : len(row)] = row
    return full
