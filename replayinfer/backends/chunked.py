"""Prefill with the chunked kernels of an installed peer: states in, packed tokens, states out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ..planner.prefill import PrefillPlan
from ..pools import StatePool
from .base import Backend

__all__ = ["ChunkedPrefill", "describe_import"]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class ChunkedPrefill(ABC):
    """What the peers' backends share; a subclass says what it serves and runs one layer.

    Every sequence starts from its full state, checkpoint and rows, in float32. The convolution is
    the reference's, and so are the gates and step sizes, so that they are those of decode.

    Parameters
    ----------
    states : Backend
        Reads the sequences' states.
    reference : Backend
        The torch backend.
    """

    name = "chunked"

    def __init__(self, states: Backend, reference: Backend) -> None:
        self.states = states
        self.prefill_conv = reference.prefill_conv  # type: ignore[attr-defined]

    @abstractmethod
    def refuses(self, pool: StatePool) -> str | None:
        """Why the peer's kernels do not compute such layers, or None."""

    @abstractmethod
    def missing(self) -> str | None:
        """Why the peer cannot be used on this machine, or None."""

    @abstractmethod
    def scan(
        self,
        pool: StatePool,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        cu: NDArray[np.int64],
        states: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write outputs ``[tokens, heads, dim]``; returns final states, as float32 `states` are."""

    def supports(self, pool: StatePool) -> str | None:
        if pool.device.type != "cuda":
            return f"device {pool.device}; its kernels run on cuda"
        if pool.dtype not in _SIXTEEN_BITS:
            return f"dtype={pool.dtype}; its products are of 16 bits, those of torch are float32"
        return self.refuses(pool) or self.missing()

    def prefill(
        self,
        pool: StatePool,
        plan: PrefillPlan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        live = np.flatnonzero(plan.lengths > 0)
        if not live.size:
            return
        cu = np.append(plan.cu_seqlens[live], plan.tokens)
        states = self._start(pool, plan, layer, live)
        final = self.scan(pool, layer, inputs, cu, states, out)
        pool.checkpoints.store(layer, pool.device_ids(plan.target[live]), final)

    def _start(
        self, pool: StatePool, plan: PrefillPlan, layer: int, live: NDArray[np.intp]
    ) -> torch.Tensor:
        """States before the first token, float32 ``[sequences, heads, dim, state]``."""
        shape = (live.size, *pool.spec.state_shape)
        states = torch.zeros(shape, dtype=torch.float32, device=pool.device)
        moved = plan.source[live] != plan.target[live]  # else at token 0, even in a second run
        bare = np.flatnonzero(moved & (plan.rows[live] == 0))
        if bare.size:
            pages = pool.device_ids(plan.source[live[bare]])
            states[pool.device_ids(bare)] = pool.checkpoints.load(layer, pages)
        for i in np.flatnonzero(moved & (plan.rows[live] > 0)).tolist():
            at = int(live[i])
            table = pool.cursors.table[plan.slots[at]].tolist()
            states[i] = self.states.materialize(
                pool, layer, int(plan.source[at]), table, int(plan.rows[at])
            )
        return states


def describe_import(error: BaseException) -> str:
    """An import that failed, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"does not import: {type(error).__name__}: {lines[0][:160]}"
