"""The gated norm on a GPU: values, and that it waits for the kernel that it starts behind."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from replayinfer.ops import gated_norm

from ..kernels.test_gated_norm import check, operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("batch", "heads", "dim", "dtype", "activation", "layout"),
    [
        (256, 32, 128, torch.bfloat16, "silu", "packed"),
        (5, 3, 24, torch.float16, "sigmoid", "slices"),
    ],
)
def test_values(batch, heads, dim, dtype, activation, layout, rng):
    x, z, weight = (t.cuda() for t in operands(rng, batch, heads, dim, dtype, layout))
    check(gated_norm(x, z, weight, eps=1e-6, activation=activation), x, z, weight, 1e-6, activation)


def test_one_after_another(rng):
    """Each starts while the one before it writes what it reads; captured, as engines have it."""
    x, z, weight = (t.cuda() for t in operands(rng, 512, 32, 128, torch.bfloat16, "packed"))
    start, every = x.clone(), [torch.empty_like(x) for _ in range(8)]

    def step():
        before = start
        for out in every:
            gated_norm(before, z, weight, eps=1e-6, out=out)
            before = out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for out in every:
        out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for before, out in zip([start, *every], every, strict=False):
        check(out, before, z, weight, 1e-6, "silu")
