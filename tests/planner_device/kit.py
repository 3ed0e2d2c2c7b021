"""Device-planned pools beside the dictionary model, their books, and the host's own plans."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from replayinfer import HostPlanner, ReplayDecodeWrapper, StatePool
from replayinfer.backends.torch import TorchBackend
from replayinfer.planner import DevicePlanner
from replayinfer.planner.plan import PlanArrays
from replayinfer.testing import relative_error

from ..pools.kit import SPECS, World

NAMES = [f.name for f in dataclasses.fields(PlanArrays)]
ENTRIES = ("slot", "page", "history", "window", "conv_place", "table", "ancestors")
FOLDS = ("fold_source", "fold_target", "fold_rows", "fold_table")
PADS = dict.fromkeys(NAMES, -1) | dict.fromkeys(
    ("history", "window", "conv_place", "ancestors", "fold_rows"), 0
)


def check_books(pool: StatePool) -> None:
    """What is held is what is owned or used; what a sequence writes next nobody else holds."""
    pool.refresh()
    cur, device, live = pool.cursors, pool.on_device, pool.cursors.live
    checkpoints, tables = device.borrowed(live)
    for ids, held in (
        (pool.slot_ids, [live]),
        (pool.checkpoint_ids, [device.own_checkpoint[live], checkpoints]),
        (pool.input_ids, [device.own_table[live].ravel(), tables]),
    ):
        counts = np.bincount(np.concatenate(held).astype(np.int64), minlength=ids.count)
        assert counts.tolist() == ids.refs.tolist(), ids.name
        free = np.sort(ids._stack[: ids.free])
        assert free.tolist() == np.flatnonzero(counts == 0).tolist(), ids.name
    assert (pool.checkpoint_ids.refs[device.own_checkpoint[live]] == 1).all()
    assert (pool.input_ids.refs[device.own_table[live]] == 1).all()
    rows = pool.sizes.page_rows
    for slot in live:
        full = int(cur.history[slot]) // rows
        assert (cur.table[slot, full:] == device.own_table[slot, full:]).all()
    records = device.records
    assert records.handle.tolist() == cur.handle_or_none(np.arange(cur.slots)).tolist()
    for name in ("base", "history", "undo", "checkpoint", "table"):
        assert (getattr(records, name)[live].numpy() == getattr(cur, name)[live]).all(), name
    assert (records.own_checkpoint[live].numpy() == device.own_checkpoint[live]).all()
    assert (records.own_table[live].numpy() == device.own_table[live]).all()


class DeviceWorld(World):
    def __init__(self, spec, rng, **options) -> None:
        super().__init__(spec, rng, planner="device", **options)
        assert isinstance(self.wrapper.planner, DevicePlanner)

    def check(self, *seqs):
        pool, model = self.pool, self.model
        assert len(model.live()) == pool.slot_ids.used
        for seq in seqs or model.live():
            assert pool.tokens(seq) == model.tokens(seq)
            error = relative_error(self.wrapper.materialize(seq), model.materialize(seq), keep=[0])
            assert error < self.bound, f"state of {seq}: {error}"
            if self.spec.conv_width:
                want = torch.stack([model.conv_window(seq, layer) for layer in pool.layers])
                assert torch.equal(pool.conv_tail(seq), want.mT.to(pool.dtype)), f"tail of {seq}"
        check_books(pool)


def small_pool(sequences=6, *, spec=SPECS["gdn"], **options) -> StatePool:
    """Of one small layer, for plans whose layers are not run."""
    options = {"capacity": 6, "max_window": 3, "page_rows": 2, "planner": "device"} | options
    options.setdefault("checkpoint_pages", 4 * sequences)
    options.setdefault(
        "input_pages", 4 * sequences * -(-options["capacity"] // options["page_rows"])
    )
    return StatePool(spec, [0], sequences, **options)


def device_planner(pool, kernels=None, **options) -> DevicePlanner:
    return DevicePlanner(pool, kernels or TorchBackend(), **options)


def read(plan) -> dict[str, torch.Tensor]:
    return {name: getattr(plan.arrays, name).clone() for name in NAMES}


def host_plan(pool, seqs, windows, *, policy="full", force=None, **options):
    """The arrays of the host's plan, which is aborted again."""
    planner = HostPlanner(pool, policy=policy)
    plan = planner.plan(seqs, windows, force_fold=force, **options)
    arrays = read(plan)
    planner.abort(plan)
    return arrays


def assert_same_plan(got, want, rows, bucket) -> None:
    """`want` speaks of the sequences in `rows` of a bucket; all other entries of `got` are pads."""
    folds = int(want["fold_count"])
    assert got["fold_count"].tolist() == [folds]
    for name in ENTRIES:
        full = torch.full_like(got[name], PADS[name])
        full[rows] = want[name][: len(rows)]
        assert torch.equal(got[name], full), name
    for name in FOLDS:
        assert torch.equal(got[name][:folds], want[name][:folds]), name
        assert (got[name][folds:] == PADS[name]).all(), name


def wrapped(pool, **options) -> ReplayDecodeWrapper:
    return ReplayDecodeWrapper(pool, backend="torch", **options)
