"""Peers by import: who is asked, who is left out and why, and kernels launched by another tile."""

from __future__ import annotations

import sys

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.bench import peers
from replayinfer.bench.peers import describe, standard_kernels
from replayinfer.bench.peers.retile import Retile, retiled

from .fakes import bind, missing, peer

MAMBA2 = Mamba2Spec(heads=4, dim=8, state=16, groups=2)
GDN = GDNSpec(heads=4, dim=8, state=16, key_heads=2)
KDA = KDASpec(heads=4, dim=8, state=16, key_heads=4)


def ask(spec, scope="ssm", dtype=torch.bfloat16, state_dtype=torch.float32):
    skipped, versions = {}, {}
    found = list(standard_kernels(spec, scope, dtype, state_dtype, skipped, versions))
    return [variant.name for variant in found], skipped, versions


@pytest.fixture
def nobody(monkeypatch):
    for name in ("sglang", "mamba_ssm", "flashinfer", "fla"):
        for module in [m for m in sys.modules if m.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("spec", "scope", "names"),
    [
        (MAMBA2, "ssm", {"sglang", "mamba_ssm", "flashinfer"}),
        (MAMBA2, "mixer", {"sglang"}),
        (GDN, "ssm", {"sglang", "fla", "flashinfer"}),
        (GDN, "mixer", {"sglang"}),
        (KDA, "ssm", {"sglang", "fla"}),
        (KDA, "mixer", {"sglang"}),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "family", None),
)
def test_whoever_is_not_there_is_said_to_be_missing(nobody, spec, scope, names):
    found, skipped, versions = ask(spec, scope)
    assert not found
    assert not versions
    assert set(skipped) == names
    for reason in skipped.values():
        assert "does not import: ModuleNotFoundError" in reason or "; its kernel " in reason


def test_every_peer_of_a_family_is_one_the_report_can_name():
    for spec in (MAMBA2, GDN, KDA):
        for scope, window in (("ssm", 1), ("mixer", 1), ("ssm", 4)):
            names = [p.name for p in peers.peers_of(spec.family, scope, window)]
            assert len(names) == len(set(names)) >= 1
    assert peers.peers_of("linear", "ssm") == ()


@pytest.mark.parametrize(
    ("spec", "dtype", "state_dtype", "name", "reason"),
    [
        (MAMBA2, torch.float32, torch.float32, "flashinfer", "dtype=float32"),
        (GDN, torch.bfloat16, torch.bfloat16, "fla", "state_dtype"),
        (GDN, torch.bfloat16, torch.float32, "flashinfer", "dim=8, state=16"),
        (
            GDNSpec(heads=4, dim=128, state=128, beta="sigmoid2"), torch.bfloat16, torch.float32,
            "sglang", "beta='sigmoid2'; its kernel has sigmoid",
        ),
        (
            KDASpec(heads=4, dim=8, state=16, gate="log"), torch.bfloat16, torch.float32,
            "fla", "gate='log'",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_a_kernel_does_not_compute(nobody, spec, dtype, state_dtype, name, reason):
    assert reason in ask(spec, dtype=dtype, state_dtype=state_dtype)[1][name]


def test_found_missing_broken_and_refusing_peers(monkeypatch):
    monkeypatch.setitem(
        peers._PEERS,
        ("mamba2", "ssm"),
        (
            peer("good", bind, bind),
            missing("absent", ModuleNotFoundError("No module named 'absent'")),
            missing("broken", RuntimeError("libcuda.so.1: cannot open shared object file")),
            peer("picky", bind, refuses=lambda spec, dtype, state: f"dim={spec.dim}"),
        ),
    )
    found, skipped, versions = ask(MAMBA2)
    assert found == ["good", "good (1)"]
    assert versions == {"good": "unknown"}
    assert skipped == {
        "absent": "does not import: ModuleNotFoundError: No module named 'absent'",
        "broken": "does not import: RuntimeError: libcuda.so.1: cannot open shared object file",
        "picky": "dim=8",
    }


class Kernel:
    arg_names = ("state", "V", "BV", "flag")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            given = dict(zip(self.arg_names, args, strict=False)) | kwargs
            self.launches.append((grid, given))

        return launch


class Module:
    def __init__(self):
        self.kernel = Kernel()


def test_a_tile_by_position_under_a_grid_of_its_own():
    module = Module()
    kernel = module.kernel
    with retiled(module, Retile("kernel", "BV", 16, 2)):
        module.kernel[grid := (lambda meta: 1)]("s", 20, 4, flag=True, num_warps=8)
    assert kernel.launches == [
        (grid, {"state": "s", "V": 20, "BV": 16, "flag": True, "num_warps": 2})
    ]
    assert module.kernel is kernel


@pytest.mark.parametrize(("rows", "tiles"), [(4, 5), (8, 3), (16, 2), (32, 1)])
@pytest.mark.parametrize("rest", [(), (6,), (6, 7)], ids=str)
def test_a_tile_by_name_under_a_computed_grid(rows, tiles, rest):
    """20 values in tiles of 8 are 3 to a head; with 5 heads on the first axis or on others."""
    module = Module()
    with retiled(module, Retile("kernel", "BV", rows, 1, extent="V")):
        module.kernel[(3 * 5, *rest)](state="s", V=20, BV=8, flag=False, num_warps=4)
    ((grid, given),) = module.kernel.launches
    assert grid == (tiles * 5, *rest)
    assert (given["BV"], given["num_warps"]) == (rows, 1)


def test_no_choice_is_the_peers_own():
    module = Module()
    with retiled(module, None):
        module.kernel[(1,)]("s", 20, 4, num_warps=8)
    assert module.kernel.launches[0][1]["BV"] == 4


def test_a_kernel_comes_back_after_an_error():
    module = Module()
    kernel = module.kernel
    with (
        pytest.raises(KeyError, match="BV"),
        retiled(module, Retile("kernel", "BV", 16, 2)),
    ):
        module.kernel[(1,)]("s")
    assert module.kernel is kernel


def test_labels():
    assert str(Retile("kernel", "BV", 16, 1)) == "tile 16, 1 warp"
    assert str(Retile("kernel", "BV", 16, 4)) == "tile 16, 4 warps"


def test_an_error_is_told_in_one_line_without_the_folders_of_a_machine():
    error = RuntimeError("in 'x' at /opt/some-site/lib.d/kernel.cuh:13: dim / state\nsecond line")
    assert describe(error) == "RuntimeError: in 'x' at kernel.cuh:13: dim / state"
    assert describe(KeyError()) == "KeyError"
