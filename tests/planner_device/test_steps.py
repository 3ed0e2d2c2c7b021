"""Whole steps that the device planned, against float64 sequences that know nothing of plans."""

from __future__ import annotations

import pytest
import torch

from replayinfer import ReplayPrefillWrapper
from replayinfer.testing import conv_inputs, layer_inputs

from ..pools.kit import SPECS, World, random_int
from .kit import DeviceWorld, wrapped


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def world(request, rng):
    return DeviceWorld(
        request.param, rng, layers=[1, 4], capacity=5, max_window=3, page_rows=2, max_sequences=6,
        format="fp32_split",
    )  # fmt: skip


def act(world, action):
    live = world.model.live()
    seq = live[random_int(world.rng, 0, len(live) - 1)] if live else None
    if action == "alloc" and len(live) < 6:
        world.alloc()
    elif action == "fork" and live and len(live) < 6:
        world.fork(seq)
    elif action == "free" and live:
        world.free(seq)
    elif action == "seed" and live:
        world.seed(seq, tokens=random_int(world.rng, 0, 50))
    elif action == "rollback" and live:
        world.pool.refresh()
        slot, cur = world.pool.slot(seq), world.pool.cursors
        most = min(int(cur.undo[slot]), int(cur.history[slot]), world.model.committed(seq))
        world.rollback(seq, random_int(world.rng, 0, most))


ACTIONS = ["alloc", "alloc", "fork", "free", "rollback", "rollback", "seed"]


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_random_walk(world, check, monkeypatch):
    """Handles on the host, in random order, with random acceptance."""
    monkeypatch.setenv("REPLAYINFER_CHECK", check)
    world.wrapper = wrapped(world.pool, policy="spread")
    rng = world.rng
    world.alloc(3)
    for _ in range(14):
        for _ in range(2):
            act(world, ACTIONS[random_int(rng, 0, len(ACTIONS) - 1)])
        live = world.model.live()
        seqs = [s for s in live if random_int(rng, 0, 3)]
        windows = {s: random_int(rng, 0, 3) for s in seqs}
        accepted = {s: random_int(rng, 0, w) for s, w in windows.items()}
        force = [s for s in seqs if random_int(rng, 0, 4) == 0]
        world.step(windows, accepted, force=force, bucket=max(len(seqs), 1) + 1, width=3)
        world.check()


class Enqueued:
    """Steps of a world from tensors alone: slots or handles, windows and counts on the device."""

    def __init__(self, world, wrapper=None):
        self.world, self.wrapper = world, wrapper or world.wrapper

    def begin(self, named, windows):
        """Plan and fold: `named` are handles, slots or pads; `windows` a tensor."""
        self.plan = self.wrapper.plan(named, windows)
        self.wrapper.fold()

    def finish(self, accepted):
        """Run the layers and commit; what the model needs is kept for `follow`."""
        world, mine = self.world, self.world.wrapper
        world.wrapper = self.wrapper
        drawn = world.draw(self.plan)
        outputs = world.run(self.plan, drawn)
        world.wrapper = mine
        self.wrapper.commit(accepted)
        return self.plan.handles.tolist(), self.plan.windows.tolist(), drawn, outputs

    def follow(self, done, accepted):
        """Only now: the model takes the step, and the outputs are compared."""
        handles, windows, drawn, outputs = done
        for row, (seq, window) in enumerate(zip(handles, windows, strict=True)):
            if seq >= 0:
                self.world._follow(row, seq, window, int(accepted[row]), drawn, outputs)


def test_a_step_is_planned_before_the_counts_of_the_last_one_are_known(world):
    """Steps follow one another through device tensors; the host sees counts three steps late."""
    world.alloc(4)
    world.fork(world.model.live()[0])
    slots = [world.pool.slot(s) for s in world.model.live()]
    named = torch.tensor([slots[2], -1, slots[0], slots[4], slots[1]])
    enqueued, late = Enqueued(world), []
    for _ in range(9):
        windows = torch.randint(0, 4, (5,), generator=world.rng, dtype=torch.int32)
        enqueued.begin(named, windows)
        draw = torch.rand(5, generator=world.rng)
        accepted = (draw * (windows + 1)).long()  # as a sampler on the device gives them
        late.append((enqueued.finish(accepted), accepted.clone()))
        accepted.fill_(99)  # their memory is the engine's again once the commit is enqueued
        if len(late) > 3:
            enqueued.follow(*late.pop(0))
    for step in late:
        enqueued.follow(*step)
    world.check()


