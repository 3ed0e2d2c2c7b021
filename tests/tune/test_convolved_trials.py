"""Choices of a readout that convolves: tried in Triton's interpreter, written, and looked up."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.conv.shift import ShiftedWindows
from replayinfer.kernels.launch import candidates as known
from replayinfer.kernels.launch import lookup as launch
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.dry import dry_launches
from replayinfer.kernels.launch.table import file_name
from replayinfer.testing import assert_bitwise_equal
from replayinfer.tune.choose import rules
from replayinfer.tune.run import TuneCase, TuneReport, collect
from replayinfer.tune.table import merge_table, write_content
from replayinfer.tune.trials import GraphTrials

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
SPEC = GDNSpec(heads=2, dim=8, state=16, key_heads=1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ONE = LaunchConfig(num_warps=1, rows=4)
OPS = {"conv_readout", "conv_prepass"}


def make(spec=SPEC, kind=GraphTrials) -> GraphTrials:
    case = TuneCase(spec, 2, "fp32_split", capacity=2)
    return kind(case, CPU, rules(spec, "fp32_split", 2))


@pytest.fixture(scope="module")
def trials():
    return make()


RULE = {**rules(SPEC, "fp32_split", 2), "fused": None}
SOUND = {**RULE, "conv_readout": ONE, "conv_prepass": LaunchConfig(num_warps=1)}


@interpreted
def test_it_is_asked_for_where_a_step_has_it(trials):
    assert trials.asked("convolved", RULE) >= OPS
    assert not OPS & trials.asked("convolved", {**RULE, "fused": ONE})
    for part in ("readout", "conv", "fold", "direct"):
        assert not OPS & trials.asked(part, RULE)


@interpreted
@pytest.mark.parametrize(
    "spec",
    [
        Mamba2Spec(heads=1, dim=8, state=16),
        KDASpec(heads=2, dim=8, state=16, key_heads=2),
        replace(SPEC, dim=7),
    ],
    ids=lambda spec: f"{spec.family}-{spec.dim}",
)
def test_what_no_step_has_costs_nothing(spec):
    trials = make(spec)
    assert not trials.asked("convolved", {**rules(spec, "fp32_split", 2), "fused": None}) & OPS
    (world,) = trials._worlds("convolved")
    assert not world.shifted


@interpreted
def test_it_gets_what_an_engine_gives(trials):
    (world,) = trials._worlds("convolved")
    assert len(world.shifted) == world.layers
    for conv in world.shifted:
        assert ShiftedWindows(conv.x, conv.states, conv.slots, conv.weight, None, True).packed
        assert conv.states.shape == (2, SPEC.conv_channels, 3)
        assert len(set(conv.slots.tolist())) == 2


@interpreted
def test_a_sound_candidate_agrees_and_nothing_has_moved(trials):
    (world,) = trials._worlds("convolved")
    kept = {f"windows {i}": conv.states for i, conv in enumerate(world.shifted)}
    kept |= {"checkpoints": world.pool.checkpoints.storage, **world.pool.inputs.fields}
    before = {name: tensor.clone() for name, tensor in kept.items()}
    assert trials.wrong("convolved", SOUND) is None
    for name, tensor in kept.items():
        assert_bitwise_equal(tensor, before[name], name)


@interpreted
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda pool, conv, out: out[0].mul_(1.1), "outputs of layer 0 are off"),
        (lambda pool, conv, out: out[1, 0, 1, 3:].fill_(math.nan), "outputs of layer 0 are off"),
        (lambda pool, conv, out: pool.inputs.fields["u"][0].mul_(1.1), "rows of u are off"),
        (lambda pool, conv, out: conv.states[1].mul_(1.1), "windows of layer 0 are off"),
    ],
)
def test_a_wrong_candidate_is_found(spoil, reason, trials, monkeypatch):
    run = TritonBackend.convolved_readout

    def spoiled(pool, plan, layer, conv, gates, out):
        run(pool, plan, layer, conv, gates, out)
        choice = launch.lookup("conv_readout", SPEC, "fp32_split", 2, CPU)
        if layer == 0 and choice == ONE:
            spoil(pool, conv, out)

    monkeypatch.setattr(TritonBackend, "convolved_readout", staticmethod(spoiled))
    assert reason in trials.wrong("convolved", SOUND)
    assert trials.wrong("convolved", RULE) is None


class Timed(GraphTrials):
    """Results as they are; the fewer choices differ from `best`, the less time it takes."""

    best = SOUND

    def time(self, part, arms):
        return {
            p: 1.0 + sum(arm[op] != c for op, c in self.best.items()) for p, arm in arms.items()
        }


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Tuned")
    yield
    launch.use_tables(None)


@pytest.fixture
def few(monkeypatch):
    """One candidate of each operation, besides the rule's choice."""
    found = {**SOUND, "readout": RULE["readout"], "fused": ONE}
    makers = {("gdn", op): lambda s, f, op=op: [found[op]] for op in (*OPS, "readout", "fused")}
    monkeypatch.setattr(known, "_MAKERS", makers)


def tuned(folder, fused) -> TuneReport:
    """Tune batch 2, where `fused` is the fastest answer to one kernel or two; use the table."""
    report = TuneReport("replayinfer tune", "NVIDIA Tuned", "2", "3", "0", "today")
    trials = make(kind=Timed)
    trials.best = {**SOUND, "fused": fused}
    collect(report, [trials._case], lambda case: trials, lambda *line: None)
    assert not report.dropped
    write_content(folder / file_name("NVIDIA Tuned"), merge_table(None, report))
    launch.use_tables(folder)
    return report


@interpreted
def test_the_table_that_comes_out_is_used(tmp_path, tables, few, trials, monkeypatch):
    """By the lookup, and so by the launches."""
    before = {op: launch.lookup(op, SPEC, "fp32_split", 2, CUDA) for op in OPS}
    assert before == {op: RULE[op] for op in OPS}
    report = tuned(tmp_path, None)
    assert {entry.key.split()[0] for entry in report.measured} == {"readout", "fused", *OPS}
    for batch in (1, 2, 300):
        assert launch.lookup("fused", SPEC, "fp32_split", batch, CUDA) is None
        for op in OPS:
            assert launch.lookup(op, SPEC, "fp32_split", batch, CUDA) == SOUND[op] != before[op]

    def on_a_gpu(pool, op, bucket):
        return launch.lookup(op, pool.spec, pool.format.name, bucket, CUDA)

    (world,) = trials._worlds("convolved")
    for module in ("replayinfer.backends.triton", "replayinfer.backends.triton.delta"):
        monkeypatch.setattr(f"{module}.config", on_a_gpu)
    assert world.has("convolved")
    with dry_launches() as launches:
        world.launches["convolved"]()
    assert [n.options["num_warps"] for n in launches] == [1, 1] * world.layers
    assert {n.constants["BLOCK_D"] for n in launches[1::2]} == {4}


@interpreted
def test_where_one_kernel_wins_there_is_no_entry(tmp_path, tables, few):
    report = tuned(tmp_path, ONE)
    assert {entry.key.split()[0] for entry in report.measured} == {"readout", "fused"}
    assert launch.lookup("fused", SPEC, "fp32_split", 2, CUDA) == ONE
