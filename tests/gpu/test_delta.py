"""The delta-rule decode kernels on a GPU, against the torch backend on the same device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer.testing import delta_inputs

from ..kernels.delta_pair import DeltaCase, DeltaPair, launching
from ..kernels.vary import cover, vary
from .layouts import Slices, WideIds, WideSlices

pytestmark = pytest.mark.gpu
BASE = DeltaCase(
    heads=8, key_heads=4, dim=64, state=128, capacity=11, page_rows=4, batch=5, pads=2, steps=26,
    layers=2, warps=4,
)  # fmt: skip
SPLIT = [BASE, BASE.but(family="kda")]
BASES = SPLIT + [base.but(fused=True) for base in SPLIT]


@pytest.mark.parametrize(
    "case",
    cover(
        BASES,
        dim=[64, 20, 128, 80, 64],
        state=[128, 16, 256, 64, 24],
        heads=[4, 16, 12, 32],
        format=["fp32_split", "fp32", "bf16", "fp16"],
        dtype=[torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16],
        capacity=[3, 1, 16, 2, 11],
        page_rows=[1, 64, 4],
        gate=["softplus", "log"],
        gates=["near_one", "extreme", "realistic"],
        beta=["sigmoid", "sigmoid2", "given"],
        norm=["l2", "none", "l2"],
        scale=[None, 0.37],
    )
    + vary(BASES[1::2], gate=["bounded"])
    + vary(BASES[:1], capacity=[33]),
    ids=str,
)
def test_decode(case, rng):
    if case.capacity > case.steps:
        case = case.but(steps=case.capacity * 3 // 2)
    DeltaPair(case, rng, "cuda").decode().check()


@pytest.mark.parametrize("capacity", [16, 32])
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_exact_in_fp32(family, capacity, rng):
    """No product is in less than fp32: 1e-6, where tf32 or two bf16 terms leave 1e-4 or 1e-5."""
    case = BASE.but(
        family=family, dim=128, capacity=capacity, page_rows=capacity, steps=capacity + 4,
        format="fp32", dtype=torch.float32,
    )  # fmt: skip
    for fused in (False, True):
        DeltaPair(case.but(fused=fused), rng, "cuda").decode().check()


@pytest.mark.parametrize(
    "case",
    cover(
        [base.but(dim=128, steps=14, layers=1) for base in SPLIT],
        rows=[4, 16, 32, 64, 128],
        warps=[1, 2, 4, 1, 2, 4, 2],
        format=["fp32_split", "fp32", "fp16"],
    ),
    ids=str,
)
def test_launches(case, rng):
    """Blocks of a row up to all, and any number of warps in either kernel."""
    DeltaPair(case, rng, "cuda").decode().check()


def test_more_programs_than_the_small_grid_axes_hold(rng):
    case = DeltaCase(
        heads=128, key_heads=128, dim=16, state=16, batch=600, pads=1, steps=3, capacity=2
    )
    for family in ("gdn", "kda"):
        for fused in (True, False):
            DeltaPair(case.but(family=family, fused=fused), rng, "cuda").decode().check()


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("base", BASES, ids=str)
def test_pages_past_two_to_the_31_elements(base, rng):
    case = base.but(batch=2, pads=1, capacity=3, steps=6, layers=1, page_rows=2)
    page = 2 * case.heads * case.dim * case.state  # int16 values of a split page
    pages = 2**31 // page + 16
    widest = case.heads * (case.dim if case.family == "gdn" else case.state)  # of u, or of g
    row_pages = 2**31 // (case.page_rows * widest) + 16

    def take_low_pages(pool):
        pool.checkpoint_ids.take(pages - 12)
        pool.input_ids.take(row_pages - 12)

    pair = DeltaPair(
        case, rng, "cuda", checkpoint_pages=pages, input_pages=row_pages, before=take_low_pages
    )
    pool = pair.worlds[1][0]
    assert int(pool.cursors.checkpoint[pool.cursors.live].min()) * page > 2**31
    pair.decode().check()
    del pair, pool
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", [WideIds, Slices, WideSlices])
@pytest.mark.parametrize("case", vary(BASES, format=["fp32_split", "bf16"]), ids=str)
def test_wide_ids_and_slices_of_a_projection(case, layout, rng):
    pair = DeltaPair(case, rng, "cuda")
    pair.worlds[1][2].backend = layout()
    pair.decode().check()


@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_captured_step_is_the_same_step(base, rng):
    """Readouts replay from a CUDA graph with whatever the next plan says."""
    pair = DeltaPair(base, rng, "cuda")
    pool, sequences, wrapper = pair.worlds[1]
    backend, spec, bucket = wrapper.backend, pair.spec, base.batch
    inputs = {
        name: value.cuda() for name, value in delta_inputs(spec, 1, bucket, base.dtype, rng).items()
    }
    out = torch.empty((bucket, 1, spec.heads, spec.dim), device="cuda", dtype=base.dtype)

    def readouts(plan):
        for layer in range(base.layers):
            backend.readout(pool, plan, layer, inputs, out)

    graph = None
    with launching(base):
        for _ in range(3 * base.capacity):
            plan = wrapper.plan(sequences)
            wrapper.fold()
            # Twice on the same plan: the same row again, so the bits must agree.
            readouts(plan)
            eager = out.clone()
            if graph is None:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    readouts(plan)
            out.fill_(np.nan)
            graph.replay()
            assert torch.equal(out, eager)
            plan.layers_run.update(pool.layers)
            wrapper.commit()


@pytest.mark.parametrize("base", SPLIT, ids=str)
def test_layers_one_after_another_share_scratch(base, rng):
    """A prepass must not overwrite weights that the readout before it still reads."""
    case = dataclasses.replace(base, layers=6, batch=64, pads=0, steps=8, page_rows=16)
    for _ in range(3):
        DeltaPair(case, rng, "cuda").decode().check()
