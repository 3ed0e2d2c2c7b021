"""Windows of Mamba-2 on a GPU, against the torch backend on the same device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import mamba2_inputs

from ..kernels.mamba2_windows import WindowPair, Windows
from ..trees.forest import matrix, random_tree
from .layouts import WideSlices

pytestmark = pytest.mark.gpu
BASE = Windows(
    window=4, heads=16, dim=64, state=128, groups=2, capacity=11, page_rows=4, batch=5, pads=2,
    steps=10, layers=2, tree=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        BASE.but(format="fp32", out=torch.float32, window=8, capacity=33, groups=8),
        BASE.but(format="bf16", window=16, capacity=64, page_rows=16, dim=80, z=True, groups=1),
        BASE.but(format="fp16", dtype=torch.float16, dim=20, state=24, window=2, tree=False),
        BASE.but(dtype=torch.float32, window=5, state=64, page_rows=1),
        BASE.but(window=16, capacity=32, tree=False, groups=16),
    ],
    ids=str,
)
def test_windows(case, rng):
    WindowPair(case, rng, "cuda").decode().check()


@pytest.mark.parametrize(("warps", "rows", "part"), [(1, 64, 16), (2, 64, 32)])
def test_launch_choices(warps, rows, part, rng):
    verify, prepass = LaunchConfig(num_warps=warps, rows=rows), LaunchConfig(num_warps=2, rows=part)
    with forced(verify=verify, verify_prepass=prepass):
        WindowPair(BASE.but(capacity=33), rng, "cuda").decode().check()


def test_wide_ids_and_slices_of_a_projection(rng):
    pair = WindowPair(BASE.but(z=True), rng, "cuda")
    pair.worlds[1][2].backend = WideSlices()
    pair.decode().check()


def test_a_size_that_is_used(rng):
    case = BASE.but(heads=128, groups=8, capacity=32, page_rows=8, batch=33, pads=31, layers=1)
    WindowPair(case, rng, "cuda").decode().check()


@pytest.mark.xdist_group("memory")
def test_pages_past_two_to_the_31_elements(rng):
    case = BASE.but(batch=2, layers=1, steps=6)
    page = 2 * case.heads * case.dim * case.state  # int16 values of a split page
    pages = 2**31 // page + 16
    row_pages = 2**31 // (case.page_rows * case.heads * case.dim) + 16

    def take_low_pages(pool):
        pool.checkpoint_ids.take(pages - 12)
        pool.input_ids.take(row_pages - 12)

    pair = WindowPair(
        case, rng, "cuda", checkpoint_pages=pages, input_pages=row_pages, before=take_low_pages
    )
    pair.decode().check()
    del pair
    torch.cuda.empty_cache()


def test_one_graph_serves_chains_and_trees(rng):
    """Replayed with whatever the next plan says: windows, pads, trees, histories."""
    pair = WindowPair(BASE, rng, "cuda")
    (pool, sequences, wrapper), spec, case = pair.worlds[1], pair.spec, BASE
    backend, bucket, numbers = wrapper.backend, pair.bucket, np.random.default_rng(0)
    inputs = mamba2_inputs(spec, case.window, bucket, case.dtype, rng)
    inputs = {name: v.cuda() for name, v in inputs.items()}
    options = {"device": "cuda", "dtype": case.dtype}
    rows = torch.randn(bucket, case.window, spec.conv_channels, **options)
    outs = [
        torch.empty(bucket, case.window, spec.heads, spec.dim, **options),
        torch.empty_like(rows),
    ]

    def run():
        for layer in range(case.layers):
            backend.conv(pool, plan, layer, rows, outs[1])
            backend.readout(pool, plan, layer, inputs, outs[0])

    graph = None
    for turn in range(8):
        windows = numbers.integers(0, case.window + 1, case.batch)
        trees = [random_tree(int(n), rng) for n in windows] if turn % 2 else None
        plan = wrapper.plan(
            sequences, windows, bucket=bucket, window=case.window,
            parents=None if trees is None else matrix(trees, case.window),
        )  # fmt: skip
        wrapper.fold()
        # Twice on the same plan: the same rows are written again, and the outputs must agree.
        run()
        eager = [out.clone() for out in outs]
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        for out in outs:
            out.fill_(np.nan)
        graph.replay()
        for out, want in zip(outs, eager, strict=True):
            assert torch.equal(out, want)
        plan.layers_run.update(pool.layers)
        if trees is None:
            wrapper.commit()
        else:
            wrapper.commit(paths=[[0] if n else [] for n in windows.tolist()])
