"""Launch choices: the tables are well formed, and lookup takes the bucket that covers a batch."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch

from replayinfer import Mamba2Spec
from replayinfer.kernels.launch import lookup as launch
from replayinfer.kernels.launch.config import LaunchConfig

TABLES = resources.files("replayinfer.kernels.launch") / "tables"
SUPER = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
OPERATIONS = ("fused", "prepass", "readout", "fold", "fold32", "conv", "direct")


@pytest.mark.parametrize("path", list(TABLES.iterdir()), ids=lambda p: p.name)
def test_tables_are_well_formed(path):
    for key, choices in json.loads(path.read_text())["choices"].items():
        op, _, fmt = key.split()
        assert op in OPERATIONS
        assert fmt in ("fp32", "fp32_split", "bf16", "fp16")
        limits = [limit for limit, _ in choices]
        assert limits == sorted(set(limits))
        for _, config in choices:
            assert LaunchConfig(**config) if config else op == "fused"


def test_bucket_that_covers_the_batch(monkeypatch):
    small, large = LaunchConfig(num_warps=1), LaunchConfig(num_warps=2)
    key = launch.shape_key("readout", SUPER, "bf16")
    monkeypatch.setattr(launch, "_table", lambda name: {key: [(8, small), (64, large)]})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some")
    device = torch.device("cuda")
    got = [launch.lookup("readout", SUPER, "bf16", b, device) for b in (1, 8, 9, 64, 512)]
    assert got == [small, small, large, large, large]
    rule = launch.rule("readout", SUPER, "fp32", 9)
    assert launch.lookup("readout", SUPER, "fp32", 9, device) == rule


@pytest.mark.parametrize("dim", [4, 64, 80, 128, 256])
@pytest.mark.parametrize("fmt", ["fp32", "fp32_split"])
def test_rule_wastes_little_of_a_program(dim, fmt):
    for batch in (1, 64, 4096):
        spec = Mamba2Spec(heads=16, dim=dim, state=128)
        rows = launch.rule("readout", spec, fmt, batch).rows
        assert rows & (rows - 1) == 0
        assert rows <= 16 or -(-dim // rows) * rows <= 1.25 * dim
