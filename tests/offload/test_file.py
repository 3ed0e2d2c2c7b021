"""Snapshots in files: whole or not at all, and read back bit for bit."""

import json
import math
import sys

import pytest
import torch

from replayinfer import InputError, Mamba2Spec, SequenceSnapshot, StatePool, UnsupportedError
from replayinfer.offload import load_sequence, save_sequence
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import Unchanged
from ..transfer.rig import CASES, SPECS, Rig, assert_equal_outputs, assert_same

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import save_file  # noqa: E402

KEY = "replayinfer_sequence"


@pytest.fixture
def rig(rng):
    return Rig(SPECS["gdn"], rng, format="fp32_split", restore="any")


@pytest.fixture
def snap(rig, rng):
    (seq,) = rig.pool.alloc()
    rig.decode(seq, rig.draw(10), window=2)
    assert rig.pool.history(seq) == 4
    return rig.pool.export(seq)


def same_snapshot(got, want):
    assert dict(got.header) == dict(want.header)
    assert got.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        assert_bitwise_equal(got.tensors[name], tensor, name)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("spec", "format"), CASES)
def test_through_a_file(spec, format, tokens, tmp_path, rng):
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    rig = Rig(spec, rng, format=format, dtype=dtype, layers=(4,))
    (seq,) = rig.pool.alloc()
    for _ in range(tokens):
        rig.step({seq: rig.draw(1)})
    snap = rig.pool.export(seq)
    save_sequence(snap, tmp_path / "a.safetensors")
    loaded = load_sequence(str(tmp_path / "a.safetensors"))
    same_snapshot(loaded, snap)
    copy = rig.pool.import_(loaded)
    assert_same(rig, seq, rig, copy)
    stream = rig.draw(4)
    assert_equal_outputs(rig.decode(copy, stream), rig.decode(seq, stream))


@pytest.mark.parametrize("limit", [(0.0, math.inf), (1e-3, math.inf), (0.1, 0.30000000000000004)])
def test_limits_that_json_does_not_have(limit, tmp_path):
    """An infinite limit, and one with all digits of a float64; the header stays plain JSON."""
    spec = Mamba2Spec(4, 3, 5, groups=2, dt_limit=limit, conv_width=0)
    pool = StatePool(spec, [7], 2)
    path = tmp_path / "a.safetensors"
    save_sequence(pool.export(*pool.alloc()), path)
    with safetensors.safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()[KEY], parse_constant=pytest.fail)
    assert header["spec"]["dt_limit"] == [limit[0], "inf" if math.isinf(limit[1]) else limit[1]]
    pool.import_(load_sequence(path))
    other = StatePool(Mamba2Spec(4, 3, 5, groups=2, dt_limit=(limit[0], 7.0), conv_width=0), [7], 2)
    with (
        Unchanged(other),
        pytest.raises(InputError, match=r"spec\.dt_limit is .*, here \[.*7\.0\]"),
    ):
        other.import_(load_sequence(path))


def test_a_file_is_replaced_whole(snap, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    save_sequence(snap, path)
    same_snapshot(load_sequence(path), snap)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(snap, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_sequence(snap, path)
    before = path.read_bytes()

    def half(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="disk full"):
        save_sequence(snap, path)
    monkeypatch.undo()
    with pytest.raises(TypeError):  # a header that JSON does not take
        save_sequence(SequenceSnapshot({"family": object()}, snap.tensors), path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):  # noqa: PT011  cannot be replaced by a file
        save_sequence(snap, tmp_path / "folder")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "folder"]


def test_truncated_files(snap, rig, tmp_path):
    path = tmp_path / "a.safetensors"
    save_sequence(snap, path)
    whole = path.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"path: got .*a\.safetensors, which cannot be read"):
            load_sequence(path)
    path.write_bytes(whole)
    rig.pool.import_(load_sequence(path))


def test_foreign_files(snap, rig, tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="which cannot be read"):
        load_sequence(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="which cannot be read"):
        load_sequence(tmp_path)
    path.write_text("not a tensor in it")
    with pytest.raises(InputError, match="which cannot be read"):
        load_sequence(path)
    tensors = dict(snap.tensors)
    for metadata in (None, {"format": "pt"}, {KEY: "[1, 2]"}, {KEY: '"text"'}, {KEY: "null"}):
        save_file(tensors, str(path), metadata=metadata)
        with pytest.raises(InputError, match="which holds no sequence; allowed a file that"):
            load_sequence(path)
    save_file(tensors, str(path), metadata={KEY: "{broken"})
    with pytest.raises(InputError, match="which cannot be read"):
        load_sequence(path)
    # A header that is a mapping is read; whether it fits is the pool's to say.
    save_file(tensors, str(path), metadata={KEY: "{}"})
    with Unchanged(rig.pool), pytest.raises(InputError, match="layout_version is 'absent', here 1"):
        rig.pool.import_(load_sequence(path))


def test_a_file_without_one_of_its_tensors(snap, rig, tmp_path):
    path = tmp_path / "a.safetensors"
    for name in snap.tensors:
        rest = {k: t for k, t in snap.tensors.items() if k != name}
        save_sequence(SequenceSnapshot(snap.header, rest), path)
        with Unchanged(rig.pool), pytest.raises(InputError, match=f"tensor {name} is absent"):
            rig.pool.import_(load_sequence(path))


def test_without_the_package(snap, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: save_sequence(snap, tmp_path / "a"),
        lambda: load_sequence(tmp_path / "a"),
    ):
        with pytest.raises(UnsupportedError, match=r"pip install 'replayinfer\[offload\]'"):
            call()
    assert not list(tmp_path.iterdir())
