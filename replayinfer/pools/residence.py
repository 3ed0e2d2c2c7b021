"""Pools between steps: give the device memory back and take it again, grow and shrink."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import positive_int
from ..errors import CapacityError, PlanError, UnsupportedError
from .cursors import MAX_SLOTS

if TYPE_CHECKING:
    from .pool import StatePool

__all__ = ["Residence"]


class Residence:
    """Whether a pool's tensors are on its device, and the host copies where they are not."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._asleep: list[tuple[torch.Tensor, int, torch.Tensor | None]] | None = None

    @property
    def asleep(self) -> bool:
        return self._asleep is not None

    def sleep(self, *, keep: bool) -> None:
        """Free the device memory of pages and rings, keeping the states on the host or not."""
        pool = self._pool
        pool.cursors.require_awake()
        self._require_own("sleep")
        self._require_idle("sleep")
        if not keep:
            slots = pool.cursors.live
            if slots.size:
                pool.free(pool.cursors.handles(slots))
        saved = []
        for whole in (guarded.whole for guarded in pool.guarded()):
            storage = whole.untyped_storage()
            copy = whole.cpu().clone() if keep else None
            saved.append((whole, storage.nbytes(), copy))
            storage.resize_(0)  # views stay valid objects, without memory behind them
        self._asleep = saved
        pool.cursors.asleep = True

    def wake(self) -> None:
        """Take the device memory again; at other addresses, so CUDA graphs must be captured "
        "anew."""
        if self._asleep is None:
            raise PlanError("wake: got a pool that is awake; allowed after sleep; call sleep first")
        for whole, nbytes, copy in self._asleep:
            whole.untyped_storage().resize_(nbytes)
            if copy is None:
                whole.zero_()
            else:
                whole.copy_(copy)
        for guarded in self._pool.guarded():
            guarded.refill()
        self._asleep = None
        self._pool.cursors.asleep = False

    def resize(
        self,
        max_sequences: int | None,
        checkpoint_pages: int | None,
        input_pages: int | None,
    ) -> None:
        """Change the counts of slots and pages; live sequences keep their handles and bits."""
        pool, cur = self._pool, self._pool.cursors
        self._require_own("resize")
        self._require_idle("resize")
        if self.asleep:
            raise PlanError("resize: got a pool that is asleep; allowed awake; call wake first")
        pool.refresh()
        old = pool.sizes
        sizes = dataclasses.replace(
            old,
            max_sequences=_count("max_sequences", max_sequences, old.max_sequences, MAX_SLOTS),
            checkpoint_pages=_count("checkpoint_pages", checkpoint_pages, old.checkpoint_pages),
            input_pages=_count("input_pages", input_pages, old.input_pages),
        )
        live = cur.live
        highest = int(live.max(initial=-1)) + 1
        if highest > sizes.max_sequences:
            raise CapacityError(
                "sequence slots", highest, sizes.max_sequences,
                "a handle names its slot, so slots cannot move; free the sequences above",
            )  # fmt: skip
        for ids, count in (
            (pool.checkpoint_ids, sizes.checkpoint_pages),
            (pool.input_ids, sizes.input_pages),
        ):
            if ids.used > count:
                raise CapacityError(ids.name, ids.used, count, "free sequences before shrinking")

        old_checkpoints, old_inputs, old_conv = pool.checkpoints, pool.inputs, pool.conv
        pool.sizes = sizes
        try:
            pool.make_tensors()
        except BaseException:  # out of memory, mostly: the states stay where they are
            pool.sizes = old
            pool.checkpoints, pool.inputs, pool.conv = old_checkpoints, old_inputs, old_conv
            raise
        moved = pool.checkpoint_ids.resize(sizes.checkpoint_pages)
        _remap(cur.checkpoint, moved)
        if pool.on_device:
            _remap(pool.on_device.own_checkpoint, moved)
        source, target = _pairs(pool, moved)
        pool.checkpoints.storage[:, target] = old_checkpoints.storage[:, source]
        moved = pool.input_ids.resize(sizes.input_pages)
        _remap(cur.table, moved)
        if pool.on_device:
            _remap(pool.on_device.own_table, moved)
        source, target = _pairs(pool, moved)
        for name, field in pool.inputs.fields.items():
            field[:, target] = old_inputs.fields[name][:, source]
        slots = pool.device_ids(live)
        pool.conv.rows[:, slots] = old_conv.rows[:, slots]
        pool.slot_ids.resize(sizes.max_sequences)
        cur.resize(sizes.max_sequences)
        if pool.on_device:
            pool.on_device.resize(sizes.max_sequences)
            pool.on_device.push(live)

    def _require_own(self, action: str) -> None:
        if self._pool.checkpoints.lent is not None:
            raise UnsupportedError(
                f"{action}: got a pool whose checkpoint pages are lent by the caller; allowed "
                "where the pool owns its memory; make a pool anew instead"
            )

    def _require_idle(self, action: str) -> None:
        if self._pool.cursors.busy.any() or self._pool.cursors.unnamed:
            raise PlanError(
                f"{action}: got a pool with a plan in progress; allowed between steps; commit or "
                "abort it first"
            )


def _count(name: str, value: int | None, old: int, most: int | None = None) -> int:
    return old if value is None else positive_int(name, value, maximum=most)


def _remap(ids: NDArray[np.int32], moved: NDArray[np.int32]) -> None:
    """Replace every held id; `moved[old]` is the new one, -1 where the old one was free."""
    held = ids >= 0
    ids[held] = moved[ids[held]]


def _pairs(pool: StatePool, moved: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
    source = np.flatnonzero(moved >= 0)
    return pool.device_ids(source), pool.device_ids(moved[source])
