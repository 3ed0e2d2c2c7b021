"""``replayinfer advise`` as a user calls it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from replayinfer import StatePool
from replayinfer.cli.app import run
from replayinfer.spec.presets import PRESETS

from ..spec_hf.conftest import SMALL, Peer


@pytest.fixture
def advise(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        return run(["advise", *arguments]), *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "qwen3.5-4b"])
def test_every_name_is_advised(advise, name):
    status, out, _ = advise(name, "--batch", "1,256", "--json")
    assert status == 0
    found = json.loads(out)
    assert [row["batch"] for row in found["rows"]] == [1, 256]
    assert found["rows"][1]["gain"] > 1.3
    assert found["measured"] is True


@pytest.mark.parametrize("model_type", SMALL)
def test_every_family_of_configs_is_advised(advise, model_type, tmp_path):
    """In small, so that every formula is gone through; with the memory of the real pool."""
    import torch

    peer = Peer(model_type)
    config = peer.config(**peer.small)
    config.save_pretrained(tmp_path)
    status, out, err = advise(
        str(tmp_path), "--batch", "4", "--json", "--gpu", "h100", "--drafts", "0,2",
        "--format", "bf16", "--capacity", "8",
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(out)
    assert len(found["rows"]) == 2
    from replayinfer import read_config

    layers = read_config(str(tmp_path))
    pool = StatePool(
        layers.spec, layers.ssm, 1, capacity=8, max_window=3, format="bf16",
        dtype=layers.dtype or torch.bfloat16,
    )  # fmt: skip
    assert found["sequence_bytes"] == pool.capacity_report().sequence_bytes


def test_a_table_and_a_plot(advise, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "advice.png"
    status, out, _ = advise(
        "kimi-linear", "--gpu", "b200", "--batch", "1,64", "--context", "1024,8192", "--drafts",
        "0,3", "--out", str(file),
    )  # fmt: skip
    assert status == 0
    assert file.stat().st_size > 1000
    text = " ".join(out.split())
    for part in (
        "fp32_split *", "SSM share", "standard layer =", "replay layer =", "sequences =",
        "does not pay", "not measured; 8 TB/s of its data sheet", "none was calibrated",
    ):  # fmt: skip
        assert part in text


def test_tensor_parallel_figures_are_a_ranks(advise):
    _, out, _ = advise("nemotron-3-super", "--tp", "4", "--batch", "64", "--json")
    found = json.loads(out)
    assert found["spec"] == {"family": "mamba2", "heads": 32, "dim": 64, "state": 128, "groups": 2}
    assert found["tp"] == 4


def test_what_is_missing_is_named_and_can_be_given(advise):
    status, out, err = advise("qwen3.5-4b")
    assert status == 2
    assert not out
    assert "config: got none of intermediate_size; allowed" in err
    assert "--weights-gb" in err
    status, out, _ = advise("qwen3.5-4b", "--weights-gb", "8.4", "--batch", "1", "--json")
    assert status == 0
    assert json.loads(out)["rows"][0]["weights_us"] == pytest.approx(8.4e9 / 4.5e6, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "gpu: got 'tpu'"),
        (["--batch", "0"], "batch: got '0'"),
        (["--context", "x"], "context: got 'x'"),
        (["--drafts", "-1"], "drafts: got '-1'"),
        (["--drafts", "200"], "window: got 201"),
        (["--commit-rate", "2"], "commit_rate: got 2"),
        (["--format", "int8"], "format: got 'int8'"),
        (["--capacity", "2", "--drafts", "3"], "capacity: got 2"),
        (["--weight-bits", "0"], "weight_bits: got 0"),
        (["--weights-gb", "-1"], "weights_gb: got -1"),
        (["--tp", "0"], "tp: got 0"),
        (["--tp", "3"], "size: got 3"),
    ],
)
def test_what_is_refused(advise, arguments, message):
    status, out, err = advise("nemotron-3-super", *arguments)
    assert status == 2
    assert not out
    assert message in err


def test_a_config_that_is_not_there(advise):
    status, _, err = advise("/no/such")
    assert status == 2
    assert "config: got '/no/such'" in err
