"""Candidates held against the rule's choice, in Triton's interpreter; and what is called wrong."""

from __future__ import annotations

import math
import os

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import Mamba2Spec, StatePool
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import lookup
from replayinfer.testing import assert_bitwise_equal
from replayinfer.tune.choose import rules
from replayinfer.tune.run import TuneCase
from replayinfer.tune.trials import GraphTrials, disagreement

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
SPEC = Mamba2Spec(heads=1, dim=8, state=16)
RULE = rules(SPEC, "fp32_split", 2)
SOUND = {
    "readout": {"fused": LaunchConfig(num_warps=1, rows=4)},
    "fold": {"fold": LaunchConfig(rows=16, columns=16)},
    "conv": {"conv": LaunchConfig(rows=8)},
    "direct": {"direct": LaunchConfig(num_warps=1, rows=4)},
    "verify": {"verify": LaunchConfig(num_warps=1, rows=16)},
}
WINDOWS = (2, 3)


@pytest.fixture(scope="module")
def trials():
    case = TuneCase(SPEC, 2, "fp32_split", capacity=2, windows=WINDOWS, window_capacity=4)
    return GraphTrials(case, torch.device("cpu"), RULE)


@interpreted
@pytest.mark.parametrize("part", SOUND)
def test_a_sound_candidate_agrees_and_the_pool_is_as_before(part, trials):
    parts = {}
    for world in trials._worlds(part):
        pool = world.pool
        kept = {"checkpoints": pool.checkpoints.storage, "rings": pool.conv.rows}
        kept |= pool.inputs.fields
        parts |= {(world.window, name): tensor for name, tensor in kept.items()}
    before = {name: tensor.clone() for name, tensor in parts.items()}
    assert trials.wrong(part, {**RULE, **SOUND[part]}) is None
    for name, tensor in parts.items():
        assert_bitwise_equal(tensor, before[name], str(name))


@interpreted
@pytest.mark.parametrize(
    ("part", "spoil", "reason"),
    [
        ("readout", lambda pool, plan, out: out[0].mul_(1.1), "outputs of layer 0 are off"),
        ("readout", lambda pool, plan, out: out[1, 0, 0, 3:].fill_(math.nan), "outputs of layer"),
        ("readout", lambda pool, plan, out: pool.inputs.fields["x"][1].mul_(1.1), "rows of x"),
        ("fold", lambda pool, plan, out: pool.checkpoints.storage[1, 0].add_(2**10), "states of"),
        ("conv", lambda pool, plan, out: pool.conv.rows[0].mul_(1.1), "rings are off"),
        ("direct", lambda pool, plan, out: pool.checkpoints.storage[0].add_(2**10), "states of"),
        ("verify", lambda pool, plan, out: out[1, 1].mul_(1.1), "windows of 2: outputs of layer 0"),
        ("verify", lambda pool, plan, out: out[0, 2:].fill_(math.nan), "windows of 3: outputs of"),
        ("verify", lambda pool, plan, out: pool.inputs.fields["x"][1].mul_(1.1), "rows of x"),
    ],
)
def test_a_wrong_candidate_is_found(part, spoil, reason, trials, monkeypatch):
    choices = {**RULE, **SOUND[part]}
    method = "readout" if part == "verify" else part
    run = getattr(TritonBackend, method)

    def spoiled(*args):
        run(*args)
        place = next(i for i, a in enumerate(args) if isinstance(a, StatePool))
        pool, plan = args[place : place + 2]
        bad = choices[_op(part)]
        if lookup(_op(part), SPEC, "fp32_split", 2, pool.device) == bad:
            spoil(pool, plan, args[-1])

    static = part == "direct"
    monkeypatch.setattr(TritonBackend, method, staticmethod(spoiled) if static else spoiled)
    assert reason in trials.wrong(part, choices)
    assert trials.wrong(part, RULE) is None


