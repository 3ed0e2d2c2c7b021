"""One predicate decides everywhere: a sequence folds when its window does not fit."""

import numpy as np
import pytest

from replayinfer.planner import must_fold

from ..pools.kit import SPECS, World


def test_at_the_edges():
    assert not must_fold(0, 0, 1)
    assert not must_fold(0, 1, 1)
    assert must_fold(1, 1, 1)
    assert not must_fold(1, 0, 1)
    for capacity in (1, 2, 16, 33):
        for window in range(capacity + 1):
            for history in range(capacity + 1):
                # It folds exactly where a row of the window would be row number `capacity`.
                last = history + window - 1
                assert must_fold(history, window, capacity) == (window > 0 and last >= capacity)


def test_arrays_are_decided_like_numbers():
    history, window = np.meshgrid(np.arange(17, dtype=np.int32), np.arange(5, dtype=np.int32))
    got = must_fold(history, window, 16)
    assert got.dtype == bool
    for index in np.ndindex(got.shape):
        assert got[index] == must_fold(int(history[index]), int(window[index]), 16)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("capacity", [5, 6, 8])
def test_a_plan_folds_where_it_must_and_nowhere_else(capacity, window, rng):
    """Every history with every window up to the longest, in one mixed batch."""
    cases = [(h, t) for h in range(capacity + 1) for t in range(window + 1)]
    world = World(
        SPECS["mamba2"], rng, layers=[0], capacity=capacity, max_window=5, page_rows=2,
        max_sequences=len(cases), spare=1,
    )  # fmt: skip
    seqs = world.pool.alloc(len(cases))
    planner = world.wrapper.planner
    histories = np.array([h for h, _ in cases])
    left = histories.copy()
    while left.any():  # rows without contents: only the books matter here
        plan = planner.plan(seqs, np.minimum(left, 5))
        planner.folded(plan)
        planner.commit(plan)
        left -= plan.windows
    windows = np.array([t for _, t in cases])
    plan = planner.plan(seqs, windows)
    assert plan.fold.tolist() == [h + t > capacity for h, t in cases]
    assert plan.fold_rows.tolist() == histories.tolist()
    starts = np.where(plan.fold, 0, histories)
    assert plan.starts.tolist() == starts.tolist()
    assert (plan.starts + plan.windows <= capacity).all()  # no window is truncated
    assert plan.windows.tolist() == windows.tolist()
    assert (plan.forced, plan.early) == (0, 0)
    assert plan.fold_count == int(plan.fold.sum())
    assert plan.window == window