def test_two_half_batches_take_turns(world):
    """Each with a planner, so with plan arrays of its own; forks of one sequence on either side."""
    first = world.alloc(2)
    world.grow(first[0], 5)
    second = world.fork(first[0], 2) + world.fork(first[1])
    halves = [Enqueued(world), Enqueued(world, wrapped(world.pool))]
    tensors = [torch.tensor(first), torch.tensor(second)]
    for _ in range(8):
        windows = [torch.randint(0, 4, (len(t),), generator=world.rng) for t in tensors]
        for half, named, new in zip(halves, tensors, windows, strict=True):
            half.begin(named, new)
        done = [half.finish(new) for half, new in zip(halves, windows, strict=True)]
        for half, step, new in zip(halves, done, windows, strict=True):
            half.follow(step, new)
    world.check()


def test_a_prefill_and_a_snapshot_go_on_from_where_the_device_is(rng):
    spec = SPECS["gdn"]
    world = DeviceWorld(spec, rng, layers=[0], capacity=4, max_window=2, page_rows=2)
    a, b = world.alloc(2)
    world.grow(a, 3)
    (c,) = world.fork(a)
    world.step({a: 2, c: 2}, {a: 1, c: 2})
    snapshot = world.pool.export(c)
    copy = world.pool.import_(snapshot)
    assert world.pool.tokens(copy) == world.pool.tokens(c) == 5
    want = world.wrapper.materialize(c)
    assert torch.equal(world.wrapper.materialize(copy), want)
    world.pool.free(copy)

    prefill = ReplayPrefillWrapper(world.pool)
    parts = {a: slice(0, 3), b: slice(3, 5), c: slice(5, 5)}
    prefill.plan(list(parts), [0, 3, 5, 5])
    inputs = {n: x[0] for n, x in layer_inputs(spec, 5, 1, torch.float32, rng).items()}
    rows = conv_inputs(spec, 5, 1, torch.float32, rng)[0]
    prefill.conv(0, rows)
    prefill.run(0, **inputs)
    prefill.commit()
    for seq, part in parts.items():
        mine = {0: {name: x[part] for name, x in inputs.items()}}
        world.model.step(seq, mine, conv={0: rows[part]})
    world.check()
    world.step([a, b, c])
    world.check()


def test_growing_a_pool_keeps_what_the_device_knows(world):
    a, b = world.alloc(2)
    world.grow(a, 4)
    (c,) = world.fork(a)
    world.step({a: 3, b: 1, c: 2}, {a: 2, b: 1, c: 0})
    address = world.pool.on_device.records.words.data_ptr()
    world.pool.resize(max_sequences=9, checkpoint_pages=30, input_pages=90)
    assert world.pool.on_device.records.words.data_ptr() != address
    assert world.pool.nbytes == world.pool.capacity_report().total_bytes
    world.alloc(1)
    world.step({c: 3, a: 3, b: 2}, {c: 1, a: 3, b: 0})
    world.pool.sleep()
    world.pool.wake()
    world.step([c, a, b])
    world.check()


def test_a_sequence_has_the_same_outputs_whoever_plans(rng):
    """Bit for bit, with a pool whose cursors are on the host."""
    spec, options = SPECS["mamba2"], {"capacity": 4, "page_rows": 2, "layers": [0]}
    seed = int(torch.randint(1 << 30, (), generator=rng))
    results = []
    for planner in (None, "host", "device"):
        generator = torch.Generator().manual_seed(seed)
        world = (DeviceWorld if planner else World)(spec, generator, **options)
        if planner:
            world.wrapper = wrapped(world.pool, planner=planner)
        a, b = world.alloc(2)
        for _ in range(6):
            world.step([a, b])
        (c,) = world.fork(b)
        world.step([c, b, a])
        results.append(torch.stack([world.wrapper.materialize(s) for s in (a, b, c)]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
