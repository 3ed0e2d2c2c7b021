"""From outcomes to the entries of a table: keys, and up to where a direct step wins."""

from __future__ import annotations

import pytest

from replayinfer import Mamba2Spec, UnsupportedError
from replayinfer.kernels.launch import candidates as known
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.tune.run import TuneCase, TuneReport, collect, run_tune

SPEC = Mamba2Spec(heads=8, dim=64, state=128, groups=8)
A = LaunchConfig(num_warps=8)
KEY = "mamba2:8x64x128/8 fp32"


class Machine:
    """One time for every choice of a part."""

    def __init__(self, folds="fold", **micros) -> None:
        self.folds, self.micros = folds, micros

    def asked(self, part, choices):
        return {"readout", self.folds, "direct"}

    def wrong(self, part, choices):
        return None

    def time(self, part, arms):
        return dict.fromkeys(arms, self.micros[part])


@pytest.fixture
def report():
    return TuneReport("replayinfer tune", "NVIDIA Some", "2", "3", "0", "today")


@pytest.fixture(autouse=True)
def makers(monkeypatch):
    ops = ("readout", "fold", "fold32", "direct")
    monkeypatch.setattr(known, "_MAKERS", {("mamba2", op): lambda s, f: [A] for op in ops})


def tuned(report, machines, capacity=16):
    cases = [TuneCase(SPEC, batch, "fp32", capacity) for batch in machines]
    lines = []
    collect(report, cases, lambda case: machines[case.batch], lambda *line: lines.append(line))
    return lines


def test_every_choice_is_an_entry(report):
    lines = tuned(report, {8: Machine(readout=2.0, fold=1.0, direct=9.0)})
    assert {(m.key, m.batch) for m in report.measured} == {
        (f"{op} {KEY}", 8) for op in ("readout", "fold", "direct")
    }
    assert [(case.batch, alarm) for case, _, alarm in lines] == [(8, False)] * 3
    assert report.header()["date"] == "today"


@pytest.mark.parametrize(
    ("wins", "limit"), [("", 0), ("1", 1), ("1 4 16", 16), ("1 16", 1), ("4 16", 0)]
)
def test_direct_steps_up_to_the_first_batch_at_which_replay_wins(wins, limit, report):
    wins = {int(b) for b in wins.split()}
    tuned(report, {
        b: Machine(readout=10.0, fold=0.0, direct=9.0 if b in wins else 11.0) for b in (16, 1, 4)
    })  # fmt: skip
    assert report.direct_up_to == {f"direct {KEY}": limit}


@pytest.mark.parametrize(
    ("batch", "capacity", "fold", "limit"),
    [
        (4, 16, 7.9, 0),  # one fold every fourth step: 10 + 7.9 / 4 < 12
        (4, 16, 8.1, 4),
        (32, 16, 1.9, 0),  # two folds a step, both in the list that was timed
        (32, 16, 2.1, 32),
        (24, 16, 2.6, 0),  # three folds in two steps, two in the list
        (24, 16, 2.7, 24),
    ],
)
def test_a_step_pays_its_share_of_the_folds(batch, capacity, fold, limit, report):
    tuned(report, {batch: Machine(readout=10.0, fold=fold, direct=12.0)}, capacity)
    assert report.direct_up_to == {f"direct {KEY}": limit}


@pytest.mark.parametrize(("fold", "limit"), [(7.9, 0), (8.1, 4)])
def test_the_fold_of_many_rows_counts_as_well(fold, limit, report):
    tuned(report, {4: Machine("fold32", readout=10.0, fold=fold, direct=12.0)})
    assert report.direct_up_to == {f"direct {KEY}": limit}


def test_nothing_is_measured_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device: got no CUDA device; allowed a GPU"):
        run_tune([TuneCase(SPEC, 1)], command="", version="")
