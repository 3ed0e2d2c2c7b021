"""Rows of accepted tree nodes, moved by the kernel as the torch backend moves them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer import GDNSpec, KDASpec, Mamba2Spec, StatePool
from replayinfer.backends.torch import TorchBackend
from replayinfer.backends.triton import TritonBackend
from replayinfer.planner import HostPlanner
from replayinfer.testing import assert_bitwise_equal

from ..trees.forest import matrix, path_to, random_tree

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
SIZES = {"heads": 6, "dim": 8, "state": 16}
SPECS = {
    "mamba2": Mamba2Spec(groups=3, **SIZES),
    "mamba2, odd sizes": Mamba2Spec(heads=3, dim=5, state=6, conv_width=2),
    "gdn": GDNSpec(key_heads=3, **SIZES),
    "kda": KDASpec(key_heads=3, conv_width=0, **SIZES),
}
NODES, BATCH = 7, 4


def tensors(pool) -> dict[str, torch.Tensor]:
    return {**pool.inputs.fields, "rings": pool.conv.rows}


def planned(spec, rng, **options):
    """A pool of three layers full of distinct values, a folded plan of trees, and its paths."""
    options = {
        "capacity": 9,
        "page_rows": 2,
        "format": "fp32_split",
        "dtype": torch.bfloat16,
    } | options
    pool = StatePool(spec, range(3), BATCH + 2, max_window=NODES, **options)
    planner = HostPlanner(pool)
    sequences = pool.alloc(BATCH)
    for history in (1, 2):  # 0 to 3 rows, so that windows begin at and inside of pages
        plan = planner.plan(sequences, [0, history % 2, history // 2 * 2, history])
        planner.folded(plan)
        planner.commit(plan)
    for tensor in tensors(pool).values():
        bits = torch.int16 if tensor.element_size() == 2 else torch.int32
        tensor.view(bits).copy_(torch.randint(2**15, tensor.shape, generator=rng))
    trees = [random_tree(n, rng) for n in (NODES, 4, 0, NODES)]
    plan = planner.plan(
        sequences, [len(t) for t in trees], bucket=BATCH + 1, parents=matrix(trees, NODES)
    )
    planner.folded(plan)
    nodes = np.full((BATCH, NODES), -1, dtype=np.int32)
    for i, tree in enumerate(trees):
        path = path_to(tree, len(tree) - 1)
        nodes[i, : len(path)] = path
    nodes[3] = [1, 3, 4, 6, -1, -1, -1]  # 3 and 4 are read, and 3 is then written
    return pool, plan, nodes


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *((spec, {}) for spec in SPECS),
        ("mamba2", {"dtype": torch.float32}),
        ("mamba2", {"page_rows": 1}),
        ("gdn", {"format": "fp32", "page_rows": 16}),
        ("gdn", {"restore": "any"}),
    ],
    ids=str,
)
def test_rows_move_as_in_torch(spec, options, rng):
    pool, plan, nodes = planned(SPECS[spec], rng, **options)
    before = {name: t.clone() for name, t in tensors(pool).items()}
    TorchBackend().compact(pool, plan, nodes)
    want = {name: t.clone() for name, t in tensors(pool).items()}
    for name, tensor in tensors(pool).items():
        tensor.copy_(before[name])
    TritonBackend().compact(pool, plan, nodes)
    for name, tensor in tensors(pool).items():
        assert_bitwise_equal(tensor, want[name], name)
        if tensor.numel():
            assert not torch.equal(tensor, before[name]), "nothing moved"


def test_a_path_that_is_a_chain_launches_nothing(rng, monkeypatch):
    pool, plan, nodes = planned(SPECS["mamba2"], rng)
    monkeypatch.setattr(
        "replayinfer.backends.triton.compact.move", lambda *_: pytest.fail("launched")
    )
    chain = np.where(np.arange(NODES) < 3, np.arange(NODES), -1).astype(np.int32)
    TritonBackend().compact(pool, plan, np.tile(chain, (BATCH, 1)))
    TritonBackend().compact(pool, plan, np.full_like(nodes, -1))


@pytest.mark.parametrize("part", [1, 8, 64])
def test_blocks_of_a_row(part, rng):
    from replayinfer.kernels.launch.config import LaunchConfig
    from replayinfer.kernels.launch.lookup import forced

    pool, plan, nodes = planned(SPECS["mamba2"], rng)
    before = {name: t.clone() for name, t in tensors(pool).items()}
    TorchBackend().compact(pool, plan, nodes)
    want = {name: t.clone() for name, t in tensors(pool).items()}
    for name, tensor in tensors(pool).items():
        tensor.copy_(before[name])
    with forced(compact=LaunchConfig(rows=part)):
        TritonBackend().compact(pool, plan, nodes)
    for name, tensor in tensors(pool).items():
        assert_bitwise_equal(tensor, want[name], name)