@interpreted
def test_which_choices_a_part_looks_up(trials):
    one, two = {**RULE, "fused": LaunchConfig()}, {**RULE, "fused": None}
    assert trials.asked("readout", one) == {"fused"}
    assert trials.asked("readout", two) == {"fused", "prepass", "readout"}
    assert trials.asked("fold", two) == {"fold"}
    assert trials.asked("conv", two) == {"conv"}
    assert trials.asked("direct", two) == {"direct"}
    assert trials.asked("verify", two) == {"verify", "verify_prepass"}
    long = TuneCase(SPEC, 2, "fp32_split", capacity=33, windows=(2,))
    plain = TuneCase(SPEC, 2, "fp32_split", capacity=33)
    device = torch.device("cpu")
    assert GraphTrials(long, device, RULE).asked("verify", two) == {"verify64", "verify_prepass"}
    assert GraphTrials(plain, device, RULE).asked("verify", two) == set()
    assert GraphTrials(plain, device, RULE).asked("fold", two) == {"fold64"}


@interpreted
def test_the_time_of_windows_is_that_of_every_length(trials, monkeypatch):
    """Graphs by what they capture: of two layers, whose arms differ by a choice."""
    from replayinfer.kernels.launch.lookup import lookup as choice_of
    from replayinfer.tune import trials as module

    def capture(launch):
        rows = choice_of("verify", SPEC, "fp32_split", 2, torch.device("cpu")).rows
        return launch.__self__.window * rows

    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "interleaved", lambda graphs: graphs)
    monkeypatch.setattr(trials, "_world", lambda window, timed: trials._made[window, False])
    trials._worlds("verify")
    arms = {i: {**RULE, "verify": LaunchConfig(rows=rows)} for i, rows in enumerate((16, 32))}
    assert trials.time("verify", arms) == {0: 16 * (2 + 3) / 2, 1: 32 * (2 + 3) / 2}


@interpreted
def test_a_candidate_that_does_not_launch_says_why(trials, monkeypatch):
    def refuse(*args):
        raise RuntimeError("compiler\nout of resource: shared memory")

    trials.wrong("fold", RULE)
    monkeypatch.setattr(TritonBackend, "fold", refuse)
    found = trials.wrong("fold", {**RULE, **SOUND["fold"]})
    assert found == "it cannot be launched (out of resource: shared memory)"
    monkeypatch.setattr(TritonBackend, "fold", lambda *args: 1 / 0)
    assert "division by zero" in trials.wrong("fold", RULE)


@interpreted
def test_a_device_without_memory_is_no_fault_of_a_candidate(trials, monkeypatch):
    def starve(*args):
        raise RuntimeError("CUDA out of memory")

    trials.wrong("fold", RULE)
    monkeypatch.setattr(TritonBackend, "fold", starve)
    with pytest.raises(RuntimeError, match="memory"):
        trials.wrong("fold", RULE)


@interpreted
def test_histories_are_staggered_and_some_fold(trials):
    (world,) = trials._worlds("readout")
    assert world.plan.fold_count == 1
    assert sorted(world.plan.arrays.history.tolist()) == [0, 1]
    assert not world.direct_plan.fold_count
    for world in trials._worlds("verify"):  # 4 rows and 2, of which as many as fit stay
        assert sorted(world.plan.arrays.history.tolist()) == (
            [0, 2] if world.window == 2 else [0, 0]
        )


def _op(part: str) -> str:
    return "fused" if part == "readout" else part


def test_rounding_is_no_disagreement(rng):
    exact = torch.randn(4, 3, 5, generator=rng)
    for dtype in (torch.bfloat16, torch.float16):
        want = exact.to(dtype)
        ulp = want * (1 + torch.finfo(dtype).eps)
        assert disagreement({"y": ulp}, {"y": want}) is None
        assert disagreement({"y": want * (1 + 16 * torch.finfo(dtype).eps)}, {"y": want})
    assert disagreement({"y": exact * (1 + 1e-6)}, {"y": exact}) is None
    assert disagreement({"y": exact * (1 + 1e-4)}, {"y": exact})


def test_one_bad_sequence_among_many_is_seen(rng):
    exact = torch.randn(512, 8, generator=rng)
    got = exact.clone()
    got[77] *= 1.01
    assert "y are off by 1.0e-02" in disagreement({"y": got}, {"y": exact})
    got[77] = math.nan
    assert "off by inf" in disagreement({"y": got}, {"y": exact})


def test_zeros_and_what_is_dead_in_both_agree():
    zeros = torch.zeros(2, 3)
    assert disagreement({"y": zeros}, {"y": zeros}) is None
    assert disagreement({"y": zeros + 1e-30}, {"y": zeros})
    assert disagreement({"y": zeros[:0]}, {"y": zeros[:0]}) is None
