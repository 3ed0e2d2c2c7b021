"""The delta-rule fold in Triton's interpreter, against the float64 recurrence and torch's fold."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.common import decay, dot
from replayinfer.testing import relative_error

from .fold_rig import EPSILON, FoldCase, FoldRig
from .vary import vary

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
GDN, KDA = FoldCase(), FoldCase(family="kda")
BASES = [GDN, KDA]
# Warps, rows and columns of a tile in the order of the matrix units.
UNITS = (2, 32, 32)


@pytest.mark.parametrize(
    "case",
    vary(
        BASES,
        format=["fp32", "fp32_split", "bf16", "fp16"],
        dtype=[torch.float32, torch.float16],
        norm=["none"],
        heads=[1, 3],
        dim=[20],
        state=[24],
        layers=[2],
        page_rows=[1, 4, 16],
        in_place=[True],
        gates=["near_one", "bounded", "edges"],
    )
    + vary(
        [base.but(format="fp32") for base in BASES],
        dtype=[torch.float32],
        norm=["none"],
        state=[24],
        in_place=[True],
        gates=["edges"],
    ),
    ids=str,
)
def test_fold(case, rng):
    FoldRig(case, rng).check()


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 1), (8, 1), (6, 3), (3, 3)])
def test_heads_that_share_keys(base, heads, key_heads, rng):
    FoldRig(base.but(heads=heads, key_heads=key_heads, rows=(2,), pads=0), rng).check()


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("capacity", [1, 2, 16, 32, 33])
def test_capacities(base, capacity, rng):
    rows = tuple(sorted({0, 1, capacity // 2, capacity}))[-2:]
    FoldRig(base.but(heads=1, capacity=capacity, page_rows=16, rows=rows, pads=1), rng).check()


@pytest.mark.parametrize("base", BASES, ids=str)
def test_every_history(base, rng):
    FoldRig(base.but(heads=1, capacity=5, page_rows=4, rows=tuple(range(6))), rng).check()


@pytest.mark.parametrize("format", ["fp32", "fp32_split", "bf16"])
@pytest.mark.parametrize(
    "sizes",
    [{"dim": 64, "state": 64}, {"dim": 128, "state": 128}, {"dim": 64, "state": 256}],
    ids=lambda s: f"{s['dim']}x{s['state']}",
)
@pytest.mark.parametrize("base", BASES, ids=str)
def test_sizes_of_models(base, sizes, format, rng):
    """As they are launched: in the matrix units' order, a head in parts."""
    case = base.but(**sizes, heads=1, format=format, rows=(3,), pads=0, tile=())
    FoldRig(case, rng).check()


# Without columns: the fold of its own that gates per channel have where ``u`` is solved for.
WHOLE = KDA.but(tile=(1, 16, 0), page_rows=4, capacity=16, rows=(16, 5, 0))


@pytest.mark.parametrize(
    "case",
    [
        *vary(
            [WHOLE],
            dtype=[torch.float32, torch.float16],
            norm=["none"],
            heads=[1, 4],
            dim=[20],
            state=[24, 48],
            layers=[2],
            page_rows=[1, 16, 64],
            in_place=[True],
            gates=["near_one", "bounded", "edges"],
        ),
        WHOLE.but(tile=(2, 32, 0), heads=1, dim=40, rows=(16,)),
        WHOLE.but(tile=(4, 64, 0), heads=1, dim=128, state=128, rows=(16,), pads=0),
        WHOLE.but(heads=1, capacity=32, rows=(32, 20), gates="bounded"),
        WHOLE.but(heads=1, capacity=33, rows=(33, 17), gates="near_one"),
        WHOLE.but(heads=1, capacity=1, rows=(1, 0)),
    ],
    ids=str,
)
def test_all_channels_at_once(case, rng):
    FoldRig(case, rng).check()


@pytest.mark.parametrize("format", ["fp32", "fp32_split", "fp16"])
def test_units_with_rows_and_columns_to_spare(format, rng):
    case = FoldCase(heads=1, dim=40, state=48, format=format, rows=(2,), tile=UNITS)
    FoldRig(case, rng).check()


