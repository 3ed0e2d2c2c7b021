"""Direct steps that the device plans: the host's plans bit for bit, and states moved safely."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from replayinfer import CheckError, GDNSpec, InputError, Mamba2Spec, PlanError, ReplayDecodeWrapper
from replayinfer.backends.torch import TorchBackend
from replayinfer.planner import HostPlanner
from replayinfer.testing import (
    assert_bitwise_equal,
    layer_inputs,
    layer_weights,
    relative_error,
)

from ..pools.kit import SPECS, random_int
from .kit import (
    DeviceWorld,
    assert_same_plan,
    check_books,
    device_planner,
    host_plan,
    read,
    small_pool,
    wrapped,
)
from .test_order import no_reads_in
from .test_same_plan import entries_of
from .test_steps import ACTIONS, act


class PrefersUpTo(TorchBackend):
    """Says that direct steps pay up to a bucket."""

    def __init__(self, limit):
        self.limit = limit

    def prefers_direct(self, pool, bucket):
        return bucket <= self.limit


def run_in_name(plan):
    """As if every layer had run: the planner is told nothing else about it."""
    plan.layers_run.add(0)


# The same plans ----------------------------------------------------------------------------------


def change(pools, names, generator, stale):
    """One random fork, free, rollback or new sequence, in every pool alike."""
    action = generator.choice(["alloc", "fork", "fork", "free", "rollback"])
    live, first = names[0], pools[0]
    at = int(generator.integers(max(len(live), 1)))
    room = len(live) < first.cursors.slots
    if action == "alloc" and room:
        for pool, mine in zip(pools, names, strict=True):
            mine += pool.alloc(1)
    elif action == "fork" and live and room:
        for pool, mine in zip(pools, names, strict=True):
            mine += pool.fork(mine[at])
    elif action == "free" and live:
        stale.append(live[at])
        for pool, mine in zip(pools, names, strict=True):
            pool.free(mine.pop(at))
    elif action == "rollback" and live:
        slot = first.slot(live[at])
        first.refresh(slot)
        most = min(first.cursors.undo[slot], first.cursors.history[slot])
        rows = int(generator.integers(most + 1))
        for pool, mine in zip(pools, names, strict=True):
            pool.rollback(mine[at], rows)


@pytest.mark.parametrize("policy", ["full", "spread"])
@pytest.mark.parametrize("shape", [(6, 3, 2), (5, 1, 8), (9, 2, 4)], ids=str)
def test_walks_of_direct_and_replayed_steps(shape, policy, seed):
    """Every plan beside the host's own, page for page, and the host's whole steps on a twin."""
    generator = np.random.default_rng(seed)
    capacity, most, rows = shape
    sizes = {"capacity": capacity, "max_window": most, "page_rows": rows}
    pools = pool, twin = [small_pool(8, **sizes) for _ in range(2)]
    planner, other = device_planner(pool, policy=policy), HostPlanner(twin, policy=policy)
    names, stale = [p.alloc(3) for p in pools], [123 << 21]
    seen = {"direct": 0, "copies": 0, "folds of rows": 0}
    for _ in range(50):
        for _ in range(2):
            change(pools, names, generator, stale)
        while len(names[0]) < 3:
            for p, mine in zip(pools, names, strict=True):
                mine += p.alloc(1)
        direct = bool(generator.random() < 0.5)
        width = 1 if direct else most
        count = int(generator.integers(len(names[0]) + 1))
        chosen = generator.permutation(len(names[0]))[:count]
        seqs, mine = ([n[i] for i in chosen] for n in names)
        windows = generator.integers(0, width + 1, size=count)
        force = generator.random(count) < 0.2
        bucket = count + int(generator.integers(3)) or 1
        pool.refresh()
        want = host_plan(
            pool, seqs, windows, policy=policy, force=force, bucket=bucket, direct=direct
        )
        at, given = entries_of(seqs, generator, bucket, stale)
        news = torch.full((bucket,), 77, dtype=torch.int64)
        news[at] = torch.from_numpy(windows)
        forced = torch.ones(bucket, dtype=torch.bool)
        forced[at] = torch.from_numpy(force)
        for array in vars(planner._step(bucket).arrays).values():
            array.fill_(123456)
        plan = planner.plan(given, news, window=width, force_fold=forced, direct=direct)
        assert plan.direct == direct
        assert_same_plan(read(plan), want, at, bucket)
        theirs = other.plan(mine, windows, force_fold=force, window=width, direct=direct)
        if direct:
            seen["direct"] += 1
            seen["copies"] += int((theirs.fold_rows[theirs.fold_index] == 0).sum())
            seen["folds of rows"] += int((theirs.fold_rows[theirs.fold_index] > 0).sum())

        fate = generator.choice(["commit"] * 5 + ["abort early", "abort", "free"])
        if fate != "abort early":
            planner.folded(plan)
            other.folded(theirs)
        if direct and fate in ("commit", "free"):
            run_in_name(plan)
            run_in_name(theirs)
        if fate == "commit":
            # A direct step takes what it has moved by, whatever the device says was accepted.
            counts = torch.full((bucket,), -5, dtype=torch.int64)
            accepted = generator.integers(0, windows + 1)
            counts[at] = torch.from_numpy(accepted)
            got = planner.commit(plan, counts)
            kept = windows if direct else accepted
            assert got[at].tolist() == kept.tolist()
            assert int(got.sum()) == int(kept.sum())
            other.commit(theirs, kept)
        else:
            planner.abort(plan, free=fate == "free")
            other.abort(theirs, free=fate == "free")
        if fate == "free":
            for mine_now in names:
                gone = {mine_now[i] for i, w in zip(chosen, windows, strict=True) if w}
                mine_now[:] = [seq for seq in mine_now if seq not in gone]
        for p in pools:
            check_books(p)
        # Pages that were let go may be taken in another order, so only the plan says which.
        ours, others = (
            np.array([p.slot(s) for s in n], int) for p, n in zip(pools, names, strict=True)
        )
        for name in ("base", "history", "undo"):
            got, wanted = getattr(pool.cursors, name)[ours], getattr(twin.cursors, name)[others]
            assert np.array_equal(got, wanted), name
        for i, seq in enumerate(seqs):
            if seq in names[0] and fate != "abort early":
                slot = pool.slot(seq)
                assert pool.cursors.checkpoint[slot] == want["page"][i]
                assert (pool.cursors.table[slot] == want["table"][i].numpy()).all()
    assert all(n > 0 for n in seen.values()), seen


def test_what_a_step_of_sharers_does(seed):
    """One with rows folds them, one without copies its page, one with an empty window stays."""
    pool = small_pool(6, capacity=4, max_window=1)
    a, b = pool.alloc(2)
    planner = device_planner(pool)
    step(planner, [a, b], direct=True)
    c, idle = pool.fork(a, 2)
    step(planner, [c], direct=False)
    first = pages(pool, a, c, idle)
    assert len(set(first)) == 1
    plan = step(planner, torch.tensor([a, idle, -1, b, c]), torch.tensor([1, 0, 1, 1, 1]))
    assert (plan.fold_index.tolist(), plan.fold_rows[plan.fold_index].tolist()) == ([0, 4], [0, 1])
    now = pages(pool, a, c, idle)
    assert now[2] == first[0]
    assert len(set(now)) == 3
    assert [pool.tokens(s) for s in (a, b, c, idle)] == [2, 2, 3, 1]
    assert [pool.history(s) for s in (a, b, c, idle)] == [0] * 4
    # From here on the states move in place.
    assert step(planner, [a, b, c]).fold_count == 0
    assert pages(pool, a, c, idle) == now
    with pytest.raises(InputError, match=r"allowed 0\.\.0 of 0"):
        pool.rollback(a, 1)
    check_books(pool)
    pool.free([a, b, c, idle])
    assert not any(pool.pages_in_use().values())


def test_the_last_free_pages_are_enough(seed):
    """Every sharer has a page of its own already, so a step is never refused for want of one."""
    pool = small_pool(5, capacity=4, max_window=1, checkpoint_pages=6, input_pages=10)
    (a,) = pool.alloc()
    step(device_planner(pool), [a])
    everyone = [a, *pool.fork(a, 4)]
    assert pool.checkpoint_ids.free == 0
    step(device_planner(pool), everyone)
    assert len(set(pages(pool, *everyone))) == 5
    assert pool.checkpoint_ids.free == 1  # the shared one, which nobody uses any more
    check_books(pool)


def step(planner, sequences, windows=None, *, direct=True):
    plan = planner.plan(sequences, windows, window=1, direct=direct)
    planner.folded(plan)
    run_in_name(plan)
    if isinstance(sequences, torch.Tensor):
        assert plan.handles.size  # read before cursors move
    planner.commit(plan)
    planner.pool.refresh()
    return plan


def pages(pool, *seqs):
    pool.refresh()
    return [int(pool.cursors.checkpoint[pool.slot(s)]) for s in seqs]


# Choices and refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direct", "want"),
    [("auto", [1, 1, 0]), ("never", [0, 0, 0]), ("always", [1, 1, 1]), (1, [1, 0, 0])],
)
def test_the_wrapper_chooses_by_bucket(world, direct, want):
    pool = world.pool
    wrapper = ReplayDecodeWrapper(pool, backend=PrefersUpTo(2), direct=direct)
    seqs = pool.alloc(3)
    for named in (lambda n: seqs[:n], lambda n: torch.tensor(seqs[:n])):
        got = [chosen(wrapper, named(n)) for n in (1, 2, 3)]
        assert got == want
    assert chosen(wrapper, seqs, direct=True)
    assert not chosen(wrapper, seqs[:1], direct=False)


def test_steps_that_may_have_longer_windows_are_replayed(world):
    """What the host cannot see decides nothing: on the device only ``window=1`` says it."""
    pool = world.pool
    wrapper = ReplayDecodeWrapper(pool, backend=PrefersUpTo(9))
    seqs = pool.alloc(2)
    one = torch.tensor([1, 0])
    cases = [([1, 2], None), (2, None), ([1, 1], 2), (one, None), (one, 2)]
    for windows, width in cases:
        assert not chosen(wrapper, seqs, windows, window=width)
        with pytest.raises(InputError, match="for a direct step"):
            wrapper.plan(seqs, windows, window=width, direct=True)
        assert not pool.cursors.busy.any()
    for windows, width in [(None, None), (1, 1), ([1, 0], None), (one, 1), (0, None)]:
        assert chosen(wrapper, seqs, windows, window=width)
    for wrong in (1, "auto", None):
        with pytest.raises(InputError, match=r"^direct: got .*; allowed a bool or a function"):
            wrapper.planner.plan(seqs, direct=wrong)


def chosen(wrapper, *args, **options):
    plan = wrapper.plan(*args, **options)
    wrapper.abort()
    return plan.direct


@pytest.fixture
def world(rng):
    return DeviceWorld(SPECS["mamba2"], rng, layers=[0, 2], capacity=4, max_window=2, page_rows=2)


def test_a_token_that_moved_a_state_stays(world, monkeypatch):
    """The host refuses what it knows; counts on the device are the windows; checks read them."""
    pool, wrapper = world.pool, wrapped(world.pool, direct="always")
    world.wrapper = wrapper
    a, b = world.alloc(2)
    wrapper.plan([a, b], [1, 0])
    wrapper.fold()
    drawn = world.draw(wrapper._plan)
    layer = pool.layers[0]
    wrapper.conv(layer, drawn[layer][1])
    wrapper.run(layer, **drawn[layer][0])
    with pytest.raises(PlanError, match=r"^readout: got layer 0 a second time"):
        wrapper.run(layer, **drawn[layer][0])
    with pytest.raises(PlanError, match=r"^abort: got a direct step of which layers \[0\] ran"):
        wrapper.abort()
    with pytest.raises(PlanError, match=r"^commit: got no run of layers \[2\].*abort\(free=True\)"):
        wrapper.commit()
    with pytest.raises(PlanError, match="which a direct step is moving"):
        wrapper.materialize(a)
    wrapper.materialize(b)
    other = pool.layers[1]
    wrapper.conv(other, drawn[other][1])
    wrapper.run(other, **drawn[other][0])
    for counts in ([0, 0], np.array([-1, 0])):
        with pytest.raises(InputError, match=r"^accepted: got .* for entry 0 of a direct step"):
            wrapper.commit(counts)
    assert wrapper.commit(torch.tensor([0, 5])).tolist() == [1, 0]
    assert [pool.tokens(s) for s in (a, b)] == [1, 0]

    monkeypatch.setenv("REPLAYINFER_CHECK", "1")
    planner = device_planner(pool)
    plan = planner.plan([a, b], [1, 0], direct=True)
    planner.folded(plan)
    run_in_name(plan)
    with pytest.raises(InputError, match=r"got 0 for entry 0 of the plan; allowed 1\.\.1, what"):
        planner.commit(plan, torch.tensor([0, 0]))
    assert planner.commit(plan, torch.tensor([1, 0])).tolist() == [1, 0]


def test_a_step_that_cannot_be_finished(world):
    pool, wrapper = world.pool, wrapped(world.pool, direct="always")
    a, b = pool.alloc(2)
    wrapper.plan([a, b], [1, 0])
    wrapper.fold()
    wrapper.abort()  # no layer ran
    plan = wrapper.plan(torch.tensor([a, -1, b]), torch.tensor([1, 1, 0]), window=1)
    wrapper.fold()
    plan.layers_run.add(0)
    wrapper.abort(free=True)
    assert pool.cursors.live.tolist() == [pool.slot(b)]
    check_books(pool)


def test_checks_see_a_page_that_is_not_copied(world, monkeypatch):
    """A plan that would move a state in a page that others hold."""
    monkeypatch.setenv("REPLAYINFER_CHECK", "1")

    class Careless(TorchBackend):
        def plan_step(self, pool, step, request):
            super().plan_step(pool, step, dataclasses.replace(request, direct=False))

    pool = world.pool
    (a,) = pool.alloc()
    pool.fork(a)
    plan = wrapped(pool, direct="always").plan([a])
    assert plan.fold.tolist() == [True]
    pool.cursors.busy[:] = False
    with pytest.raises(CheckError, match="device's page is not what the host plans"):
        ReplayDecodeWrapper(pool, backend=Careless(), direct="always").plan([a])


def test_nothing_of_a_direct_step_is_read(monkeypatch):
    pool = small_pool(4, capacity=4, max_window=1)
    a, b = pool.alloc(2)
    pool.fork(a)
    planner = device_planner(pool, policy="spread")
    named, counts = torch.tensor([a, -1, b]), torch.tensor([0, 0, 1])
    with monkeypatch.context() as patch:
        no_reads_in(patch)
        for direct in (True, False, True, True):
            plan = planner.plan(named, direct=direct)
            planner.folded(plan)
            run_in_name(plan)
            planner.commit(plan, counts)
        abandoned = planner.plan(named, direct=True)
        planner.folded(abandoned)
        planner.abort(abandoned)
    assert [pool.tokens(s) for s in (a, b)] == [3, 4]


def test_a_warmup_of_direct_steps_moves_nothing(world):
    a, b = world.alloc(2)
    world.step({a: 2, b: 1})
    world.fork(a)
    before = world.pool.on_device.records.words.clone(), world.pool.checkpoints.storage.clone()
    wrapped(world.pool, direct=4).warmup([1, 4, 8])
    assert torch.equal(world.pool.on_device.records.words, before[0])
    assert_bitwise_equal(world.pool.checkpoints.storage, before[1])
    world.check()


def test_counters(world):
    wrapper = world.wrapper = ReplayDecodeWrapper(world.pool, backend=PrefersUpTo(1))
    a, b = world.alloc(2)
    world.step([a])
    world.step([a, b])
    assert (wrapper.counters.steps, wrapper.counters.direct_steps) == (2, 1)


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("family", SPECS)
def test_sequences_go_back_and_forth(family, check, rng, monkeypatch):
    """Small buckets are direct, larger ones replayed; against float64 sequences without plans."""
    monkeypatch.setenv("REPLAYINFER_CHECK", check)
    world = DeviceWorld(
        SPECS[family], rng, layers=[1, 4], capacity=5, max_window=3, page_rows=2, max_sequences=6,
        format="fp32_split",
    )  # fmt: skip
    world.wrapper = ReplayDecodeWrapper(world.pool, backend=PrefersUpTo(4), policy="spread")
    world.alloc(3)
    kinds = set()
    for i in range(10):
        for _ in range(2):
            act(world, ACTIONS[random_int(rng, 0, len(ACTIONS) - 1)])
        live = world.model.live()
        seqs = [s for s in live if random_int(rng, 0, 3)]
        most = 1 if random_int(rng, 0, 2) else 3
        if i < 2:  # one of either kind
            seqs, most = live[:2], [1, 3][i]
        windows = {s: random_int(rng, 0, most) for s in seqs}
        accepted = {s: random_int(rng, 0, w) for s, w in windows.items()}
        size = max(len(seqs), 1) + 1
        if size <= 4 and most == 1:
            accepted = windows
        plan = world.step(windows, accepted, bucket=size, width=most)
        assert plan.direct == (size <= 4 and most == 1)
        kinds.add(plan.direct)
        world.check()
    assert kinds == {False, True}


KERNEL_SPECS = {
    "mamba2": Mamba2Spec(heads=2, dim=8, state=16, groups=1),
    "gdn": GDNSpec(heads=2, dim=8, state=16, key_heads=1),
}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_the_kernels_move_states_as_torch_does(family, rng):
    """Direct and replayed steps in turn, pads anywhere, sharers with rows and without."""
    spec = KERNEL_SPECS[family]
    weights = layer_weights(spec, rng)
    tokens = [layer_inputs(spec, 1, 4, torch.float32, rng) for _ in range(6)]
    results = []
    for backend in ("torch", "triton"):
        pool = small_pool(5, spec=spec, capacity=3, max_window=1, format="fp32_split")
        pool.bind(0, **weights)
        wrapper = ReplayDecodeWrapper(pool, backend=backend)
        a, b, c = pool.alloc(3)
        outputs, kept = [], None
        for i, inputs in enumerate(tokens):
            named = torch.tensor(
                [[a, -1, b, c], [-1, c, a, -1], [b, a, c, -1], [c, b, -1, a]][i % 4]
            )
            direct = i in (1, 3, 4)
            plan = wrapper.plan(named, direct=direct)
            assert plan.direct == direct
            wrapper.fold()
            outputs.append(wrapper.run(0, **inputs))
            assert not outputs[-1][named < 0].any()
            wrapper.commit(torch.tensor([1, 1, 1, 1]))
            if i == 1:  # b shares a's page, which has no rows now
                b, _ = pool.fork(a)[0], pool.free(b)
                assert pool.history(a) == 0
            if i == 2:  # d stays with c's page and row; both a and b leave theirs in the next step
                (d,) = pool.fork(c)
                kept = wrapper.materialize(d)
        assert_bitwise_equal(wrapper.materialize(d), kept)
        states = [wrapper.materialize(s) for s in (a, b, c, d)]
        results.append(torch.cat([torch.stack(outputs).flatten(), torch.stack(states).flatten()]))
        assert [pool.tokens(s) for s in (a, c, d)] == [6, 6, 3]
        check_books(pool)
    assert relative_error(results[1], results[0]) < 1e-5  # a few roundings of fp32
