"""The delta-rule decode kernels in Triton's interpreter: against the torch backend, and against the
float64 recurrence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import GDNSpec, InputError, KDASpec, StatePool
from replayinfer.backends.triton import TritonBackend
from replayinfer.testing import assert_bitwise_equal, delta_inputs

from ..backends.world import EPSILON, Case, World
from .delta_pair import DeltaCase, DeltaPair, launching
from .vary import vary

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
SMALL = DeltaCase(heads=2, key_heads=1, batch=2, pads=1, capacity=2, steps=3)
SPLIT = [SMALL, SMALL.but(family="kda")]
FUSED = [base.but(fused=True) for base in SPLIT]


@pytest.mark.parametrize(
    "case",
    vary(SPLIT, format=["fp32", "fp32_split", "bf16", "fp16"])
    + vary(FUSED, format=["fp32_split", "fp16"]),
    ids=str,
)
def test_formats(case, rng):
    pair = DeltaPair(case, rng)
    for step in range(case.steps):
        pair.step([1, int(step != 1)])
    pair.check()
    assert pair.worlds[1][2].counters.folds


@pytest.mark.parametrize(
    "case",
    vary(
        SPLIT,
        gate=["log"],
        norm=["none"],
        beta=["sigmoid2"],
        rows=[4],
        page_rows=[1],
        dim=[20],
        state=[24],
    )
    + vary(SPLIT[:1], scale=[0.37], layers=[2], dtype=[torch.float16])
    + vary(FUSED[:1], norm=["none"], beta=["given"])
    + vary(FUSED[1:], gate=["log"], dtype=[torch.float16])
    + [SMALL.but(family="kda", gate="bounded")],
    ids=str,
)
def test_variations(case, rng):
    """Of the layer and of what it is launched with; blocks of 4 rows make several of each."""
    DeltaPair(case.but(format="fp32", batch=1), rng).decode().check()


@pytest.mark.parametrize(
    "case",
    [
        base.but(heads=2 * ratio)
        for base, ratios in zip(SPLIT + FUSED, ((1, 2, 3, 4, 8), (3, 8), (4,), ()), strict=True)
        for ratio in ratios
    ],
    ids=str,
)
def test_value_heads_of_a_key_head(case, rng):
    DeltaPair(case.but(key_heads=2, batch=1, pads=0, steps=2), rng).decode().check()


@pytest.mark.parametrize(("dim", "state"), [(64, 64), (128, 128), (64, 256)])
@pytest.mark.parametrize("base", SPLIT + FUSED, ids=str)
def test_real_head_sizes(base, dim, state, rng):
    """fp32 all through: 1e-6 over sums of as many products as a model has."""
    case = base.but(
        dim=dim, state=state, heads=1, batch=1, pads=0, steps=2, dtype=torch.float32, format="fp32"
    )
    DeltaPair(case, rng).decode().check()


@pytest.mark.parametrize("format", ["fp32_split", "bf16", "fp16"])
@pytest.mark.parametrize("base", SPLIT, ids=str)
def test_real_head_sizes_read_in_pairs(base, format, rng):
    case = base.but(dim=64, state=128, heads=1, batch=1, pads=0, steps=2, format=format)
    DeltaPair(case, rng).decode().check()


@pytest.mark.parametrize(
    "case",
    vary(SPLIT + FUSED, capacity=[1, 3])
    + vary([SPLIT[0], FUSED[1]], capacity=[33])
    + vary([SPLIT[1].but(capacity=11), FUSED[0].but(capacity=11)], page_rows=[4, 16]),
    ids=str,
)
def test_capacities(case, rng):
    """Also histories longer than a block of rows, in pages shorter and longer than that."""
    case = case.but(heads=1, batch=1, pads=0, format="fp32", dtype=torch.float32)
    pair = DeltaPair(case, rng)
    for _ in range(case.capacity + 2):
        pair.step([1])
    pair.check()
    assert pair.worlds[1][2].counters.folds


@pytest.mark.parametrize(
    ("family", "gate", "gates", "fused"),
    [
        ("gdn", "softplus", "extreme", False),
        ("gdn", "softplus", "near_one", True),
        ("gdn", "log", "extreme", True),
        ("kda", "softplus", "extreme", False),
        ("kda", "softplus", "near_one", True),
        ("kda", "log", "extreme", True),
        ("kda", "bounded", "extreme", True),
        ("kda", "bounded", "near_one", False),
    ],
)
def test_against_the_recurrence(family, gate, gates, fused, rng):
    """About as near to float64 as the plain fp32 recurrence is, in every head.

    Six heads have an extreme rate each. Over so few numbers the plain error is a matter of luck,
    hence a factor of 6, and four units in the last place in any case.
    """
    drawn = DeltaCase(family=family, heads=6, key_heads=3, gate=gate, fused=fused)
    case = Case(
        drawn.spec, tokens=5, batch=1, pads=1, capacity=3, max_window=1, page_rows=2,
        format="fp32" if fused else "fp32_split", gates=gates,
    )  # fmt: skip
    with launching(drawn):
        World(case, rng, backend="triton").decode().check(factor=6, floor=4 * EPSILON)


def test_a_gate_that_erases_everything(rng):
    """A log decay of minus infinity: what came before is gone, and nothing is NaN."""
    for base in SPLIT + FUSED:
        case = base.but(gate="log", heads=1, batch=1, pads=0, capacity=3)
        pair = DeltaPair(case, rng, erase=(1,))
        for _ in range(3):
            pair.step([1])
        pair.check()


def test_pairs_across_words_are_refused(rng):
    case = SMALL.but(batch=1, pads=0)
    pool, sequences, wrapper = DeltaPair(case, rng).worlds[1]
    wrapper.plan(sequences)
    wrapper.fold()
    inputs = delta_inputs(case.spec, 1, 1, case.dtype, rng)
    for name in ("q", "k"):
        odd = torch.zeros(inputs[name].numel() + 1, dtype=case.dtype)[1:]
        tokens = inputs | {name: odd.view_as(inputs[name])}
        before = {field: rows.clone() for field, rows in pool.inputs.fields.items()}
        with launching(case), pytest.raises(InputError, match=f"^{name}: got bf16 at an address 2"):
            wrapper.run(2, **tokens)
        for field, rows in pool.inputs.fields.items():
            assert_bitwise_equal(rows, before[field], field)


def test_a_compiler_takes_them_too():
    script = Path(__file__).with_name("lowering.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_says_what_it_does_not_serve():
    backend = TritonBackend()
    odd = StatePool(GDNSpec(heads=2, dim=4, state=5), [0], 1)
    assert "state=5" in (backend.supports(odd) or "")
    drafts = StatePool(KDASpec(heads=2, dim=4, state=4), [0], 1, max_window=17, capacity=20)
    assert "max_window=17" in (backend.supports(drafts) or "")
