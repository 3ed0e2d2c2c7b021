"""Policies: `full` folds exactly when full; `spread` and `deadline` level the work.

Neither ever misses a fold.
"""

import numpy as np
import pytest

from replayinfer import HostPlanner, InputError, StatePool, UnsupportedError
from replayinfer.planner import POLICIES, Deadline, fold_budget, get_policy, must_fold

from ..pools.kit import SPECS, World, random_int

full, spread = POLICIES["full"], POLICIES["spread"]


class Batch:
    """Histories of a batch under a policy, without a pool."""

    def __init__(self, policy, histories, capacity):
        self.policy, self.capacity = policy, capacity
        self.history = np.array(histories, dtype=np.int32)

    def step(self, windows, accepted=None):
        """The mask of folds, and of those that had to be."""
        windows = np.broadcast_to(np.asarray(windows, dtype=np.int32), self.history.shape)
        must = must_fold(self.history, windows, self.capacity)
        chosen = self.policy(self.history, windows, must, self.capacity)
        assert chosen.dtype == bool
        assert chosen[must].all(), "a fold that must happen was put off"
        assert not (chosen & (self.history == 0)).any(), "nothing to fold"
        self.history = np.where(chosen, 0, self.history)
        assert (self.history + windows <= self.capacity).all()
        self.history = self.history + (windows if accepted is None else accepted)
        return chosen, must


def test_by_name_or_as_given():
    assert get_policy("full") is full
    assert get_policy("spread") is spread
    assert get_policy(spread) is spread
    assert get_policy("deadline:12") == Deadline(12)
    for name in ("deadline", "deadline:", "deadline:0", "deadline:-1", "deadline:1.5"):
        with pytest.raises(
            UnsupportedError,
            match=rf"^policy: got '{name}'; allowed full, spread, deadline:FOLDS or a",
        ):
            get_policy(name)
    with pytest.raises(InputError, match=r"^folds: got 0; allowed"):
        Deadline(0)


def test_full_folds_exactly_when_full(rng):
    """Whoever else is in the batch."""
    for _ in range(50):
        capacity = random_int(rng, 1, 20)
        n = random_int(rng, 0, 30)
        batch = Batch(full, [random_int(rng, 0, capacity) for _ in range(n)], capacity)
        chosen, must = batch.step([random_int(rng, 0, capacity) for _ in range(n)])
        assert (chosen == must).all()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("capacity", [16, 17, 32])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 100, 257])
