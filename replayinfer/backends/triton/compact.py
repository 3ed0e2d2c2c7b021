"""Accepted tree nodes to where a chain's rows lie: a launch per field of a row, for all layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...planner import Plan
from ...pools import StatePool
from .workspace import config

__all__ = ["compact_rows", "move"]


def compact_rows(pool: StatePool, plan: Plan, nodes: NDArray[np.int32] | torch.Tensor) -> None:
    """Move the rows of accepted nodes ``[batch, window]`` (-1: none), in fields and rings.

    From the host one small upload; nothing at all where every path is the start of its window.
    """
    if isinstance(nodes, torch.Tensor):
        move(pool, plan, nodes)
    elif (nodes > np.arange(plan.window)).any():
        move(pool, plan, pool.upload(torch.from_numpy(nodes.astype(np.int32))))


def move(pool: StatePool, plan: Plan, nodes: torch.Tensor) -> None:
    """The launches, over int32 `nodes` on the device."""
    from replayinfer.kernels.pages.compact import compact

    arrays, choice = plan.arrays, config(pool, "compact", plan.bucket)
    for field in pool.inputs.fields.values():
        compact(field, nodes, arrays.history, arrays.table, ring=False, config=choice)
    if pool.conv.taps:
        rows, start = pool.conv.rows, arrays.conv_place
        compact(rows, nodes, start, arrays.slot, ring=True, config=choice)
