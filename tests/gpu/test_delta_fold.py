"""The delta-rule fold on a GPU, against the float64 recurrence and torch's fold there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from replayinfer.backends.triton import TritonBackend
from replayinfer.backends.triton.delta_fold import fold
from replayinfer.testing import relative_error

from ..kernels.fold_rig import FoldCase, FoldRig
from ..kernels.vary import cover, vary

pytestmark = pytest.mark.gpu
GDN = FoldCase(
    heads=4, key_heads=2, dim=128, state=128, capacity=16, page_rows=16, layers=2,
    rows=(16, 0, 1, 7, 16), tile=(),
)  # fmt: skip
KDA = GDN.but(family="kda")
BASES = [GDN, KDA]


@pytest.mark.parametrize(
    "case",
    cover(
        BASES,
        format=["fp32_split", "fp32", "bf16", "fp16"],
        dtype=[torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16],
        norm=["l2", "none"],
        heads=[4, 2, 6, 8, 16],
        dim=[128, 20, 64, 80, 256, 20, 80],
        state=[128, 16, 24, 64, 96, 256, 24],
        page_rows=[1, 4, 64, 16],
        in_place=[True, False],
        gates=["near_one", "bounded", "edges"],
    ),
    ids=str,
)
def test_fold(case, rng):
    FoldRig(case, rng, "cuda").check()


@pytest.mark.parametrize(
    ("base", "format", "capacity"),
    [
        (GDN, "fp32_split", 2), (GDN, "fp32_split", 17), (GDN, "fp32_split", 32),
        (GDN, "fp32", 33), (GDN, "bf16", 64),
        (KDA, "fp32_split", 15), (KDA, "fp32_split", 32), (KDA, "fp32", 17),
    ],
    ids=str,
)  # fmt: skip
def test_capacities(base, format, capacity, rng):
    rows = (capacity, capacity // 2, 1, 0)
    FoldRig(base.but(capacity=capacity, format=format, rows=rows), rng, "cuda").check()


@pytest.mark.parametrize(
    "case",
    cover(
        [base.but(layers=1) for base in BASES],
        tile=[(4, 64, 16), (4, 64, 32), (4, 64, 64), (4, 64, 128), (8, 128, 64), (2, 32, 32),
              (1, 16, 32), (1, 16, 64), (4, 32, 64)],
        format=["fp32_split", "bf16", "fp32_split", "fp32"],
        rows=[(16, 13), (15, 1, 16)],
    )
    + vary([GDN.but(layers=1, capacity=32, rows=(32, 29))], tile=[(4, 64, 32), (4, 64, 64)])
    + vary([KDA.but(layers=1, rows=(15, 1, 16))], tile=[(4, 64, 32), (4, 64, 0)])
    + [KDA.but(layers=1, capacity=32, rows=(32, 29), tile=(4, 64, 0))],
    ids=str,
)  # fmt: skip
def test_tiles(case, rng):
    FoldRig(case, rng, "cuda").check()


@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_layer_of_a_model(base, rng):
    """More heads than programs, so that each takes several and its scratch memory is used again."""
    case = base.but(heads=32, key_heads=16, rows=(16,) * 20 + (3,), layers=3)
    FoldRig(case, rng, "cuda").check()


@pytest.mark.parametrize("base", vary(BASES, format=["fp32_split", "fp32", "bf16"]), ids=str)
def test_materialize(base, rng):
    rig = FoldRig(base.but(rows=(13,), layers=1), rng, "cuda")
    (start,) = rig.pool.checkpoints.load(0, rig._ids(rig.source))
    for rows in (0, 5, 13):
        got = TritonBackend().materialize(rig.pool, 0, rig.source[0], rig.table[0], rows).cpu()
        exact, plain = (
            rig.recurrence(0, 0, start, dtype, rows) for dtype in (torch.float64, torch.float32)
        )
        assert relative_error(got, exact) <= max(3 * relative_error(plain, exact), 1.2e-7)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize(("gates", "capacity"), [("near_one", 16), ("realistic", 32)])
def test_drift_of_4096_tokens(base, gates, capacity, rng):
    case = base.but(
        heads=2, key_heads=1, gates=gates, capacity=capacity, page_rows=capacity,
        rows=(capacity,), in_place=True, layers=1,
    )  # fmt: skip
    rig = FoldRig(case, rng, "cuda")
    (start,) = rig.pool.checkpoints.load(0, rig._ids(rig.source))
    exact, plain = start.double(), start
    for tokens in range(0, 4096, capacity):
        if tokens:
            rig.fill(0, 0)
        exact = rig.recurrence(0, 0, exact, torch.float64)
        plain = rig.recurrence(0, 0, plain, torch.float32)
        rig.fold()
    (got,) = rig.pool.checkpoints.load(0, rig._ids(rig.target))
    error, own = relative_error(got.cpu(), exact), relative_error(plain, exact)
    print(f"{case}: {error:.2e}, plain fp32 {own:.2e}")
    assert error <= 3 * own


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("base", BASES, ids=str)
def test_pages_past_two_to_the_31_elements(base, rng):
    case = base.but(layers=1, rows=(16, 2))
    page = 2 * case.heads * case.dim * case.state  # int16 values of a split page
    rig = FoldRig(case, rng, "cuda", pages=2**31 // page + 16)
    assert min(rig.source + rig.target) * page > 2**31
    rig.check()


@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_captured_fold_takes_the_list_that_stands_there(base, rng):
    """Whatever the length: the launch is the same."""
    rig = FoldRig(base.but(layers=1, rows=(16, 5, 9)), rng, "cuda")
    ckpt, arrays = rig.pool.checkpoints, rig.arrays()
    bucket = len(arrays.fold_rows)
    fold(rig.pool, slice(None), ckpt.plane, ckpt.low, arrays, bucket)
    want = ckpt.storage.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fold(rig.pool, slice(None), ckpt.plane, ckpt.low, arrays, bucket)
    for count in (0, 1, 3):
        ckpt.storage[:, rig._ids(rig.target)] = -1
        arrays.fold_count.fill_(count)
        graph.replay()
        done, rest = rig.target[:count], rig.target[count:]
        assert torch.equal(ckpt.storage[:, done], want[:, done])
        assert (ckpt.storage[:, rest] == -1).all()


def test_the_same_bits_every_time(rng):
    """No order of programs, and no list around it, changes a fold."""
    for base in BASES:
        rig = FoldRig(base, rng, "cuda")
        rig.fold()
        want = rig.pool.checkpoints.storage.clone()
        for _ in range(5):
            rig.fold()
            assert torch.equal(rig.pool.checkpoints.storage, want)
        alone = dataclasses.replace(rig.case, rows=rig.case.rows[:1], pads=0)
        rig.case, rig.source, rig.target = alone, rig.source[:1], rig.target[:1]
        rig.table = rig.table[:1]
        rig.fold()
        assert torch.equal(rig.pool.checkpoints.storage, want)
