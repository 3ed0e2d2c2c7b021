"""The buffer length: no power of two within a factor of two moves fewer bytes by much."""

from __future__ import annotations

import math

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.cost import best_capacity
from replayinfer.formats import get_format

SPECS = [
    Mamba2Spec(heads=128, dim=64, state=128, groups=8),
    Mamba2Spec(heads=4, dim=8, state=8),
    GDNSpec(heads=32, dim=128, state=128, key_heads=16),
    KDASpec(heads=32, dim=128, state=128, key_heads=32),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family + str(s.heads))
@pytest.mark.parametrize("fmt", ["fp32", "fp32_split", "bf16", "fp16"])
def test_it_moves_the_fewest_bytes(spec, fmt):
    stored = math.prod(spec.state_shape) * get_format(fmt).bytes_stored
    row = spec.row_bytes(torch.bfloat16, get_format(fmt))

    def moved(length: float) -> float:
        return length * row / 2 + 2 * stored / length

    best = best_capacity(spec, fmt)
    assert best & (best - 1) == 0
    least = moved(math.sqrt(4 * stored / row))
    # A power of two is at most a factor of two too long: (2 + 1/2) / 2 of the least.
    assert moved(best) <= 1.25 * least * (1 + 1e-9)
    assert moved(best) <= moved(best / 2) * 1.25


def test_the_published_shape():
    assert best_capacity(SPECS[0]) == 32
    assert best_capacity(SPECS[0], "bf16") == 32
