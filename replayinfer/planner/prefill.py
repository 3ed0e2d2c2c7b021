"""Plans of prefills: packed prompts of any length that continue their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, PlanError
from ..pools import StatePool
from ..pools.pages import IdArray
from ..pools.sharing import drop_shared_pages

__all__ = ["PrefillPlan", "PrefillPlanner"]


@dataclass
class PrefillPlan:
    """One prefill, from plan to commit or abort.

    Attributes
    ----------
    cu_seqlens : int64 [batch + 1]
        Where each sequence's tokens begin in the packed inputs.
    slots : int64 [batch]
    source, target : int32 [batch]
        Checkpoint page that each sequence has, and the one that gets its final state. They are the
        same for a sequence without tokens, whose state is known to be zero.
    rows : int32 [batch]
        Rows after the source checkpoint.
    tails : Tensor [layers, batch, taps, channels]
        The last pre-convolution rows of every sequence, put into the rings at commit.
    """

    cu_seqlens: NDArray[np.int64]
    handles: NDArray[np.int64]
    slots: NDArray[np.int64]
    source: IdArray
    target: IdArray
    rows: NDArray[np.int32]
    tails: torch.Tensor
    state: Literal["planned", "committed", "aborted"] = "planned"
    layers_run: set[int] = field(default_factory=set)
    layers_convolved: set[int] = field(default_factory=set)

    @property
    def batch(self) -> int:
        return int(self.slots.size)

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.cu_seqlens)


class PrefillPlanner:
    """Plans prefills over the sequences of one pool.

    A prefill writes its final states beside the old ones, so that an abort changes nothing; only a
    sequence at token 0 with the zero state is written in place.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool

    def plan(
        self, sequences: Sequence[int] | NDArray[np.int64], cu_seqlens: ArrayLike
    ) -> PrefillPlan:
        """Plan a prefill of ``cu_seqlens[i+1] - cu_seqlens[i]`` tokens for sequence ``i``.

        A piece of one token is a prefill here because the caller says so, never by its shape.

        Raises
        ------
        InputError
            `cu_seqlens` does not start at 0, falls, or has another length than batch + 1.
        CapacityError
            No checkpoint page for a state beside the old one; nothing is taken.
        """
        pool, cur = self.pool, self.pool.cursors
        pool.require_bound()
        slots = cur.resolve(sequences)
        pool.refresh(slots)
        cu = _check_cu_seqlens(cu_seqlens, int(slots.size))
        source = cur.checkpoint[slots]
        target = source.copy()
        fresh = (cur.base[slots] == 0) & (cur.history[slots] == 0) & ~cur.given[slots]
        in_place = fresh & (pool.checkpoint_ids.refs[source] == 1)
        moved = np.flatnonzero(~in_place & (np.diff(cu) > 0))
        pool.require(0, int(moved.size), 0)
        target[moved] = pool.checkpoint_ids.take(int(moved.size))
        cur.busy[slots] = True
        conv = pool.conv
        shape = (len(pool.layers), int(slots.size), conv.taps, conv.rows.shape[3])
        return PrefillPlan(
            cu_seqlens=cu, handles=np.array(sequences, dtype=np.int64).reshape(-1), slots=slots,
            source=source, target=target, rows=cur.history[slots],
            tails=torch.zeros(shape, dtype=pool.dtype, device=pool.device),
        )  # fmt: skip

    def commit(self, plan: PrefillPlan) -> None:
        """Make the final states the checkpoints; the history of every sequence with tokens is 0."""
        self._require(plan, "commit")
        pool, cur = self.pool, self.pool.cursors
        moved = plan.lengths > 0
        slots, lengths = plan.slots[moved], plan.lengths[moved]
        replaced = moved & (plan.source != plan.target)
        pool.checkpoint_ids.release(plan.source[replaced])
        cur.checkpoint[slots] = plan.target[moved]
        if pool.on_device:
            own = pool.on_device.own_checkpoint
            owned = replaced & (plan.source == own[plan.slots])
            own[plan.slots[owned]] = plan.target[owned]
        cur.base[slots] += cur.history[slots] + lengths
        cur.history[slots] = 0
        cur.undo[slots] = 0
        for slot in slots.tolist():
            drop_shared_pages(pool, slot)
        if pool.spec.conv_width:
            for i in np.flatnonzero(moved).tolist():
                slot = int(plan.slots[i])
                token = int(cur.base[slot])
                for layer in range(len(pool.layers)):
                    pool.conv.write_before(layer, slot, token, plan.tails[layer, i])
        pool.push(slots)
        self._finish(plan, "committed")

    def abort(self, plan: PrefillPlan) -> None:
        """Drop what the prefill did: every sequence is where it was."""
        self._require(plan, "abort")
        pool = self.pool
        in_place = plan.source == plan.target
        # A sequence written in place was at token 0 with the zero state. A layer that failed half
        # way has written as well, so nothing is asked of the layers that ran.
        written = plan.target[in_place & (plan.lengths > 0)]
        if written.size:
            pool.checkpoints.zero(pool.device_ids(written))
        pool.checkpoint_ids.release(plan.target[~in_place])
        self._finish(plan, "aborted")

    def _require(self, plan: PrefillPlan, action: str) -> None:
        if plan.state != "planned":
            raise PlanError(
                f"{action}: got a prefill that is {plan.state}; allowed once per plan; plan another"
            )

    def _finish(self, plan: PrefillPlan, state: Literal["committed", "aborted"]) -> None:
        self.pool.cursors.busy[plan.slots] = False
        plan.state = state


def _check_cu_seqlens(cu_seqlens: ArrayLike, batch: int) -> NDArray[np.int64]:
    given = cu_seqlens.cpu().numpy() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    cu = np.asarray(given)
    if cu.dtype.kind not in "iu" or cu.shape != (batch + 1,):
        raise InputError(
            f"cu_seqlens: got {cu.dtype} {list(cu.shape)}; allowed integers [{batch + 1}]; give 0 "
            "and the running sum of the lengths"
        )
    falls = cu[1:] < cu[:-1]  # not by a difference, which wraps for unsigned integers
    if cu[0] != 0 or falls.any():
        raise InputError(
            f"cu_seqlens: got {cu.tolist()}; allowed values that start at 0 and never fall; give 0 "
            "and the running sum of the lengths"
        )
    return cu.astype(np.int64)