def test_spread_levels_a_batch_that_started_together(n, capacity, window):
    """Never more than ceil(n / c) folds a step, where a sequence folds every c steps."""
    batch = Batch(spread, np.zeros(n), capacity)
    cycle = capacity // window
    share = -(-n // cycle)
    folds = [int(batch.step(window)[0].sum()) for _ in range(6 * cycle)]
    assert max(folds) <= share
    # It costs something: sequences fold early in the first cycle, no more than once too often.
    assert sum(folds) <= 6 * n


@pytest.mark.parametrize("window", [1, 2, 3, 16])
@pytest.mark.parametrize("capacity", [16, 17, 32])
@pytest.mark.parametrize("n", [1, 16, 17, 100, 257])
def test_deadline_keeps_a_budget_that_can_be_kept(n, capacity, window):
    """From the fair share up; and a larger one folds early no more often."""
    cycle = capacity // window
    share = -(-n // cycle)
    early = []
    for budget in (share, share + 1, 2 * share, n):
        batch = Batch(Deadline(budget), np.zeros(n), capacity)
        steps = [batch.step(window) for _ in range(6 * cycle)]
        assert max(int(chosen.sum()) for chosen, _ in steps) <= budget
        early.append(sum(int((chosen & ~must).sum()) for chosen, must in steps))
    assert early == sorted(early, reverse=True)
    assert early[-1] == 0


@pytest.mark.parametrize("capacity", [16, 32])
@pytest.mark.parametrize("n", [17, 100, 257])
def test_deadline_with_too_small_a_budget_levels_to_the_fair_share(n, capacity):
    """One fold a step cannot serve `n` sequences: a step takes the share that `spread` takes."""
    batch = Batch(Deadline(1), np.zeros(n), capacity)
    folds = [int(batch.step(1)[0].sum()) for _ in range(6 * capacity)]
    assert max(folds) == -(-n // capacity)


def test_deadline_exceeds_a_budget_by_no_more_than_it_has_to():
    """Ten are due within two steps, which is five a step at least; three a step was asked for."""
    history = np.array([7] * 10 + [1] * 14, dtype=np.int32)
    batch = Batch(Deadline(3), history, 8)
    folds = [int(batch.step(1)[0].sum()) for _ in range(2)]
    assert folds == [5, 5]


def test_deadline_puts_off_no_fold_for_its_budget():
    batch = Batch(Deadline(2), [8] * 6 + [3, 4], 8)
    chosen, must = batch.step(1)
    assert must.sum() == 6
    assert (chosen == must).all(), "a step over the budget folds nothing early"


@pytest.mark.parametrize("budget", [1, 3, 10])
def test_deadline_never_misses_a_fold(budget, rng):
    """Any windows and accepted counts; `Batch.step` asserts it."""
    for _ in range(20):
        capacity = random_int(rng, 1, 24)
        longest = random_int(rng, 1, capacity)
        batch = Batch(Deadline(budget), np.zeros(random_int(rng, 1, 40)), capacity)
        for _ in range(40):
            n = batch.history.size
            windows = np.array([random_int(rng, 0, longest) for _ in range(n)], dtype=np.int32)
            batch.step(windows, [random_int(rng, 0, int(w)) for w in windows])


def test_deadline_of_the_fair_share_is_spread_where_that_can_be_kept(rng):
    one, other = (Batch(p, np.zeros(64), 16) for p in (spread, Deadline(4)))
    for _ in range(64):
        assert (one.step(1)[0] == other.step(1)[0]).all()


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_a_budget_in_bytes(family):
    pool = StatePool(SPECS[family], [0, 3], 2, capacity=6, format="fp32_split")
    row = sum(f.nbytes for f in pool.spec.row_fields(pool.dtype, pool.format))
    heads, dim, state = pool.spec.state_shape
    fold = 2 * (2 * 4 * heads * dim * state + 6 * row)
    assert fold_budget(pool, fold) == fold_budget(pool, 2 * fold - 1) == 1
    assert fold_budget(pool, 7 * fold) == 7
    with pytest.raises(InputError, match=rf"^budget: got {fold - 1} B; .* = {fold} B; "):
        fold_budget(pool, fold - 1)


@pytest.mark.parametrize("window", [1, 3])
def test_full_does_not_level(window):
    """What the test above tells apart."""
    batch = Batch(full, np.zeros(64), 16)
    assert max(int(batch.step(window)[0].sum()) for _ in range(40)) == 64


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("per_place", [1, 3])
def test_a_staggered_batch_folds_nothing_early(window, per_place):
    """Histories spread evenly over the cycle: spread is full."""
    histories = np.repeat(np.arange(0, 16, window), per_place)
    batch = Batch(spread, histories, 16)
    for _ in range(48):
        chosen, must = batch.step(window)
        assert (chosen == must).all()


def test_spread_once_staggered_stays_staggered():
    batch = Batch(spread, np.zeros(48), 16)
    for step in range(100):
        chosen, must = batch.step(1)
        if step >= 32:
            assert (chosen == must).all()
            assert chosen.sum() == 3


def test_spread_never_misses_a_fold(rng):
    """Any windows, any accepted counts, arrivals and departures; `Batch.step` asserts it."""
    for _ in range(30):
        capacity = random_int(rng, 1, 24)
        longest = random_int(rng, 1, capacity)
        batch = Batch(spread, np.zeros(random_int(rng, 1, 40)), capacity)
        for _ in range(40):
            n = batch.history.size
            windows = np.array([random_int(rng, 0, longest) for _ in range(n)], dtype=np.int32)
            batch.step(windows, [random_int(rng, 0, int(w)) for w in windows])
            if random_int(rng, 0, 4) == 0:
                new = [random_int(rng, 0, capacity) for _ in range(random_int(rng, 0, 10))]
                batch.history = np.append(batch.history[random_int(rng, 0, n // 2) :], new)
                batch.history = batch.history.astype(np.int32)


def test_spread_takes_the_nearest_deadlines_first():
    history = np.array([3, 7, 7, 5, 0, 7, 6, 1], dtype=np.int32)
    batch = Batch(spread, history, 8)
    chosen, must = batch.step(1)
    assert not must.any()
    # Three are due in one step and the share is one, so two go now.
    assert np.flatnonzero(chosen).tolist() == [1, 2]


def test_spread_on_an_empty_batch():
    batch = Batch(spread, [], 8)
    assert batch.step(1)[0].size == 0
    assert Batch(full, [], 8).step(1)[0].size == 0
    assert Batch(Deadline(2), [], 8).step(1)[0].size == 0


@pytest.mark.parametrize("policy", ["spread", "deadline:2"])
@pytest.mark.parametrize("window", [1, 3])
def test_a_planner_that_levels(window, policy, rng):
    """Through plans, with everything accepted: levelled, counted as early, states as they were."""
    world = World(
        SPECS["mamba2"], rng, capacity=6, max_window=window, page_rows=2, layers=[0],
        policy=policy, max_sequences=8, spare=1,
    )  # fmt: skip
    seqs = world.alloc(8)
    folds, early = [], 0
    for _ in range(3 * 6 // window):
        plan = world.step(dict.fromkeys(seqs, window))
        folds.append(plan.fold_count)
        early += plan.early
        must = must_fold(plan.fold_rows, plan.windows, 6)
        assert (plan.fold & ~must).sum() == plan.early
    assert max(folds) <= -(-8 // (6 // window))
    assert early > 0
    assert world.wrapper.counters.early_folds == early
    assert world.wrapper.counters.folds == sum(folds)
    world.check()


def test_a_policy_of_ones_own_can_only_add():
    """One that forgets what must fold, and asks for folds of nothing, does no harm."""
    pool = StatePool(SPECS["mamba2"], [0], 4, capacity=2)
    calls = []

    def odd(history, window, must, capacity):
        calls.append((history.tolist(), window.tolist(), must.tolist(), capacity))
        return np.array([True, True, False, False])

    seqs, plain = pool.alloc(4), HostPlanner(pool)
    for batch in (seqs[1::2], seqs[3:]):
        plan = plain.plan(batch)
        plain.folded(plan)
        plain.commit(plan)
    plan = HostPlanner(pool, policy=odd).plan(seqs)
    assert calls == [([0, 1, 0, 2], [1, 1, 1, 1], [False, False, False, True], 2)]
    assert plan.fold.tolist() == [False, True, False, True]
    assert (plan.early, plan.forced) == (1, 0)
