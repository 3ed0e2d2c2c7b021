"""Where a launch choice comes from: a tuner's, a user's folder, what is shipped, the rule."""

from __future__ import annotations

import json

import pytest
import torch

from replayinfer import GDNSpec, InputError, KDASpec, Mamba2Spec
from replayinfer.backends.triton import TritonBackend
from replayinfer.env import launch_tables
from replayinfer.kernels.launch import lookup as launch
from replayinfer.kernels.launch.candidates import candidates
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.table import file_name, shape_key
from replayinfer.tune.choose import STAGES

SPEC = Mamba2Spec(heads=8, dim=64, state=128, groups=8)
CUDA = torch.device("cuda", 0)
VARIABLE = "REPLAYINFER_LAUNCH_TABLES"


@pytest.fixture
def device(monkeypatch):
    """A GPU whose shipped table has a fold and a direct limit, for as long as the test lasts."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Some-1")
    yield CUDA
    monkeypatch.delenv(VARIABLE, raising=False)
    launch.use_tables(None)


@pytest.fixture
def shipped(tmp_path, monkeypatch, device):
    launch.use_tables(tmp_path)  # whatever was read before is forgotten when this is undone
    launch.use_tables(None)
    folder = tmp_path / "shipped"
    write(folder, {"fold": [[8, {"rows": 1}], [64, {"rows": 2}]], "conv": [[8, {"rows": 3}]]}, 4)
    monkeypatch.setattr(launch, "_SHIPPED", folder)
    monkeypatch.setattr(launch, "_folders", [folder])
    return folder


def write(folder, choices, direct=None) -> None:
    folder.mkdir(exist_ok=True)
    content = {"choices": {shape_key(op, SPEC, "fp32"): c for op, c in choices.items()}}
    if direct is not None:
        content["direct_up_to"] = {shape_key("direct", SPEC, "fp32"): direct}
    (folder / "nvidia_some_1.json").write_text(json.dumps(content))


def rows(op, batch, device=CUDA) -> int:
    return launch.lookup(op, SPEC, "fp32", batch, device).rows


def test_the_users_table_comes_first_key_by_key(shipped, tmp_path, monkeypatch):
    assert [rows("fold", b) for b in (1, 9, 100)] == [1, 2, 2]
    assert launch.prefers_direct(SPEC, "fp32", 4, CUDA)
    write(tmp_path / "mine", {"fold": [[32, {"rows": 7}]]}, 0)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    TritonBackend()
    assert [rows("fold", b) for b in (1, 9, 100)] == [7, 7, 7]
    assert rows("conv", 1) == 3
    assert not launch.prefers_direct(SPEC, "fp32", 1, CUDA)
    monkeypatch.delenv(VARIABLE)
    TritonBackend()
    assert rows("fold", 1) == 1


def test_a_folder_without_a_file_for_this_device_changes_nothing(shipped, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "nvidia_other.json").write_text("not even JSON")
    monkeypatch.setenv(VARIABLE, f" {tmp_path / 'mine'} ")
    TritonBackend()
    assert rows("fold", 1) == 1


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    for call in (launch_tables, TritonBackend):
        with pytest.raises(InputError, match=f"{VARIABLE}: got .*none"):
            call()
    monkeypatch.setenv(VARIABLE, "")
    assert launch_tables() is None


def test_a_broken_table_is_refused_where_it_is_needed(shipped, tmp_path):
    write(tmp_path / "mine", {"fold": [[8, {"rows": "many"}]]})
    launch.use_tables(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"launch table: got .*nvidia_some_1\.json"):
        rows("fold", 1)
    assert rows("fold", 1, torch.device("cpu")) == launch.rule("fold", SPEC, "fp32", 1).rows


def test_what_a_tuner_forces_comes_before_everything(shipped):
    own = LaunchConfig(rows=99)
    with launch.forced(fold=own, fused=None):
        with launch.forced(fold=LaunchConfig(rows=98)):
            assert rows("fold", 1) == 98
            assert launch.lookup("fused", SPEC, "fp32", 1, CUDA) is None
        assert rows("fold", 1) == 99
        assert rows("conv", 1) == 3
    assert rows("fold", 1) == 1
    assert launch.lookup("fused", SPEC, "fp32", 1, CUDA) is not None


def test_families_of_one_shape_have_keys_of_their_own():
    sizes = {"heads": 8, "dim": 64, "state": 128}
    specs = [SPEC, GDNSpec(key_heads=8, **sizes), KDASpec(key_heads=8, **sizes)]
    keys = {shape_key("fold", spec, "fp32") for spec in specs}
    assert keys == {f"fold {family}:8x64x128/8 fp32" for family in ("mamba2", "gdn", "kda")}
    assert shape_key("fold", SPEC.shard(0, 2), "fp32") == "fold mamba2:4x64x128/4 fp32"


def test_file_names_are_plain():
    assert file_name("NVIDIA H200") == "nvidia_h200.json"
    assert file_name("NVIDIA A100-SXM4-80GB") == "nvidia_a100_sxm4_80gb.json"


@pytest.mark.parametrize("fmt", ["fp32", "fp32_split", "bf16", "fp16"])
@pytest.mark.parametrize("dim", [20, 64, 80])
def test_candidates_are_choices_each_once(dim, fmt):
    spec = Mamba2Spec(heads=8, dim=dim, state=128)
    ops = ("readout", "fused", "fold", "conv", "direct", "verify", "verify64", "verify_prepass")
    for op in ops:
        found = candidates(op, spec, fmt)
        assert len(found) == len(set(found)) > 1
        for choice in found:
            assert isinstance(choice, LaunchConfig)
            assert choice.num_warps in (1, 2, 4, 8)
            assert choice.rows & (choice.rows - 1) == choice.columns & (choice.columns - 1) == 0
    assert candidates("surprise", spec, fmt) == []


@pytest.mark.parametrize("fmt", ["fp32", "fp32_split", "bf16"])
@pytest.mark.parametrize("dim", [80, 128])
def test_a_readout_that_convolves_has_candidates_in_gdn_alone(dim, fmt):
    sizes = {"heads": 8, "dim": dim, "state": 128}
    for op in ("conv_readout", "conv_prepass"):
        found = candidates(op, GDNSpec(key_heads=4, **sizes), fmt)
        assert len(found) == len(set(found)) > 1
        assert not candidates(op, KDASpec(key_heads=8, **sizes), fmt)
        assert not candidates(op, Mamba2Spec(**sizes), fmt)


@pytest.mark.parametrize(("fmt", "size"), [("fp32", 4), ("fp32_split", 2), ("bf16", 2)])
def test_the_rule_of_a_readout_that_convolves(fmt, size):
    """8 KB of two bytes or 16 of four, in any batch; four warps while programs are few."""
    spec = GDNSpec(heads=32, dim=128, state=128, key_heads=16)
    rows = 4096 // spec.state
    assert rows * spec.state * size == {2: 8192, 4: 16384}[size]
    for batch, warps in ((1, 4), (8, 4), (9, 2), (512, 2)):
        own = launch.rule("conv_readout", spec, fmt, batch)
        assert own == LaunchConfig(num_warps=1, rows=rows)
        assert launch.rule("conv_prepass", spec, fmt, batch) == LaunchConfig(num_warps=warps)


def test_two_warps_for_what_their_registers_hold():
    """A key head's channels; `test_offline` compiles both sides of it."""
    for ratio, warps in ((2, 2), (6, 2), (8, 4)):
        spec = GDNSpec(heads=4 * ratio, dim=256, state=256, key_heads=4)
        assert launch.rule("conv_prepass", spec, "bf16", 512) == LaunchConfig(num_warps=warps)


def test_every_operation_with_candidates_is_tuned():
    from replayinfer.kernels.launch.candidates import _MAKERS

    # The tuner's windows are of one token, so that these are never asked.
    windows = {"verify", "verify64", "verify_prepass"}
    assert {op for _, op in _MAKERS} - windows <= {stage.op for stage in STAGES}
