"""Windows of drafts: our rounds in their steady state, and kernels that write a state per token."""

from __future__ import annotations

import functools
import itertools
import sys

import numpy as np
import pytest
import torch

from replayinfer import GDNSpec, InputError, KDASpec, Mamba2Spec
from replayinfer.bench import BenchCase, peers, run_bench
from replayinfer.bench.peers import Variant, standard_kernels
from replayinfer.bench.replay import bytes_per_step
from replayinfer.bench.verify import verify_peer
from replayinfer.bench.work import make_work
from replayinfer.cost import SteadyState, accepted_mean, step_bytes
from replayinfer.formats import get_format

from .fakes import bind, peer
from .test_replay import SPECS, Noting, steps_of
from .test_run import clock  # noqa: F401

T, L, RATE = 3, 8, 0.6


def rounds(batch=6, rate=RATE, **options):
    backend = Noting()
    steps = steps_of(
        options.pop("spec", SPECS[0]), backend, batch=batch, capacity=L, window=T,
        commit_rate=rate, **options,
    )  # fmt: skip
    steps.launch()
    plans = [plan for name, plan, _ in backend.calls if name == "fold"]
    return steps, backend, plans


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_a_cycle_is_rounds_of_one_random_steady_state(spec):
    steps, backend, plans = rounds(spec=spec)
    assert (steps.steps, len(plans), steps.direct) == (32, 32, False)
    assert len({plan.arrays.history.data_ptr() for plan in plans}) == 32  # each its own arrays
    for plan in plans:
        assert set(plan.windows) == {T}
        assert plan.fold.tolist() == [h + T > L for h in plan.fold_rows]
        assert plan.starts.tolist() == np.where(plan.fold, 0, plan.fold_rows).tolist()
        assert (plan.arrays.table >= 0).all()
    # From one round to the next every history has grown by what a round may keep.
    for before, after in itertools.pairwise(plans):
        grown = after.fold_rows - before.starts
        assert ((grown >= 1) & (grown <= T)).all()
    assert all(out.shape[1] == T and out.isfinite().all() for out in backend.outputs)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("batch", [1, 2, 40])
def test_folds_and_rows_are_the_mean_even_of_few_sequences(batch, rate):
    _, _, plans = rounds(batch=batch, rate=rate, layers=1)
    steady = SteadyState.of(L, T, rate)
    folds = np.mean([plan.fold.mean() for plan in plans])
    rows = np.mean([plan.starts.mean() for plan in plans])
    kept = np.mean([b.fold_rows - a.starts for a, b in itertools.pairwise(plans)])
    # A cycle has 32 rounds: one fold more or less of a single sequence is 3% of them.
    assert folds == pytest.approx(steady.folds, abs=0.035)
    assert rows == pytest.approx(steady.rows, abs=0.35)
    assert kept == pytest.approx(accepted_mean(T, rate), abs=0.3 if batch < 40 else 0.1)


def test_the_same_cycle_every_time():
    first, second = (rounds()[2] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.fold_rows.tolist() == b.fold_rows.tolist()


def test_direct_steps_take_no_window():
    backend = Noting()
    assert not steps_of(SPECS[0], backend, batch=2, window=2, capacity=4).direct  # auto says so
    with pytest.raises(InputError, match="direct: got 'always' for windows of 2"):
        steps_of(SPECS[0], backend, window=2, capacity=4, direct="always")


def test_mixers_convolve_the_window():
    _, backend, _ = rounds(scope="mixer", layers=1)
    names = [name for name, *_ in backend.calls]
    assert names == ["fold", "conv", "readout"] * 32


def test_bytes_are_the_cost_models():
    spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
    both = {"capacity": 32, "window": 4, "commit_rate": 0.7}
    fmt = get_format("fp32_split")
    ssm, mixer = (
        bytes_per_step(spec, fmt, torch.bfloat16, batch=3, scope=scope, **both)
        for scope in ("ssm", "mixer")
    )
    assert ssm == round(3 * step_bytes(spec, fmt, **both))
    assert mixer - ssm == 3 * (3 + 4) * spec.conv_channels * 2  # read three and write four


# Peers ----------------------------------------------------------------------------------------

LAYERS = {
    "mamba2": Mamba2Spec(heads=4, dim=8, state=16, groups=2),
    "gdn": GDNSpec(heads=4, dim=8, state=16, key_heads=2),
    "kda": KDASpec(heads=2, dim=8, state=16, key_heads=2, gate="bounded"),
}


def verify(family, spoil=None, **options):
    variant = Variant("fake", functools.partial(bind, spoil=spoil))
    return verify_peer(variant, LAYERS[family], batch=3, window=T, **options)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", LAYERS)
def test_the_recurrence_over_windows_passes(family, state_dtype):
    assert verify(family, state_dtype=state_dtype) is None


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        ("gates", "first output"),
        ("last token", "first output"),
        ("nan", "first output"),
        ("layout", "second output"),
    ],
)
@pytest.mark.parametrize("family", LAYERS)
def test_what_computes_something_else_is_named(family, spoil, where):
    assert f"wrong: the {where} is off by " in verify(family, spoil)


