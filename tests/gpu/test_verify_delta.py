"""The delta-rule kernels for windows of drafts on a GPU, against the torch backend there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer.testing import delta_inputs

from ..kernels.delta_pair import DeltaCase
from ..kernels.verify_pair import VerifyPair, verifying
from ..trees.forest import matrix, path_to, random_tree
from .layouts import WideSlices

pytestmark = pytest.mark.gpu
GDN = DeltaCase(
    heads=8, key_heads=4, dim=128, state=128, capacity=20, page_rows=8, batch=5, pads=2, layers=2
)
KDA = GDN.but(family="kda")


def rounds(pair: VerifyPair, count: int) -> VerifyPair:
    """Random trees, chains, single tokens and empty windows, and a random path of each accepted."""
    width, rng = pair.width, pair.rng
    for _ in range(count):
        trees = [
            (random_tree(width, rng), list(range(-1, width - 1)), [-1], [], [-1] * width)[i % 5]
            for i in range(pair.case.batch)
        ]
        ends = [int(torch.randint(-1, len(p), (), generator=rng)) for p in trees]
        paths = [path_to(p, max(end, 0) if p else -1) for p, end in zip(trees, ends, strict=True)]
        pair.verify([len(p) for p in trees], parents=matrix(trees, width), paths=paths)
    return pair


@pytest.mark.parametrize(
    ("case", "width"),
    [
        (GDN, 4),
        (GDN.but(format="fp32", dtype=torch.float32, norm="none", gate="log"), 3),
        (GDN.but(format="fp16", heads=12, dim=64, gates="extreme"), 8),
        (GDN.but(format="bf16", dtype=torch.float16, heads=4, page_rows=4), 16),
        (GDN.but(format="fp32", dim=80, state=64, warps=2, rows=32, capacity=40), 5),
        (KDA, 4),
        (KDA.but(format="fp32", dtype=torch.float32, gate="log", gates="extreme"), 2),
        (KDA.but(format="fp16", gate="bounded", warps=2, rows=64), 8),
    ],
    ids=str,
)
def test_windows(case, width, rng):
    rounds(VerifyPair(case, rng, "cuda", width=width), 8).check()


@pytest.mark.parametrize("case", [GDN, KDA], ids=str)
def test_wide_ids_and_slices_of_a_projection(case, rng):
    pair = VerifyPair(case.but(layers=1), rng, "cuda", width=4)
    pair.worlds[1][2].backend = WideSlices()
    rounds(pair, 6).check()


@pytest.mark.parametrize("case", [GDN, KDA], ids=str)
def test_layers_one_after_another_share_scratch(case, rng):
    """A prepass must not overwrite weights that the readout before it still reads."""
    pair = VerifyPair(case.but(layers=6, batch=60, pads=4), rng, "cuda", width=4)
    rounds(pair, 6).check()


@pytest.mark.parametrize("case", [GDN, KDA], ids=str)
def test_one_graph_serves_chains_and_trees(case, rng):
    width, bucket = 4, case.batch
    pair = VerifyPair(case, rng, "cuda", width=width)
    pool, sequences, wrapper = pair.worlds[1]
    inputs = {
        n: v.cuda() for n, v in delta_inputs(pair.spec, width, bucket, case.dtype, rng).items()
    }
    shape = (bucket, width, pair.spec.heads, pair.spec.dim)
    out = torch.empty(shape, device="cuda", dtype=case.dtype)

    def readouts(plan):
        for layer in range(case.layers):
            wrapper.backend.readout(pool, plan, layer, inputs, out)

    graph = None
    with verifying(case):
        for turn in range(12):
            windows = [(turn + i) % (width + 1) for i in range(bucket)]
            trees = [random_tree(n, rng) for n in windows]
            parents = matrix(trees, width) if turn % 2 else None
            plan = wrapper.plan(sequences, windows, window=width, parents=parents)
            wrapper.fold()
            # Twice on the same plan: the same rows again, so the bits must agree.
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
            paths = [path_to(p, len(p) - 1) for p in trees]
            if parents is None:
                wrapper.commit()
            else:
                wrapper.commit(paths=paths)
