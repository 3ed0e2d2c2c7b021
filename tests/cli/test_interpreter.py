"""On a machine without a GPU ``--backend triton`` runs in Triton's interpreter, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("typer")

from replayinfer.cli.interpreter import interpret_without_gpu

VARIABLE = "TRITON_INTERPRET"


@pytest.fixture
def fresh(monkeypatch):
    """No GPU, no Triton imported yet, and the variable not set."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in [m for m in sys.modules if m.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    return monkeypatch


def test_it_is_switched_on_and_said(fresh, capsys):
    interpret_without_gpu("triton")
    assert os.environ[VARIABLE] == "1"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("replayinfer: no CUDA device, so Triton's kernels run in its interpreter")
    interpret_without_gpu("triton")
    assert capsys.readouterr().err == ""  # once


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_other_backends_need_no_triton(fresh, capsys, backend):
    interpret_without_gpu(backend)
    assert VARIABLE not in os.environ
    assert capsys.readouterr().err == ""


def test_a_gpu_is_used(fresh, capsys):
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    interpret_without_gpu("triton")
    assert VARIABLE not in os.environ
    assert capsys.readouterr().err == ""


def test_it_is_too_late_once_triton_is_imported(fresh):
    fresh.setitem(sys.modules, "triton", object())
    interpret_without_gpu("triton")
    assert VARIABLE not in os.environ


def test_what_the_user_said_stands(fresh):
    fresh.setenv(VARIABLE, "0")
    interpret_without_gpu("triton")
    assert os.environ[VARIABLE] == "0"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_demo_decodes_with_tritons_kernels():
    pytest.importorskip("transformers")
    arguments = ["--model", "nemotron_h", "--backend", "triton", "--prompts", "1", "--tokens", "3"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    code = "import sys; from replayinfer.cli.app import run; sys.exit(run(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", *arguments, "--capacity", "1", "--json"],
        capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["backend"] == "triton"
    assert result["ok"]
    assert result["folds"] >= 1
    assert result["tokens_equal"] + result["ties"] == result["tokens"]
    assert done.stderr.startswith("replayinfer: no CUDA device, so Triton's kernels run in")
