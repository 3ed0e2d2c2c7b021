"""A report for people: tables by scope, a plot, and the extra that the plot needs."""

from __future__ import annotations

import sys

import pytest

from replayinfer import UnsupportedError
from replayinfer.bench import BenchReport
from replayinfer.bench.report import markdown_table, plot


def row(**changes):
    return {
        "family": "mamba2", "heads": 128, "groups": 8, "dim": 64, "state": 128, "scope": "ssm",
        "batch": 256, "window": 1, "format": "fp32_split", "state_dtype": "fp32", "capacity": 16,
        "policy": "full", "commit_rate": 1.0, "backend": "triton", "direct": False, "layers": 8,
        "ours_us": 180.0, "baseline": "sglang (tile 16, 1 warp)", "baseline_us": 563.0,
        "ratio": 3.128, "rounds_per_s": 1, "tokens_per_s": 1, "bytes": 700_000_000,
        "peers": {"sglang (tile 16, 1 warp)": 563.0},
    } | changes  # fmt: skip


@pytest.fixture
def report():
    return BenchReport(
        command="replayinfer bench --mixer", commit="abc1234", device="Some GPU", torch="2.11",
        triton="3.6", read_ceiling_tbps=4.57, date="2026-01-01T00:00:00+00:00",
        versions={"sglang": "0.5.23"},
        skipped={"flashinfer": "does not import: ModuleNotFoundError"},
        rows=[
            row(scope="mixer", ours_us=190.0),
            row(),
            row(batch=1, direct=True, ratio=None, baseline="none installed", baseline_us=None),
        ],
    )  # fmt: skip


def test_tables(report):
    text = markdown_table(report)
    assert text.startswith("`replayinfer bench --mixer`\n\nSome GPU, torch 2.11, triton 3.6")
    assert "Peers: sglang 0.5.23. Read ceiling 4.57 TB/s." in text
    ssm, mixer = text.split("The convolution and the step")
    assert "| mamba2 128 x 64 x 128, 8 | 256 | fp32_split | 16 | 180.0 | " in ssm
    assert "sglang (tile 16, 1 warp), fp32 | 563.0 | **3.13x** | 153.2 |" in ssm
    assert "| 1 | fp32_split | direct | 180.0 | none installed, fp32 | – | – |" in ssm
    assert "| 190.0 |" in mixer
    assert "| 190.0 |" not in ssm
    assert mixer.endswith("Not timed:\n\n- flashinfer: does not import: ModuleNotFoundError\n")


def test_one_scope_has_one_table(report):
    report.rows = report.rows[1:]
    report.skipped = {}
    text = markdown_table(report)
    assert text.count("| layer | batch |") == 1
    assert "Not timed" not in text


def test_windows_are_named_and_explained(report):
    report.rows.append(row(window=4, commit_rate=0.7, capacity=32))
    text = markdown_table(report)
    assert "| fp32_split | 32, T=4, r=0.7 | 180.0 |" in text
    assert "r: the probability that a draft is right" in text
    report.rows.pop()
    assert "T=4" not in markdown_table(report)
    assert "r: the probability" not in markdown_table(report)


def test_plot(report, tmp_path):
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_names_the_extra(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'replayinfer\[bench\]'"):
        plot(report, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
