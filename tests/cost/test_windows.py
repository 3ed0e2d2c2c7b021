"""Steady states of windows: the formula against rounds that are played, and the length it picks."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch

from replayinfer import GDNSpec, InputError, Mamba2Spec
from replayinfer.cost import SteadyState, accepted_mean, best_capacity, model, step_bytes
from replayinfer.cost import bytes as cost_bytes
from replayinfer.formats import get_format
from replayinfer.planner import must_fold

SPECS = [
    Mamba2Spec(heads=128, dim=64, state=128, groups=8),
    GDNSpec(heads=32, dim=128, state=128, key_heads=16),
]


@pytest.mark.parametrize(("module", "count"), [(cost_bytes, 5), (model, 3)], ids=["bytes", "model"])
def test_the_examples(module, count):
    result = doctest.testmod(module)
    assert result.attempted >= count
    assert not result.failed


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("capacity", "window"), [(16, 1), (32, 4), (32, 8), (9, 4), (4, 4)])
def test_the_steady_state_is_that_of_rounds(capacity, window, rate, rng):
    """4,000 sequences over 150 rounds: means to within six of their standard errors, and a bit."""
    drafts = torch.rand((150, 4000, window - 1), generator=rng).numpy() < rate
    kept = 1 + np.cumprod(drafts, axis=2).sum(2)
    history = torch.randint(0, capacity - window + 1, (4000,), generator=rng).numpy()
    rows, folds, folded = [], [], []
    for turn, counts in enumerate(kept):
        fold = must_fold(history, np.full_like(history, window), capacity)
        if turn >= 50:  # past the start
            rows.append(np.where(fold, 0, history).mean())
            folds.append(fold.mean())
            folded.append(history[fold])
        history = np.where(fold, 0, history) + counts
    state = SteadyState.of(capacity, window, rate)
    assert state.accepted == pytest.approx(kept.mean(), abs=0.03)
    assert state.folds * state.rows_folded == pytest.approx(state.accepted)
    assert state.rows == pytest.approx(np.mean(rows), rel=0.02, abs=0.02)
    assert state.folds == pytest.approx(np.mean(folds), rel=0.03)
    assert state.rows_folded == pytest.approx(np.concatenate(folded).mean(), rel=0.02)


def test_plain_decode_is_half_a_buffer_and_a_fold_in_l():
    for capacity in (1, 7, 16):
        state = SteadyState.of(capacity)
        assert (state.rows, state.rows_folded) == ((capacity - 1) / 2, capacity)
        assert state.folds == pytest.approx(1 / capacity)


@pytest.mark.parametrize("window", [1, 4, 8])
def test_bytes_of_a_round(window):
    spec, fmt = SPECS[0], get_format("fp32_split")
    state = math.prod(spec.state_shape)
    row = spec.row_bytes(torch.bfloat16, fmt)
    steady = SteadyState.of(32, window, 0.7)
    a = accepted_mean(window, 0.7)
    own = 2 * window if window > 1 else 1
    want = 2 * state + steady.folds * 8 * state + row * (steady.rows + own + a)
    got = step_bytes(spec, "fp32_split", capacity=32, window=window, commit_rate=0.7)
    assert got == pytest.approx(want)


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("window", [2, 4, 8])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_the_length_moves_nearly_the_fewest_bytes(spec, window, rate):
    for fmt in ("fp32", "fp32_split", "bf16"):

        def moved(length, fmt=fmt):
            return step_bytes(spec, fmt, capacity=length, window=window, commit_rate=rate)

        best = best_capacity(spec, fmt, window=window, commit_rate=rate)
        assert best & (best - 1) == 0
        assert best >= window
        lengths = [2**k for k in range(3, 10)]
        fewest = min(map(moved, lengths))
        assert moved(best) <= (1.15 if best == 32 else 1.05) * fewest * (1 + 1e-9)
        if best // 2 >= window:
            assert moved(best // 2) > (1.15 if best == 64 else 1.05) * fewest


def test_a_window_that_is_as_long_as_any_good_buffer():
    tiny = Mamba2Spec(heads=1, dim=1, state=1)
    assert best_capacity(tiny, window=16, commit_rate=0.5) >= 16
    assert best_capacity(tiny, window=13, commit_rate=0.0) >= 16


def test_what_is_refused():
    with pytest.raises(InputError, match="capacity: got 3 for windows of 4"):
        SteadyState.of(3, 4)
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match="commit_rate: got"):
            accepted_mean(4, rate)
