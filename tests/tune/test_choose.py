"""The choice logic with a machine of our own: what is tried, in which order, and what wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.kernels.launch import candidates as known
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import rule
from replayinfer.tune.choose import MARGIN, MOST_PROGRAMS, STAGES, choose, rules

SPEC = Mamba2Spec(heads=8, dim=64, state=128, groups=8)
OTHER = GDNSpec(heads=8, dim=64, state=128, key_heads=8)
KDA = KDASpec(heads=8, dim=64, state=128, key_heads=8)
A, B, C = (LaunchConfig(num_warps=8, rows=n) for n in (16, 32, 64))


class Machine:
    """Times by choice (1.0 unless told), and choices that are wrong; remembers every call."""

    def __init__(self, times=(), wrong=(), unused=()) -> None:
        self.times, self.bad = dict(times), dict(wrong)
        self.unused = set(unused)
        self.calls: list[tuple[str, str, dict]] = []

    def asked(self, part, choices):
        return {stage.op for stage in STAGES if stage.part == part} - self.unused

    def wrong(self, part, choices):
        self.calls.append(("wrong", part, dict(choices)))
        return next((why for c, why in self.bad.items() if c in choices.values()), None)

    def time(self, part, arms):
        micros = {}
        for place, choices in arms.items():
            self.calls.append(("time", part, dict(choices)))
            assert not any(c in self.bad for c in choices.values()), "a wrong choice was timed"
            ops = {s.op for s in STAGES if s.part == part}
            micros[place] = 100 * min(
                (self.times.get((op, c), 1.0) for op, c in choices.items() if op in ops)
            )
        return micros


@pytest.fixture(autouse=True)
def makers(monkeypatch):
    """Candidates of this test alone; by default two for a reading kernel and a fold."""
    table = {
        ("mamba2", "readout"): lambda spec, fmt: [A, B],
        ("mamba2", "fold"): lambda s, f: [A, C],
    }
    monkeypatch.setattr(known, "_MAKERS", table)
    return table


def test_the_fastest_of_each_operation_wins():
    machine = Machine({("readout", B): 0.5, ("fold", C): 0.9, ("fold", A): 1.1})
    found = choose(SPEC, "fp32", 4, machine)
    assert found.choices == {"readout": B, "fold": C}
    assert found.micros == {"readout": 50.0, "fold": pytest.approx(90.0)}
    assert found.rule_micros == {"readout": 100.0, "fold": 100.0}
    assert not found.dropped


@pytest.mark.parametrize("batch", [1, 4, 300])
def test_later_choices_are_made_with_the_earlier_ones(batch, makers):
    makers["mamba2", "prepass"] = lambda spec, fmt: [A, B]
    machine = Machine({("readout", A): 0.5, ("prepass", B): 0.4})
    choose(SPEC, "fp32", batch, machine)
    seen = []
    base = rules(SPEC, "fp32", batch)
    for kind, part, choices in machine.calls:
        changed = [s.op for s in STAGES if choices[s.op] != base[s.op] and s.op != "fused"]
        if kind == "time" and part == "readout":
            assert choices["fused"] is None, "the kernels beside the one were not launched"
            seen += [op for op in changed if op not in seen]
    assert seen == ["readout", "prepass"]
    last = machine.calls[-1][2]
    assert (last["readout"], last["prepass"]) == (A, B)


def test_the_rule_stays_unless_another_is_clearly_faster():
    near = Machine({("readout", A): 1 - MARGIN / 2, ("readout", B): 1 - MARGIN / 3})
    own = rule("readout", SPEC, "fp32", 4)
    assert choose(SPEC, "fp32", 4, near).choices["readout"] == own
    clear = Machine({("readout", A): 1 - 2 * MARGIN})
    assert choose(SPEC, "fp32", 4, clear).choices["readout"] == A


def test_a_wrong_candidate_is_dropped_loudly_and_never_timed():
    notes = []
    machine = Machine({("readout", A): 0.1, ("readout", B): 0.5}, {A: "outputs are off"})
    found = choose(SPEC, "fp32", 4, machine, note=lambda *note: notes.append(note))
    assert found.choices["readout"] == B
    assert [(d.op, d.choice, d.reason) for d in found.dropped] == [
        ("readout", A, "outputs are off"), ("fold", A, "outputs are off"),
    ]  # fmt: skip
    alarms = [text for text, alarm in notes if alarm]
    assert alarms[0] == "readout: dropped num_warps=8 rows=16: outputs are off"
    assert len(alarms) == 2


def test_where_every_candidate_is_wrong_nothing_is_chosen():
    own = rule("fold", SPEC, "fp32", 4)
    notes = []
    machine = Machine(wrong={A: "off", C: "off", own: "off"})
    found = choose(SPEC, "fp32", 4, machine, note=lambda *note: notes.append(note))
    assert "fold" not in found.choices
    assert ("fold: nothing is left to choose from", True) in notes


@pytest.mark.parametrize(("time", "wins"), [(0.3, True), (0.5, False), (0.9, False)])
def test_one_kernel_must_beat_the_others_at_their_best(time, wins, makers):
    makers["mamba2", "fused"] = lambda spec, fmt: [C]
    machine = Machine({("readout", B): 0.5, ("fused", C): time})
    found = choose(SPEC, "fp32", 4, machine)
    assert found.choices["readout"] == B
    assert found.choices["fused"] == (C if wins else None)
    assert found.micros["fused"] == pytest.approx(30.0 if wins else 50.0)


def test_one_kernel_is_not_tried_where_the_machine_is_full(makers):
    makers["mamba2", "fused"] = lambda spec, fmt: [C]
    batch = MOST_PROGRAMS // SPEC.heads
    full = Machine({("fused", C): 0.1})
    assert choose(SPEC, "fp32", batch, full).choices["fused"] == C
    found = choose(SPEC, "fp32", batch + 1, full)
    assert found.choices["fused"] is None
    assert "readout" in found.choices


def test_one_kernel_is_always_tried_where_it_is_the_only_one(makers):
    del makers["mamba2", "readout"]
    makers["mamba2", "fused"] = lambda spec, fmt: [C]
    found = choose(SPEC, "fp32", MOST_PROGRAMS, Machine({("fused", C): 2.0}))
    assert found.choices["fused"] == C


def test_what_no_launch_asks_for_is_not_tried(makers):
    makers["mamba2", "fold32"] = lambda spec, fmt: [B]
    machine = Machine(unused={"fold32"})
    assert set(choose(SPEC, "fp32", 4, machine).choices) == {"readout", "fold"}
    assert not any(choices["fold32"] == B for _, _, choices in machine.calls)


def test_an_operation_without_candidates_is_left_to_the_rule():
    found = choose(OTHER, "fp32", 4, Machine())
    assert found.choices == {}


def test_real_candidates(monkeypatch):
    """Every stage of every family is decided, whatever the shape and batch."""
    monkeypatch.undo()
    for spec in (SPEC, replace(SPEC, dim=80), OTHER, KDA):
        # A length takes one kernel of windows, and one fold.
        for long in ({"fold32", "fold64", "verify64"}, {"fold", "verify"}):
            for batch in (1, 256):
                found = choose(spec, "bf16", batch, Machine(unused=long))
                ops = {"readout", "prepass", "fused", "conv", "direct", "verify_prepass"}
                if spec.family == "gdn":
                    ops |= {"conv_readout", "conv_prepass"}
                if "fold" not in long:
                    assert set(found.choices) == ops | {"fold", "verify"}
                elif spec.family == "mamba2":
                    assert set(found.choices) == ops | {"fold64", "verify64"}
                else:
                    assert set(found.choices) == ops | {"fold32"}


def test_kernels_of_windows_are_chosen_one_after_the_other_and_apart(makers):
    makers["mamba2", "verify"] = makers["mamba2", "verify_prepass"] = lambda spec, fmt: [A, B]
    machine = Machine({("verify", A): 0.5, ("verify_prepass", B): 0.4}, unused={"verify64"})
    found = choose(SPEC, "fp32", 4, machine)
    assert (found.choices["verify"], found.choices["verify_prepass"]) == (A, B)
    assert found.micros["verify_prepass"] == pytest.approx(40.0)
    last = machine.calls[-1]
    assert (last[1], last[2]["verify"]) == ("verify", A)


def test_a_readout_that_convolves_is_chosen_after_the_one_kernel(makers):
    """By its own time, with the choice between one kernel and two in force."""
    for op in ("fused", "conv_readout", "conv_prepass"):
        makers["gdn", op] = lambda spec, fmt: [A, B]
    times = {("fused", A): 0.2, ("conv_readout", B): 0.5, ("conv_prepass", A): 0.4}
    machine = Machine(times)
    found = choose(OTHER, "fp32", 4, machine)
    assert found.choices == {"fused": A, "conv_readout": B, "conv_prepass": A}
    assert found.micros["conv_prepass"] == pytest.approx(40.0)
    calls = [choices for _, part, choices in machine.calls if part == "convolved"]
    assert calls
    assert all(choices["fused"] == A for choices in calls)
    assert calls[-1]["conv_readout"] == B


def test_without_windows_their_kernels_are_left_to_the_rule(makers):
    makers["mamba2", "verify"] = lambda spec, fmt: [A]
    machine = Machine(unused={"verify", "verify64", "verify_prepass"})
    assert set(choose(SPEC, "fp32", 4, machine).choices) == {"readout", "fold"}
    assert not any(part == "verify" for _, part, _ in machine.calls)