@pytest.mark.parametrize("base", vary(BASES, format=["fp32_split", "fp32", "bf16"]), ids=str)
def test_materialize(base, rng):
    """Into float32 whatever the format, after any number of rows, and nothing is written."""
    rig = FoldRig(base.but(heads=1, rows=(3,), pads=0), rng)
    pool, backend = rig.pool, TritonBackend()
    before = pool.checkpoints.storage.clone()
    (start,) = pool.checkpoints.load(0, torch.tensor(rig.source))
    table = rig.table[0]
    for rows in (0, 2, 3):
        with rig.config():
            got = backend.materialize(pool, 0, rig.source[0], table, rows)
        exact, plain = (
            rig.recurrence(0, 0, start, dtype, rows) for dtype in (torch.float64, torch.float32)
        )
        assert got.dtype == torch.float32
        budget = max(3 * relative_error(plain, exact), EPSILON)
        assert relative_error(got, exact) <= budget
    assert torch.equal(pool.checkpoints.storage.nan_to_num(0), before.nan_to_num(0))


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("gates", ["near_one", "realistic"])
def test_drift_of_many_folds(base, gates, rng):
    """Checkpoints that only folds write keep the accuracy of a plain fp32 recurrence."""
    case = base.but(
        heads=1, gates=gates, capacity=16, page_rows=16, rows=(16,), in_place=True, pads=0
    )
    rig = FoldRig(case, rng)
    (start,) = rig.pool.checkpoints.load(0, torch.tensor(rig.source))
    exact, plain = start.double(), start
    for tokens in range(0, 16 * 17, 16):
        if tokens:
            rig.fill(0, 0)
        exact = rig.recurrence(0, 0, exact, torch.float64)
        plain = rig.recurrence(0, 0, plain, torch.float32)
        rig.fold()
    (got,) = rig.pool.checkpoints.load(0, torch.tensor(rig.target))
    error, own = relative_error(got, exact), relative_error(plain, exact)
    assert error <= 3 * own, f"{error}, plain fp32 {own}"


def test_alike_keys(rng):
    """Where all keys are one and every beta 1, powers of the system grow beyond fp32's digits."""
    rig = FoldRig(GDN.but(heads=1, capacity=16, page_rows=16, rows=(16,), gates="near_one"), rng)
    fields, page = rig.pool.inputs.fields, rig.table[0][0]
    for name in ("k", "k_scale"):
        fields[name][0, page] = fields[name][0, page, :1].clone()
    fields["beta"][0, page] = 1.0
    rig.check()


@triton.jit
def _decay_kernel(out_ptr, x_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, decay.exact_decay(tl.load(x_ptr + i)))


def test_exact_decay(rng):
    x = -(10.0 ** (8 * torch.rand(2048, generator=rng) - 6))
    x[:7] = torch.tensor([0.0, -0.0, -87.3, -104.0, -1280.0, -float("inf"), -1e38])
    out = torch.empty_like(x)
    _decay_kernel[(1,)](out, x, SIZE=x.numel())
    exact = torch.exp(x.double())
    normal = exact >= 2.0**-126
    error = (out - exact).abs() / exact
    assert (error <= 0.7 * EPSILON)[normal].all()
    assert (error <= 0.3 * EPSILON)[x > -0.02].all()
    assert (out[~normal] <= 2.0**-126).all()
    assert not out.isnan().any()


@triton.jit
def _terms_kernel(out_ptr, x_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    terms = dot.bf16_terms(tl.load(x_ptr + i), True)
    for t in tl.static_range(3):
        tl.store(out_ptr + t * SIZE + i, terms[t])


def test_three_terms_are_all_of_a_number(rng):
    x = torch.randn(1024, generator=rng) * 10.0 ** (20 * torch.rand(1024, generator=rng) - 10)
    out = torch.empty(3, x.numel())
    _terms_kernel[(1,)](out, x, SIZE=x.numel())
    assert torch.equal(out, out.to(torch.bfloat16).float()), "not bf16"
    assert torch.equal(out.double().sum(0), x.double())
