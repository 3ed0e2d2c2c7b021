"""Steps of a policy under arrivals, with a clock that counts folds in place of a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from replayinfer import GDNSpec, InputError, Mamba2Spec, UnsupportedError
from replayinfer.bench.policies import ARRIVALS, bench_policies

SPEC = Mamba2Spec(heads=1, dim=2, state=2, conv_width=0)


class Clock:
    """100 us a layer, and 1 us for every fold."""

    def __init__(self, pool):
        self.pool, self.times, self.pages = pool, [], []

    def step(self, plan):
        assert plan.batch == self.pool.sizes.max_sequences
        self.times.append(len(self.pool.layers) * (100.0 + plan.fold_count))

    def micros(self):
        return self.times


def rows(**options):
    settings = {"batch": 64, "capacity": 8, "layers": 2, "steps": 200, "clock": Clock}
    report = bench_policies(SPEC, **{**settings, **options})
    assert json.loads(json.dumps(report.as_dict()))["rows"]
    return {(row.policy, row.arrivals): row for row in report.rows}


def test_a_synchronized_start_folds_all_at_once_unless_spread():
    found = rows()
    full, spread = found["full", "synchronized"], found["spread", "synchronized"]
    assert (full.p50_us, full.max_us, full.folds_p99) == (100.0, 164.0, 64)
    assert full.tail == 1.64
    # Eight of the 64 in each step, and in the last of the first cycle what could not fold earlier.
    assert spread.folds_p99 <= 16
    assert spread.tail <= 1.08
    between = found["deadline:12", "synchronized"]
    assert spread.folds_p99 <= between.folds_p99 < full.folds_p99
    assert {kind for _, kind in found} == set(ARRIVALS)


@pytest.mark.parametrize("policy", ["full", "spread"])
def test_every_token_but_the_last_few_of_a_sequence_is_folded(policy):
    for kind in ("steady", "synchronized"):
        row = rows(arrivals=[kind])[policy, kind]
        assert row.steps == 200
        folded = 64 * 200 / 8
        assert 0.8 * folded < row.folds < 1.3 * folded


def test_a_burst_begins_together():
    row = rows(steps=130, arrivals=["bursty"])["full", "bursty"]
    assert row.folds_p99 >= 16


def test_refusals(monkeypatch):
    with pytest.raises(InputError, match="arrivals: got 'rare'; allowed steady"):
        rows(arrivals=["rare"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device: got no CUDA device"):
        bench_policies(GDNSpec(heads=1, dim=2, state=2, key_heads=1))


def test_the_same_arrivals_every_time():
    first, second = (rows(arrivals=["steady"])["spread", "steady"] for _ in range(2))
    assert first == second
    assert np.isfinite(first.p99_us)
