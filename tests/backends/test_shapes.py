"""Sizes: heads that share groups or key heads in any ratio, odd head sizes, state sizes."""

import dataclasses

import pytest
import torch

from .world import BASES, Case, World, vary

DIMS = [64, 80, 96, 128, 256]
STATES = [16, 24, 64, 100, 128, 256]
RATIOS = [1, 2, 3, 4, 8]


def with_ratio(case: Case, ratio: int) -> Case:
    """Two shared heads, each for `ratio` heads of the state."""
    shared, _ = case.spec.shared_heads
    spec = dataclasses.replace(case.spec, heads=2 * ratio, **{shared: 2})
    return dataclasses.replace(case, spec=spec, label=f"{spec.family}-ratio={ratio}")


@pytest.mark.parametrize("case", vary(BASES, dim=DIMS, state=STATES), ids=str)
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_head_and_state_sizes(case, format, rng):
    case = dataclasses.replace(with_ratio(case, 1), tokens=18, batch=2, pads=1)
    case = case.but(format=format, dtype=torch.bfloat16)
    World(case, rng).decode().check()


@pytest.mark.parametrize(
    "case", [with_ratio(base, ratio) for base in BASES for ratio in RATIOS], ids=str
)
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_head_ratios(case, format, rng):
    World(case.but(tokens=25, format=format), rng).decode().check()
