"""Arguments of a plan: one clear error, and nothing planned, taken or moved."""

import re

import numpy as np
import pytest
import torch

from replayinfer import HostPlanner, InputError, PlanError, UnsupportedError

from ..pools.kit import SPECS, Unchanged, World, check_books

WRONG = {
    "windows": {"windows": [1, 4, 1]},
    "windows ": {"windows": [1, -1, 1]},
    "windows  ": {"windows": [1, 1]},
    "windows   ": {"windows": [[1, 1, 1]]},
    "windows    ": {"windows": [1.0, 1.0, 1.0]},
    "windows     ": {"windows": [True, True, True]},
    "windows      ": {"windows": 4},
    "windows       ": {"windows": "111"},
    "windows        ": {"windows": [[1], [1, 1], 1]},
    "windows         ": {"windows": []},
    "windows          ": {"windows": np.array([1, 1 << 33, 1])},
    "window": {"window": 0},
    "window ": {"window": 4},
    "window  ": {"windows": [1, 3, 1], "window": 2},
    "window   ": {"window": 2.0},
    "window    ": {"window": True},
    "bucket": {"bucket": 2},
    "bucket ": {"bucket": 0},
    "bucket  ": {"bucket": 4.0},
    "bucket   ": {"bucket": True},
    "bucket    ": {"bucket": "8"},
    "force_fold": {"force_fold": [1, 0, 1]},
    "force_fold ": {"force_fold": [True, False]},
    "force_fold  ": {"force_fold": [[True, False, True]]},
    "force_fold   ": {"force_fold": 1},
    "force_fold    ": {"force_fold": "yes"},
    "force_fold     ": {"force_fold": [[True], [True, False], True]},
}


@pytest.fixture
def world(rng):
    world = World(SPECS["mamba2"], rng, capacity=6, max_window=3, page_rows=2, layers=[0])
    world.seqs = world.alloc(3)
    world.grow(world.seqs[0], 5)
    world.fork(world.seqs[0])
    return world


@pytest.mark.parametrize("case", WRONG)
def test_refusals_change_nothing(world, case):
    with Unchanged(world.pool), pytest.raises(InputError) as error:
        world.wrapper.plan(world.seqs, **WRONG[case])
    message = str(error.value)
    assert re.match(rf"^{case.strip()}: got .+; allowed .+; .+$", message), message
    check_books(world.pool)
    world.step(world.seqs)  # the planner is as ready as before


def test_a_window_longer_than_the_pools_is_told_what_to_change(world):
    with pytest.raises(InputError) as error:
        world.wrapper.plan(world.seqs, [1, 2, 9])
    assert str(error.value) == (
        "windows: got 9; allowed 0..3 (max_window of the pool); make the pool with a larger "
        "max_window, since no window is truncated"
    )


def test_more_sequences_than_the_largest_bucket(world):
    planner = HostPlanner(world.pool, buckets=[1, 2])
    with (
        Unchanged(world.pool),
        pytest.raises(InputError, match=r"^sequences: got 3; allowed at most"),
    ):
        planner.plan(world.seqs)


def test_a_sequence_twice(world):
    a, b, _ = world.seqs
    with (
        Unchanged(world.pool),
        pytest.raises(InputError, match=r"^sequences: got .+ twice; allowed "),
    ):
        world.wrapper.plan([a, b, a])


@pytest.mark.parametrize(
    "buckets", [[0], [-1, 4], [2.0], ["4"], [True], [4, "8"], [4, None], 4, "4"]
)
def test_buckets(world, buckets):
    with pytest.raises(InputError, match=r"^buckets: got .+; allowed integers >= 1; "):
        HostPlanner(world.pool, buckets=buckets)


@pytest.mark.parametrize("policy", ["Full", "", None, 3, ["full"], {}, "deadline"], ids=repr)
def test_policies(world, policy):
    with pytest.raises(
        UnsupportedError, match=r"^policy: got .+; allowed full, spread, deadline:FOLDS or a callab"
    ):
        HostPlanner(world.pool, policy=policy)


def test_unbound_layers_are_not_planned(rng):
    world = World(SPECS["mamba2"], rng, layers=[0])
    seqs = world.alloc(1)
    world.pool._weights._bound[0] = False
    with (
        Unchanged(world.pool),
        pytest.raises(PlanError, match=r"^weights: got none for layers \[0\]"),
    ):
        world.wrapper.plan(seqs)


@pytest.mark.parametrize(
    "windows", [2, np.int64(2), [2, 2, 2], (2, 2, 2), np.full(3, 2, np.uint8), torch.full((3,), 2)]
)
def test_windows_come_in_several_shapes(world, windows):
    plan = world.wrapper.plan(world.seqs, windows)
    assert plan.windows.tolist() == [2, 2, 2]
    assert plan.window == 2


def test_the_callers_arrays_are_copied(world):
    """An engine reuses its buffers while the step is under way."""
    windows, handles = np.array([1, 2, 1], dtype=np.int32), np.array(world.seqs)
    force = np.array([True, False, False])
    plan = world.wrapper.plan(handles, windows, force_fold=force)
    windows[:], handles[:], force[:] = 3, -1, True
    assert plan.windows.tolist() == [1, 2, 1]
    assert plan.handles.tolist() == world.seqs
    assert plan.fold.tolist() == [True, False, False]
    world.wrapper.fold()
    assert world.pool.cursors.busy[:3].all()


def test_the_token_axis(world):
    for windows, window, width in (
        ([0, 0, 0], None, 1), ([1, 3, 0], None, 3), ([1, 1, 1], 3, 3), ([0, 0, 0], 2, 2),
        ([3, 0, 0], 3, 3),
    ):  # fmt: skip
        plan = world.wrapper.plan(world.seqs, windows, window=window)
        assert plan.window == width
        world.wrapper.abort()


def test_an_empty_batch_is_a_step(world):
    """An engine with nothing to do still replays its graph; empty lists are lists of anything."""
    for windows, force in ((None, None), ([], []), (np.empty(0, np.int32), np.empty(0, bool))):
        with Unchanged(world.pool):
            plan = world.wrapper.plan([], windows, force_fold=force, bucket=4)
            assert (plan.batch, plan.bucket, plan.window, plan.fold_count) == (0, 4, 1, 0)
            world.wrapper.fold()
            drawn = world.draw(plan)
            outputs = world.run(plan, drawn)
            assert not outputs[0][0].any()
            assert not outputs[0][1].any()
            assert world.wrapper.commit([]).tolist() == []


def test_forced_folds(world):
    """A scalar or a flag each; a sequence without rows has nothing to fold; counted as forced."""
    pool = world.pool
    a, b, c = world.seqs
    world.grow(b, 2)
    plan = world.wrapper.plan([a, b, c], [3, 1, 1], force_fold=True)
    assert plan.fold.tolist() == [True, True, False]
    assert (plan.forced, plan.early) == (1, 0)  # a had to
    assert plan.starts.tolist() == [0, 0, 0]
    world.wrapper.abort()
    world.step({a: 0, b: 0, c: 0}, force=[b])
    assert [pool.history(s) for s in (a, b, c)] == [5, 0, 0]
    world.check()
    world.step({a: 1, b: 1, c: 1}, force=[a, c])
    assert [pool.history(s) for s in (a, b, c)] == [1, 1, 1]
    assert (world.wrapper.counters.folds, world.wrapper.counters.forced_folds) == (2, 2)
    world.check()
