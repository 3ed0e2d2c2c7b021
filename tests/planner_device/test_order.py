"""Who may do what when, what is refused, and that a step on the device is never waited for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayinfer import InputError, PlanError, StaleHandleError, UnsupportedError, ops
from replayinfer.planner import DevicePlanner, HostPlanner
from replayinfer.testing import assert_untouched, snapshot

from ..pools.kit import SPECS
from .kit import DeviceWorld, check_books, device_planner, read, small_pool, wrapped
from .test_reserve import everything


@pytest.fixture
def pool():
    return small_pool(5)


def no_reads_in(patch):
    """Nothing may bring a tensor's values to the host."""
    for name in ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__"):

        def refuse(*args, name=name, **kwargs):
            raise AssertionError(f"Tensor.{name}: the host waits for the device")

        patch.setattr(torch.Tensor, name, refuse)


def test_steps_read_nothing(pool, monkeypatch):
    a, b, c = pool.alloc(3)
    planner = device_planner(pool, policy="spread")
    named, new = torch.tensor([a, b, -1, c]), torch.tensor([1, 2, 0, 3])
    counts = torch.zeros(4, dtype=torch.int64)
    flags = torch.tensor([True, False, False, False])
    with monkeypatch.context() as patch:
        no_reads_in(patch)
        for accepted in (None, counts, counts.int(), new):
            plan = planner.plan(named, new, force_fold=flags)
            planner.folded(plan)
            planner.commit(plan, accepted)
            abandoned = planner.plan([a, b], 1, bucket=4)
            planner.folded(abandoned)
            planner.abort(abandoned)
        (d,) = pool.alloc()
        pool.free([c, d])
        plan = planner.plan(named, new)
        planner.folded(plan)
        planner.commit(plan, new)
    assert [pool.tokens(s) for s in (a, b)] == [3, 6]


def test_named_sequences_refuse_what_would_change_them(pool):
    """From plan to commit, as on the host; others do not."""
    a, b, c = pool.alloc(3)
    planner = device_planner(pool)
    plan = planner.plan([a, b])
    for phase in ("planned", "folded"):
        assert plan.state == phase
        for action in (
            lambda: pool.fork(a), lambda: pool.free([b]), lambda: pool.rollback(a, 0),
            lambda: pool.export(b), lambda: device_planner(pool).plan([a]),
            lambda: HostPlanner(pool).plan([b]),
        ):  # fmt: skip
            with pytest.raises(PlanError, match=r"^sequences: got sequence .*, which a plan holds"):
                action()
        pool.free(pool.fork(c))
        pool.free(pool.alloc())
        if phase == "planned":
            planner.folded(plan)
    planner.commit(plan)
    pool.free([a, b, c])
    check_books(pool)


def test_a_plan_from_a_tensor_may_hold_any_sequence(pool):
    a, b = pool.alloc(2)
    planner, other = device_planner(pool), device_planner(pool)
    plan = planner.plan(torch.tensor([a]))
    for action in (
        lambda: pool.fork(b), lambda: pool.free([b]), lambda: pool.rollback(b, 0),
        lambda: HostPlanner(pool).plan([b]),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=r"while a plan made from a device tensor is in prog"):
            action()
    with pytest.raises(PlanError, match=r"^resize: "):
        pool.resize(max_sequences=9)
    # What only begins is no part of it, and the other half-batch may be planned, named or not.
    (c,) = pool.alloc()
    for sequences in ([b], torch.tensor([c])):
        half = other.plan(sequences)
        other.folded(half)
        other.commit(half)
    planner.folded(plan)
    planner.commit(plan)
    assert [pool.tokens(s) for s in (a, b, c)] == [1, 1, 1]
    pool.free(pool.fork(b))
    planner.abort(planner.plan(torch.tensor([a])))
    pool.free([a, b, c])


def test_a_sequence_that_is_freed_inside_a_replayed_step_is_left_alone(pool):
    """A graph is replayed without a word to the host: a free can come between plan and commit."""
    a, b = pool.alloc(2)
    planner = device_planner(pool)
    step = planner._step(2)
    named = torch.tensor([pool.slot(a), pool.slot(b)])
    for _ in range(6):
        plan = planner.plan(named, 1)
        planner.folded(plan)
        planner.commit(plan)
    plan = planner.plan(named, 1, force_fold=True)
    planner.folded(plan)
    planner.commit(plan)  # that was the capture: the host's part of it is over
    planner.kernels.plan_step(pool, step, _request(named))
    pool.free(a)
    (c,) = pool.alloc()
    assert pool.slot(c) == named[0]
    before = pool.on_device.records.words.clone()
    planner.kernels.fold_step(pool, step)
    planner.kernels.commit_step(pool, step, None)
    words = pool.on_device.records.words
    assert torch.equal(words[pool.slot(c)], before[pool.slot(c)])
    assert step.counts.tolist() == [0, 1]
    assert (pool.tokens(c), pool.tokens(b)) == (0, 8)
    check_books(pool)


def _request(named):
    from replayinfer.planner.device import StepRequest

    return StepRequest(named, None, None, 1, 1, False)


