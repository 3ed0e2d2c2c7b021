"""Simulated serving against a plain loop over sequences, and against what must hold in any run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from replayinfer import CapacityError, InputError, Mamba2Spec
from replayinfer.cost import StepCost
from replayinfer.planner import must_fold
from replayinfer.simulate import ARRIVALS, Trace, id_pool, make_trace, simulate

SPEC = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
COST = StepCost.of(SPEC)


def random_trace(rng, requests, span_s=0.01):
    generator = np.random.default_rng(int(rng.initial_seed()) % 2**32)
    arrival = np.sort(generator.random(requests)) * span_s
    return Trace(
        "random",
        arrival - arrival[0],
        generator.integers(0, 100, requests).astype(np.int32),
        generator.integers(1, 60, requests).astype(np.int32),
    )


def by_hand(trace, cost, layers, capacity, batch, rest_us):
    """One sequence at a time, `full`: (sequences, folds, times) of every step."""
    now, waiting, live, steps = 0.0, list(range(len(trace))), [], []
    while waiting or live:
        if not live:
            now = max(now, trace.arrival[waiting[0]])
        while waiting and len(live) < batch and trace.arrival[waiting[0]] <= now:
            live.append([0, int(trace.output[waiting.pop(0)])])
        folds = rows = folded = 0
        for sequence in live:
            if sequence[0] + 1 > capacity:
                folds, folded = folds + 1, folded + sequence[0]
                sequence[0] = 0
            rows += sequence[0]
            sequence[0] += 1
            sequence[1] -= 1
        time = layers * cost.step_us(len(live), rows, folds, folded)
        steps.append((len(live), folds, time))
        now += (time + rest_us) * 1e-6
        live = [s for s in live if s[1]]
    return [np.array(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize(("capacity", "batch", "rest_us"), [(16, 8, 0.0), (5, 3, 300.0)])
def test_full_is_a_plain_loop(capacity, batch, rest_us, rng):
    trace = random_trace(rng, 60)
    outcome = simulate(trace, COST, layers=3, capacity=capacity, batch=batch, rest_us=rest_us)
    sequences, folds, times = by_hand(trace, COST, 3, capacity, batch, rest_us)
    assert outcome.sequences.tolist() == sequences.tolist()
    assert outcome.folds.tolist() == folds.tolist()
    assert outcome.times_us == pytest.approx(times)
    assert outcome.simulated_s >= times.sum() * 1e-6
    assert outcome.tokens == trace.output.sum()
    assert outcome.fold_histogram() == {str(k): v for k, v in sorted(Counter(folds).items())}


@pytest.mark.parametrize("policy", ["full", "spread", "deadline:3"])
def test_every_request_is_served_and_every_page_given_back(policy, rng, monkeypatch):
    pools = []

    def watched(*args, **options):
        pools.append(id_pool(*args, **options))
        return pools[-1]

    monkeypatch.setattr("replayinfer.simulate.run.id_pool", watched)
    trace = random_trace(rng, 80)
    outcome = simulate(trace, COST, capacity=8, batch=12, policy=policy)
    assert outcome.tokens == trace.output.sum()
    assert (outcome.exhausted, outcome.preempted) == (0, 0)
    assert set(pools[0].pages_in_use().values()) == {0}
    assert outcome.peak_checkpoint_pages <= 12
    assert outcome.pages.max() <= outcome.checkpoint_pages + outcome.input_pages
    d = outcome.as_dict()
    assert {"requests", "steps", "p50_us", "p99_us", "policy", "exhausted", "peak_pages"} <= set(d)
    assert d["requests"] == 80
    assert d["steps"] == outcome.steps == sum(d["fold_histogram"].values())
    assert d["p50_us"] <= d["p99_us"] <= d["max_us"]


def test_the_planner_is_the_real_one(monkeypatch):
    """Each step goes through plan, folded and commit of a `HostPlanner`, with its predicate."""
    from replayinfer.planner import HostPlanner

    calls = Counter()

    class Watched(HostPlanner):
        def plan(self, *args, **options):
            plan = super().plan(*args, **options)
            calls["plan"] += 1
            assert (plan.fold == must_fold(plan.fold_rows, plan.windows, 8)).all()
            return plan

        def folded(self, plan):
            calls["folded"] += 1
            super().folded(plan)

        def commit(self, plan, accepted=None):
            calls["commit"] += 1
            return super().commit(plan, accepted)

    monkeypatch.setattr("replayinfer.simulate.run.HostPlanner", Watched)
    trace = make_trace("bursty", 40, batch=8, step_s=1e-4, output_mean=20)
    outcome = simulate(trace, COST, capacity=8, batch=8)
    assert set(calls.values()) == {outcome.steps}


def test_policies_level_what_begins_together():
    trace = make_trace("synchronized", 128, batch=64, step_s=1e-3, output_mean=96)
    found = {
        policy: simulate(trace, COST, capacity=16, batch=64, policy=policy)
        for policy in ("full", "spread", "deadline:10")
    }
    assert found["full"].folds.max() == 64
    assert found["spread"].folds.max() == 4
    assert found["deadline:10"].folds.max() == 10
    assert found["full"].early.sum() == 0
    tails = {k: o.percentile_us(99) / o.percentile_us(50) for k, o in found.items()}
    assert tails["spread"] < tails["deadline:10"] < tails["full"]


def test_windows_keep_what_is_accepted():
    cost = StepCost.of(SPEC, window=4)
    trace = make_trace("backlogged", 60, batch=8, step_s=1e-3, output_mean=40)
    all_right = simulate(trace, cost, capacity=16, batch=8, commit_rate=1.0)
    none_right = simulate(trace, cost, capacity=16, batch=8, commit_rate=0.0)
    assert all_right.tokens == none_right.tokens == trace.output.sum()
    assert none_right.sequences.sum() == trace.output.sum()  # one token a round
    assert all_right.sequences.sum() == (-(-trace.output // 4)).sum()


@pytest.mark.parametrize(
    ("pages", "preempts"), [({"checkpoint_pages": 5}, False), ({"input_pages": 9}, True)]
)
def test_a_pool_that_runs_out_delays_and_loses_nothing(pages, preempts, rng):
    trace = random_trace(rng, 60, span_s=1e-4)  # they overlap
    outcome = simulate(trace, COST, capacity=16, batch=12, page_rows=4, **pages)
    assert outcome.tokens == trace.output.sum()
    assert outcome.exhausted > 0
    assert (outcome.preempted > 0) == preempts
    assert outcome.peak_checkpoint_pages <= outcome.checkpoint_pages
    assert outcome.peak_input_pages <= outcome.input_pages


def test_a_pool_too_small_for_one_sequence_is_refused():
    trace = make_trace("steady", 3, batch=2, step_s=1e-3, output_mean=500)
    with pytest.raises(CapacityError, match="input pages"):
        simulate(trace, COST, capacity=16, batch=2, page_rows=4, input_pages=1)


def test_a_backlog_keeps_the_batch_at_its_cap():
    step = COST.steady_us(32, 16) * 1e-6
    trace = make_trace("backlogged", 4000, batch=32, step_s=step, output_mean=16)
    outcome = simulate(trace, COST, capacity=16, batch=32)
    assert outcome.as_dict()["at_cap"] > 0.9
    light = make_trace("steady", 400, batch=32, step_s=step, output_mean=16)
    assert simulate(light, COST, capacity=16, batch=32).as_dict()["at_cap"] < 0.5


@pytest.mark.parametrize("kind", ARRIVALS)
def test_traces_have_the_means_that_were_asked_for(kind):
    trace = make_trace(kind, 20000, batch=64, step_s=1e-3, output_mean=100, prompt_mean=30, seed=3)
    assert len(trace) == 20000
    assert (np.diff(trace.arrival) >= 0).all()
    assert trace.output.min() >= 1
    # A geometric mean's standard error is its mean / sqrt(20000): 0.7%; six of them.
    assert trace.output.mean() == pytest.approx(100, rel=0.043)
    assert trace.prompt.mean() == pytest.approx(30, rel=0.043)
    again = make_trace(kind, 20000, batch=64, step_s=1e-3, output_mean=100, prompt_mean=30, seed=3)
    assert (again.arrival == trace.arrival).all()
    if kind != "synchronized":
        served = {"backlogged": 1.5}.get(kind, 0.8) * 64 / (100 * 1e-3)
        assert 20000 / trace.arrival[-1] == pytest.approx(served, rel=0.2)


def test_what_is_refused():
    trace = make_trace("steady", 2, batch=2, step_s=1e-3)
    for options, message in (
        ({"rest_us": -1.0}, "rest_us: got -1"),
        ({"rest_us": float("nan")}, "rest_us: got nan"),
        ({"commit_rate": 1.5}, "commit_rate: got 1.5"),
        ({"layers": 0}, "layers: got 0"),
        ({"batch": 0}, "batch: got 0"),
        ({"policy": "deadline"}, "policy: got 'deadline'"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(trace, COST, **options)
    for options, message in (
        ({"kind": "poisson"}, "arrivals: got 'poisson'; allowed backlogged"),
        ({"requests": 0}, "requests: got 0"),
        ({"rate": 0.0}, "rate: got 0"),
        ({"output_mean": 0}, "output_mean: got 0"),
    ):
        given = {"kind": "steady", "requests": 2} | options
        with pytest.raises(InputError, match=message):
            make_trace(given.pop("kind"), given.pop("requests"), batch=2, step_s=1e-3, **given)
