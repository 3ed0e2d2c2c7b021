"""Backends that hand the kernels what a caller may: wide page ids, slices of a projection."""

from __future__ import annotations

import dataclasses
import math

import torch

from replayinfer.backends.triton import TritonBackend

GAP = 2  # elements: on 4 bytes where values have 2, and on no more


class WideIds(TritonBackend):
    """Slots, pages and tables in int64; counts stay as they are."""

    IDS = ("slot", "page", "table", "fold_source", "fold_target", "fold_table")

    def fold(self, pool, plan):
        super().fold(pool, self._wide(plan))

    def conv(self, pool, plan, layer, x, out):
        super().conv(pool, self._wide(plan), layer, x, out)

    def readout(self, pool, plan, layer, inputs, out):
        super().readout(pool, self._wide(plan), layer, inputs, out)

    def direct(self, pool, plan, layer, inputs, out):
        TritonBackend.direct(pool, self._wide(plan), layer, inputs, out)

    def _wide(self, plan):
        wide = {name: getattr(plan.arrays, name).long() for name in self.IDS}
        return dataclasses.replace(plan, arrays=dataclasses.replace(plan.arrays, **wide))


class Slices(TritonBackend):
    """Inputs as slices of one packed tensor and outputs as slices of another, NaN between them."""

    def conv(self, pool, plan, layer, x, out):
        (rows,), (y,), check = self._packed([x], [out])
        super().conv(pool, plan, layer, rows, y)
        check()
        out.copy_(y)

    def readout(self, pool, plan, layer, inputs, out):
        self._step(super().readout, pool, plan, layer, inputs, out)

    def direct(self, pool, plan, layer, inputs, out):
        self._step(TritonBackend.direct, pool, plan, layer, inputs, out)

    def _step(self, launch, pool, plan, layer, inputs, out):
        views, (y,), check = self._packed(list(inputs.values()), [out])
        launch(pool, plan, layer, dict(zip(inputs, views, strict=True)), y)
        check()
        out.copy_(y)

    def _packed(self, inputs, outputs):
        taken, inside = pack(inputs)
        given, outside = pack(outputs)
        for view, value in zip(taken, inputs, strict=True):
            view.copy_(value)

        def check():
            """No gap was written to; the outputs themselves were."""
            for view in (*taken, *given):
                view.fill_(math.nan)
            assert inside.isnan().all()
            assert outside.isnan().all()

        def check_and_keep():
            kept = [view.clone() for view in given]
            check()
            for view, value in zip(given, kept, strict=True):
                view.copy_(value)

        return taken, given, check_and_keep


class WideSlices(WideIds, Slices):
    """Both."""


def pack(values):
    """Places for `values` ``[batch, window, ...]`` in one tensor that is NaN, with gaps all over.

    Each begins at an offset, and the last axis of one with heads is longer than the value needs.
    """
    tails = [value.shape[2:] for value in values]
    rooms = [(*t[:-1], t[-1] + GAP) if len(t) > 1 else tuple(t) for t in tails]
    width = sum(GAP + math.prod(room) for room in rooms) + GAP
    like = values[0]
    whole = torch.full(
        (*like.shape[:2], width + width % 2), math.nan, dtype=like.dtype, device=like.device
    )
    views, start = [], 0
    for value, tail, room in zip(values, tails, rooms, strict=True):
        assert value.dtype == like.dtype
        start += GAP
        place = whole[..., start : start + math.prod(room)].unflatten(-1, room)
        views.append(place[..., : tail[-1]])
        start += math.prod(room)
    return views, whole