def test_pads_and_stale_handles(pool):
    a, b, c = pool.alloc(3)
    pool.free(b)
    (d,) = pool.alloc()
    assert pool.slot(d) == b & 0xFFFFF
    planner = device_planner(pool)
    foreign = small_pool(1).alloc()[0]
    beyond = 5
    plan = planner.plan(torch.tensor([b, a, -3, foreign, beyond, pool.slot(d), pool.slot(c)]))
    slots = [-1, pool.slot(a), -1, -1, -1, pool.slot(d), pool.slot(c)]
    assert plan.slots.tolist() == slots
    assert plan.handles.tolist() == [-1, a, -1, -1, -1, d, c]
    assert plan.windows.tolist() == [int(s >= 0) for s in slots]
    planner.abort(plan)
    with pytest.raises(StaleHandleError):  # named on the host they are refused
        planner.plan([a, b])


@pytest.mark.parametrize("check", [False, True])
def test_what_is_out_of_bounds(pool, check, monkeypatch):
    """Clamped as the kernels document, or refused where faults are looked for."""
    monkeypatch.setenv("REPLAYINFER_CHECK", str(int(check)))
    a, b, c = pool.alloc(3)
    planner = device_planner(pool)
    named = torch.tensor([a, b, -1, c])
    windows = torch.tensor([-2, 3, 50, 9])
    if check:
        with pytest.raises(InputError, match=r"^windows: got -2; allowed 0..3"):
            planner.plan(named, windows)
        with pytest.raises(InputError, match=rf"^sequences: got slot {pool.slot(a)} twice"):
            planner.plan(torch.tensor([a, b, pool.slot(a)]))
        windows.clamp_(0, 3)
    plan = planner.plan(named, windows)
    assert plan.windows.tolist() == [0, 3, 0, 3]
    planner.folded(plan)
    counts = torch.tensor([-1, 4, 7, 2])
    if check:
        before = pool.on_device.records.words.clone()
        with pytest.raises(InputError, match=r"^accepted: got -1 for entry 0 of the plan; allowed"):
            planner.commit(plan, counts)
        assert torch.equal(pool.on_device.records.words, before)
        counts[:2] = torch.tensor([0, 3])
    assert planner.commit(plan, counts).tolist() == [0, 3, 0, 2]
    assert [pool.tokens(s) for s in (a, b, c)] == [0, 3, 2]


