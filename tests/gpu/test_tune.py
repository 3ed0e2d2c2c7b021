"""A tuner run on a GPU, with few candidates: an entry per operation, and wrong ones dropped."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import Mamba2Spec
from replayinfer.kernels.launch import candidates as known
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.table import read_table
from replayinfer.tune import TuneCase, merge_table, run_tune, write_content

pytestmark = pytest.mark.gpu
SPEC = Mamba2Spec(heads=8, dim=64, state=128, groups=2)


def test_a_run_measures_every_operation(monkeypatch, tmp_path):
    few = {
        ("mamba2", "readout"): [LaunchConfig(num_warps=1, rows=16)],
        ("mamba2", "fused"): [LaunchConfig(num_warps=4, rows=16)],
        ("mamba2", "fold"): [
            LaunchConfig(num_warps=4, rows=64, columns=64),
            LaunchConfig(num_warps=3),  # no power of two: it does not compile
        ],
        ("mamba2", "conv"): [LaunchConfig(num_warps=4, rows=256)],
        ("mamba2", "direct"): [LaunchConfig(num_warps=2, rows=16)],
        ("mamba2", "verify"): [LaunchConfig(num_warps=1, rows=16)],
        ("mamba2", "verify_prepass"): [LaunchConfig(num_warps=1, rows=16)],
    }
    monkeypatch.setattr(
        known, "_MAKERS", {key: lambda s, f, c=choices: c for key, choices in few.items()}
    )
    cases = [TuneCase(SPEC, b, "fp32_split", capacity=4, windows=(4,)) for b in (1, 6)]
    report = run_tune(cases, command="test", version="0")
    assert report.device == torch.cuda.get_device_name()
    ops = {"readout", "fused", "fold", "conv", "direct", "verify", "verify_prepass"}
    for _, outcome in report.outcomes:
        assert set(outcome.choices) == ops
        assert all(0 < micros < 1e4 for micros in outcome.micros.values())
    assert [(d.op, d.choice.num_warps) for _, d in report.dropped] == [("fold", 3)] * 2
    assert len(report.direct_up_to) == 1
    write_content(tmp_path / "t.json", merge_table(None, report))
    assert {key.split()[0] for key in read_table(tmp_path / "t.json").choices} == ops
