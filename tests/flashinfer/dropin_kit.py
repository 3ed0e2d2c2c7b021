"""What the tests of FlashInfer's calls share: who computes, inputs as their callers pass them."""

from __future__ import annotations

import os

import pytest
import torch

interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
KERNELS = [
    "torch",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(not interpreted, reason="kernels need TRITON_INTERPRET=1 here"),
    ),
]
# Outputs in float32 of values of size 1 to 10; a state in 16 bits is rounded where it is stored.
FP32 = 3e-5
STORED = {torch.float32: FP32, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Draw:
    """Random tensors of a test's own generator."""

    def __init__(self, rng: torch.Generator) -> None:
        self.rng = rng

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.rng).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.rng)


def padded_pool(values: torch.Tensor, gap: int = 16) -> torch.Tensor:
    """A pool of those values whose slots are `gap` NaN apart, as where they share a page."""
    slots, row = values.shape[0], values[0].numel()
    memory = torch.full((slots, row + gap), float("nan")).to(values.dtype)
    pool = memory.as_strided(values.shape, (row + gap, *values.stride()[1:]))
    return pool.copy_(values)


def close(got: torch.Tensor, exact: torch.Tensor, bound: float = FP32) -> None:
    """Within `bound` of the exact values, relative to their size where that is above 1."""
    error = (got.double() - exact).abs() / exact.abs().clamp_min(1)
    assert got.isfinite().all()
    assert float(error.max()) <= bound, f"{float(error.max()):.2e} > {bound:.2e}"