BAD = {
    "floats": (torch.tensor([1.0]), {}),
    "a matrix": (torch.tensor([[1]]), {}),
    "int16": (torch.tensor([1], dtype=torch.int16), {}),
    "strided": (torch.tensor([1, 2, 3, 4])[::2], {}),
    "meta": (torch.empty(1, dtype=torch.int64, device="meta"), {}),
    "too few windows": (None, {"windows": torch.tensor([1])}),
    "float windows": (None, {"windows": torch.tensor([1.0, 1.0])}),
    "a long window": (None, {"windows": 4}),
    "a wide step": (None, {"windows": torch.tensor([1, 1]), "window": 4}),
    "integer flags": (None, {"force_fold": torch.tensor([1, 0])}),
    "too many flags": (None, {"force_fold": torch.tensor([True] * 3)}),
    "a small bucket": (None, {"bucket": 1}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_change_nothing(pool, case):
    seqs = pool.alloc(2)
    planner = device_planner(pool)
    sequences, options = BAD[case]
    before = snapshot(everything(pool))
    with pytest.raises(InputError, match=r"got .*; allowed "):
        planner.plan(torch.tensor(seqs) if sequences is None else sequences, **options)
    assert_untouched(before, everything(pool))
    assert not pool.cursors.unnamed
    planner.abort(planner.plan(seqs))


def test_counts_that_are_refused(pool):
    seqs = pool.alloc(2)
    planner = device_planner(pool)
    plan = planner.plan(seqs, 2)
    planner.folded(plan)
    for counts in (torch.ones(2), [1], [[1, 1]], "ab", torch.tensor([1, 1, 1]), [0.5, 1]):
        with pytest.raises(InputError, match=r"^accepted: got .*; allowed "):
            planner.commit(plan, counts)
    assert planner.commit(plan, np.array([2, 1], dtype=np.int32)).tolist() == [2, 1]


def test_what_the_device_does_not_plan(pool):
    seqs = pool.alloc(2)
    planner = device_planner(pool)
    wide = small_pool(2, capacity=40, max_window=32, page_rows=8)
    with pytest.raises(UnsupportedError, match=r"^parents: got draft trees in a pool of max_wind"):
        device_planner(wide).plan(wide.alloc(2), 2, parents=[[-1, 0], [-1, -1]])
    planner.abort(planner.plan(seqs))
    with pytest.raises(UnsupportedError, match=r"^planner: got 'device' for a pool whose cursors"):
        device_planner(small_pool(planner="host"))
    with pytest.raises(UnsupportedError, match=r"^policy: got <function"):
        device_planner(pool, policy=lambda *args: args[2])
    with pytest.raises(UnsupportedError, match=r"^policy: got 'deadline:0'"):
        device_planner(pool, policy="deadline:0")
    with pytest.raises(UnsupportedError, match=r"^backend: got 'other', which does not plan"):
        DevicePlanner(pool, type("Other", (), {"name": "other"})())


def test_the_order_of_a_step(pool):
    seqs = pool.alloc(2)
    planner = device_planner(pool)
    plan = planner.plan(seqs)
    with pytest.raises(PlanError, match=r"^commit: got a plan that is planned"):
        planner.commit(plan)
    with pytest.raises(PlanError, match=r"^plan: got a second plan in bucket 2"):
        planner.plan(torch.tensor([-1, -1]))
    planner.folded(plan)
    with pytest.raises(PlanError, match=r"^fold: got a plan that is folded"):
        planner.folded(plan)
    with pytest.raises(PlanError, match=r"got a plan of another planner"):
        device_planner(pool).commit(plan)
    planner.commit(plan)
    with pytest.raises(PlanError, match=r"^abort: got a plan that is committed"):
        planner.abort(plan)


def test_addresses_stay(pool):
    seqs = pool.alloc(3)
    planner = device_planner(pool)
    first = None
    for windows in (1, [1, 2, 3], torch.tensor([3, 3, 3])):
        plan = planner.plan(seqs, windows)
        planner.folded(plan)
        counts = planner.commit(plan)
        now = [getattr(plan.arrays, n).data_ptr() for n in vars(plan.arrays)]
        now += [counts.data_ptr(), pool.on_device.records.words.data_ptr()]
        assert (first := first or now) == now


@pytest.mark.parametrize("folded", [False, True])
def test_abort(pool, folded):
    """A fold that ran stands; the windows are dropped, and with `free` their sequences end."""
    a, b, c = pool.alloc(3)
    planner = device_planner(pool)
    plan = planner.plan([a, b, c], 3)
    planner.folded(plan)
    planner.commit(plan)
    plan = planner.plan(
        torch.tensor([a, b, c]), torch.tensor([2, 0, 3]), force_fold=torch.ones(3) > 0
    )
    if folded:
        planner.folded(plan)
    planner.abort(plan, free=True)
    assert pool.cursors.live.tolist() == [pool.slot(b)]
    assert (pool.tokens(b), pool.history(b)) == (3, 0 if folded else 3)
    assert not pool.cursors.unnamed
    check_books(pool)


# The wrapper -------------------------------------------------------------------------------------


@pytest.fixture
def world(rng):
    return DeviceWorld(SPECS["mamba2"], rng, layers=[0, 2], capacity=4, max_window=2, page_rows=2)


def test_the_wrapper_plans_as_the_pool_was_made(world):
    pool = world.pool
    assert isinstance(wrapped(pool).planner, DevicePlanner)
    assert isinstance(wrapped(pool, planner="device").planner, DevicePlanner)
    assert type(wrapped(pool, planner="host").planner) is HostPlanner
    host = small_pool(planner="host")
    assert type(wrapped(host).planner) is HostPlanner
    with pytest.raises(UnsupportedError, match=r"^planner: got 'device' for a pool"):
        wrapped(host, planner="device")
    with pytest.raises(InputError, match=r"^planner: got 'gpu'"):
        wrapped(pool, planner="gpu")
    with pytest.raises(InputError, match=r"^direct: got 0"):
        wrapped(pool, direct=0)


def test_every_layer_must_run(world):
    a, b = world.alloc(2)
    world.wrapper.plan(torch.tensor([a, b]))
    world.wrapper.fold()
    with pytest.raises(PlanError, match=r"^commit: got no run of layers \[0, 2\]"):
        world.wrapper.commit()
    world.wrapper.abort()
    world.step([b, a])
    world.check()


def test_a_warmup_moves_nothing(world):
    a, b = world.alloc(2)
    world.step({a: 2, b: 1})
    before = snapshot(everything(world.pool))
    world.wrapper.warmup([1, 4])
    ops.warmup(world.wrapper.planner, 8, backend="torch")
    assert_untouched(before, everything(world.pool))
    world.step([a, b])
    world.check()


def test_reading_a_plan(world):
    """Asked for, what the host would have known comes from the device."""
    a, b = world.alloc(2)
    world.step({a: 2, b: 2})
    world.step({a: 2, b: 1})
    plan = world.wrapper.plan(torch.tensor([b, -1, a]), torch.tensor([1, 1, 1]))
    assert (plan.batch, plan.bucket, plan.window) == (3, 3, 2)
    assert plan.slots.tolist() == [world.pool.slot(b), -1, world.pool.slot(a)]
    assert plan.fold.tolist() == [False, False, True]
    assert plan.fold_index.tolist() == [2]
    assert plan.fold_count == 1
    assert plan.fold_rows.tolist() == [3, 0, 4]
    assert plan.starts.tolist() == [3, 0, 0]
    assert "bucket=3" in repr(plan)
    with pytest.raises(AttributeError):
        _ = plan.taken_inputs
    assert read(plan)["fold_rows"].tolist() == [4, 0, 0]
    world.wrapper.abort()
