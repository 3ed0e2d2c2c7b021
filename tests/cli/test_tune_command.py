"""``replayinfer tune`` as a user runs it, with the measuring itself replaced."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("typer", reason="the cli extra is not installed")
pytest.importorskip("rich", reason="the cli extra is not installed")

from replayinfer.cli import tune as command
from replayinfer.cli.app import run
from replayinfer.cli.options import one_spec
from replayinfer.cost import best_capacity
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.table import read_table, shape_key
from replayinfer.tune import Outcome, TuneReport
from replayinfer.tune.choose import Dropped
from replayinfer.tune.run import Measured

CHOICE, BAD = LaunchConfig(num_warps=1, rows=8), LaunchConfig(num_warps=2, rows=8)


@pytest.fixture
def tune(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # rich wraps to the terminal's width

    def call(*arguments):
        status = run(["tune", *map(str, arguments)])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that finds the same choice for every case; returns the cases it was given."""
    seen = []

    def measure(cases, *, command, version, progress):
        report = TuneReport(command, "NVIDIA Some", "2", "3", version, "today")
        for case in cases:
            seen.append(case)
            progress(case, "fold: num_warps=1 rows=8, 1.0 us", False)
            progress(case, "fold: dropped num_warps=2 rows=8: off", True)
            key = shape_key("fold", case.spec, case.format)
            report.measured.append(Measured(key, case.batch, CHOICE))
            dropped = [Dropped("fold", BAD, "states are off")]
            outcome = Outcome({"fold": CHOICE}, {"fold": 1.0}, {"fold": 1.5}, dropped)
            report.outcomes.append((case, outcome))
        return report

    monkeypatch.setattr(command, "run_tune", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA Some")
    return seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tune, tmp_path):
    status, out, err = tune("--out", tmp_path / "t.json")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "device: got no CUDA device; allowed a GPU" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "got 'no-such-model'; allowed a config.json"),
        (["--family", "gdn"], "family: got 'gdn' for nemotron-3-super"),
        (["--batch", "0"], "batch: got '0'; allowed integers >= 1"),
        (["--batch", "1,x"], "batch: got '1,x'"),
        (["--format", "fp8"], "format: got 'fp8'; allowed fp32"),
        (["--capacity", "0"], "capacity: got '0'; allowed integers >= 1"),
        (["--capacity", "8,16"], "capacity: got '8,16'; allowed one integer or auto"),
        (["--window", "0"], "window: got '0'; allowed integers >= 1"),
        (["--capacity", "3"], "capacity: got 3 for windows of 4; allowed at least the window"),
        (["--tp", "3"], "size: got 3; allowed a divisor of heads=128"),
        (["--capacity", "many"], "capacity"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tune, gpu):
    status, out, err = tune(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert not gpu


def test_the_length_is_the_one_that_bench_takes(tune, gpu):
    status, _, _ = tune("--batch", "1", "--format", "fp32,bf16", "--model", "qwen3-next")
    assert status == 0
    spec = one_spec("qwen3-next", None)
    assert [c.capacity for c in gpu] == [best_capacity(spec, f) for f in ("fp32", "bf16")]
    assert [c.window_capacity for c in gpu] == [
        best_capacity(spec, f, window=4, commit_rate=0.7) for f in ("fp32", "bf16")
    ]


def test_windows_are_those_that_are_named(tune, gpu):
    short = ("--batch", "1", "--format", "fp32", "--capacity", 16)
    for arguments in ((), ("--window", "8,1,2"), ("--window", 1)):
        assert tune(*short, *arguments)[0] == 0
    assert [c.windows for c in gpu] == [(4,), (8, 2), ()]
    assert [c.window_capacity for c in gpu] == [16, 16, 16]


def test_without_a_file_the_table_is_all_of_the_output(tune, gpu):
    status, out, err = tune("--batch", "1,8", "--format", "bf16", "--capacity", 4, "--tp", 2)
    assert status == 0
    content = json.loads(out)
    assert content["choices"] == {
        "fold mamba2:64x64x128/4 bf16": [[b, {"num_warps": 1, "rows": 8}] for b in (1, 8)]
    }
    assert [(c.batch, c.capacity, c.spec.heads) for c in gpu] == [(1, 4, 64), (8, 4, 64)]
    assert "save it as nvidia_some.json" in err
    assert "REPLAYINFER_LAUNCH_TABLES=" in err
    assert "[2/2] batch 8, bf16: fold: dropped num_warps=2 rows=8: off" in err
    assert "dropped at batch 1, bf16: fold num_warps=2 rows=8: states are off" in err


@pytest.mark.parametrize("name", ["own.json", ".", "new"])
def test_a_file_or_a_folder_is_merged_into(name, tune, gpu, tmp_path):
    path = tmp_path / name
    path = path if path.suffix == ".json" else path / "nvidia_some.json"
    for batch in (8, 1):
        status, out, err = tune("--batch", batch, "--format", "fp32", "--out", tmp_path / name)
        assert (status, out) == (0, "")
        assert f"REPLAYINFER_LAUNCH_TABLES={path.parent}" in err.replace("\n", "")
    ((_, steps),) = read_table(path).choices.items()
    assert steps == [(1, CHOICE), (8, CHOICE)]
    assert len(json.loads(path.read_text())["runs"]) == 2


@pytest.mark.parametrize("text", ["{", '{"device": "NVIDIA Other", "choices": {}}'])
def test_a_file_that_cannot_take_it_is_refused_before_anything_is_measured(
    text, tune, gpu, tmp_path
):
    (tmp_path / "own.json").write_text(text)
    status, out, err = tune("--batch", 1, "--out", tmp_path / "own.json")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert not gpu
    assert (tmp_path / "own.json").read_text() == text


def test_show_says_what_is_launched_and_needs_no_gpu(tune):
    status, out, err = tune("--show", "--batch", "1,256", "--format", "fp32_split")
    assert (status, err) == (0, "")
    for text in ("fused", "_fold_kernel", "_conv_update_kernel", "materialize", "BLOCK_D=64"):
        assert text in out
    status, out, _ = tune("--show", "--model", "qwen3-next", "--batch", 64, "--format", "bf16")
    assert status == 0
    assert "_readout_kernel" in out
    assert "_verify_kernel" in out
    assert out.count("_conv_update_kernel") == 2  # of one token, and of windows
    status, out, _ = tune("--show", "--batch", 1, "--format", "bf16", "--window", 1)
    assert status == 0
    assert "_readout_kernel" in out or "_fused_kernel" in out
    assert "_verify_kernel" not in out
