"""A pool of ids: pages, counts, generations and cursors as in serving, without states."""

from __future__ import annotations

import torch

from ..pools import StatePool
from ..pools.checkpoint import CheckpointPool
from ..pools.conv import ConvPool
from ..spec import Mamba2Spec

__all__ = ["id_pool"]

# What a page holds decides nothing that a planner does.
_SMALLEST = Mamba2Spec(heads=1, dim=1, state=1, conv_width=0)


class _NoCheckpoints(CheckpointPool):
    def zero(self, pages: torch.Tensor) -> None:
        """Nothing is read."""


class _NoConv(ConvPool):
    def zero(self, slots: torch.Tensor) -> None:
        """Nothing is read."""


class _IdPool(StatePool):
    def make_tensors(self) -> None:
        super().make_tensors()
        s, n = self.sizes, len(self.layers)
        self.checkpoints = _NoCheckpoints(
            self.spec, self.format, n, s.checkpoint_pages, self.device
        )
        self.conv = _NoConv(self.spec, self.dtype, n, s.max_sequences, s.ring, self.device)


def id_pool(
    max_sequences: int,
    *,
    capacity: int = 16,
    max_window: int = 1,
    checkpoint_pages: int | None = None,
    input_pages: int | None = None,
    page_rows: int | None = None,
) -> StatePool:
    """A host-planned pool whose states are one number each, and are never set.

    Handles, pages, plans and refusals are those of a pool of the same counts for any model. The
    options are those of `StatePool`.
    """
    return _IdPool(
        _SMALLEST, [0], max_sequences, capacity=capacity, max_window=max_window,
        checkpoint_pages=checkpoint_pages, input_pages=input_pages, page_rows=page_rows,
    )  # fmt: skip