def test_a_state_per_token_in_buffers_that_no_cache_holds(monkeypatch):
    monkeypatch.setattr("replayinfer.bench.work._PAST_CACHES", 3 * 4 * 2 * 4 * 8 * 2 * 2)
    work = make_work(
        SPECS[0], batch=3, layers=5, dtype=torch.bfloat16, state_dtype=torch.bfloat16,
        device=torch.device("cpu"), window=4,
    )  # fmt: skip
    rooms = [work.token_states(layer) for layer in range(5)]
    assert {room.shape for room in rooms} == {(3, 4, *SPECS[0].state_shape)}
    places = [room.data_ptr() for room in rooms]
    assert places[:2] == places[2:4]
    assert len(set(places)) == 2
    assert work.inputs(0)["x"].shape == (3, 4, 2, 4)
    # The tokens of a window lie next to each other, slices of the convolution's output.
    x = work.inputs(0)["x"]
    assert x.stride(1) == SPECS[0].conv_channels
    assert x.data_ptr() == work.tokens[0].convolved.data_ptr()


@pytest.mark.parametrize(
    ("family", "names", "refused"),
    [
        ("mamba2", {"sglang", "mamba_ssm", "flashinfer"}, {"mamba_ssm"}),
        ("gdn", {"sglang", "fla", "flashinfer"}, {"fla", "flashinfer"}),
        ("kda", {"sglang", "fla"}, {"fla"}),
    ],
)
def test_whoever_is_not_there_or_keeps_no_states(monkeypatch, family, names, refused):
    for name in ("sglang", "mamba_ssm", "flashinfer", "fla"):
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)
    skipped = {}
    options = (LAYERS[family], "ssm", torch.bfloat16, torch.float32, skipped, {}, T)
    assert not list(standard_kernels(*options))
    assert set(skipped) == names
    for name, reason in skipped.items():
        assert ("does not import" in reason) is (name not in refused)


def test_a_row_says_window_rate_and_speed(monkeypatch, clock):  # noqa: F811
    monkeypatch.setitem(peers._VERIFIERS, ("mamba2", "ssm"), (peer("good", bind),))
    clock[0]["good"] = 600.0
    case = BenchCase(
        SPECS[0], 2, capacity=L, backend="torch", layers=4, window=T, commit_rate=0.5
    )  # fmt: skip
    (row,) = run_bench([case], command="").rows
    assert (row["window"], row["commit_rate"], row["baseline"]) == (T, 0.5, "good")
    assert row["ours_us"] == round(100 / 32 / 4, 2)
    micros = 100 / 32 / 4
    assert row["rounds_per_s"] == round(2 / micros * 1e6)
    assert row["tokens_per_s"] == round(2 * 1.75 / micros * 1e6)
    assert row["bytes"] == bytes_per_step(
        SPECS[0], get_format("fp32_split"), torch.bfloat16, batch=2, capacity=L, window=T,
        commit_rate=0.5,
    )  # fmt: skip
