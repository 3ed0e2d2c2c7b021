"""``replayinfer simulate`` as a user calls it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from replayinfer.cli.app import run

KEYS = {"requests", "steps", "p50_us", "p99_us", "policy", "exhausted", "peak_pages"}


@pytest.fixture
def simulate(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        return run(["simulate", *arguments]), *capsys.readouterr()

    return call


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_an_object_a_policy_and_nothing_else(simulate):
    status, out, _ = simulate(
        "--requests", "600", "--batch", "32", "--output-mean", "24", "--json",
        "--policy", "full,spread,deadline,deadline:7",
    )  # fmt: skip
    assert status == 0
    found = objects(out)
    # Of deadline alone, the budget is twice ceil(32 / 32).
    assert [o["policy"] for o in found] == ["full", "spread", "deadline:2", "deadline:7"]
    for o in found:
        assert set(o) >= KEYS
        assert (o["requests"], o["exhausted"], o["trace"]) == (600, 0, "backlogged")
        assert (o["layers"], o["gpu"], o["format"], o["capacity"]) == (40, "h200", "fp32_split", 32)


def test_a_table_and_a_plot(simulate, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plots" / "steps.png"
    status, out, _ = simulate(
        "--requests", "100", "--batch", "8", "--gpu", "b200", "--out", str(file), "--family",
        "gdn", "--shape", "32x128x128/16", "--capacity", "16", "--arrivals", "synchronized",
    )  # fmt: skip
    assert status == 0
    assert file.stat().st_size > 1000
    assert "p99 / p50" in out
    assert "L = 16" in out
    assert "not measured; 8 TB/s of its data sheet" in " ".join(out.split())


def test_a_trace_of_ones_own(simulate, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("arrival,prompt,output\n" + "".join(f"{i / 1000},5,9\n" for i in range(50)))
    status, out, _ = simulate("--trace", str(file), "--batch", "4", "--policy", "full", "--json")
    assert status == 0
    (found,) = objects(out)
    assert (found["trace"], found["requests"], found["tokens"]) == ("mine.csv", 50, 450)


def test_a_budget_in_bytes(simulate):
    # A fold of 40 layers: 40 x (2 x 4 MiB + 32 x 18944 B) = 360 MB.
    options = ("--requests", "20", "--batch", "4", "--policy", "deadline", "--json")
    _, out, _ = simulate(*options, "--fold-budget", "1GB")
    assert objects(out)[0]["policy"] == "deadline:2"
    status, _, err = simulate(*options, "--fold-budget", "100MiB")
    assert status == 2
    assert "budget: got 104857600 B; allowed at least one fold, 40 layers x" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "ful"], "policy: got 'ful'; allowed full, spread, deadline:FOLDS"),
        (["--gpu", "tpu"], "gpu: got 'tpu'"),
        (["--format", "int8"], "format: got 'int8'"),
        (["--capacity", "none"], "capacity: got 'none'"),
        (["--capacity", "2", "--window", "4"], "capacity: got '2'; allowed auto or an integer"),
        (["--arrivals", "x"], "arrivals: got 'x'"),
        (["--batch", "0"], "batch: got 0"),
        (["--window", "0"], "window: got 0"),
        (["--fold-budget", "much"], "fold_budget: got 'much'"),
        (["--shape", "1x2"], "shape: got '1x2'"),
        (["--trace", "/no/such.csv"], "trace: got '/no/such.csv'"),
        (["--model", "/no/such"], "config: got '/no/such'"),
    ],
)
def test_what_is_refused(simulate, arguments, message):
    status, out, err = simulate("--requests", "5", *arguments)
    assert status == 2
    assert not out
    assert message in err
