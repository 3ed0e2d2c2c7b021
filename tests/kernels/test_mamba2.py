"""Mamba-2's kernels in Triton's interpreter, against the torch backend."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import InputError, Mamba2Spec, StatePool
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.launch import lookup as launch
from replayinfer.testing import mamba2_inputs

from .pair import Case, Pair
from .vary import vary

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
BASE = Case()


def force(monkeypatch, case: Case) -> None:
    """Take the one kernel or the two, whatever the table says of so small a shape."""
    chosen = launch.lookup

    def lookup(op, spec, *rest):
        if op == "fused" and case.fused is not None:
            return launch.LaunchConfig(num_warps=1, rows=8) if case.fused else None
        return chosen(op, spec, *rest)

    monkeypatch.setattr(launch, "lookup", lookup)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(
    "case",
    vary(
        [BASE],
        format=["fp32", "fp32_split", "bf16", "fp16"],
        dtype=[torch.float32, torch.float16],
        z=[True],
        softplus=[False],
        dim=[20],
        state=[24],
        groups=[2],
        layers=[2],
    ),
    ids=str,
)
def test_decode(case, fused, rng, monkeypatch):
    case = dataclasses.replace(case, fused=fused)
    force(monkeypatch, case)
    pair = Pair(case, rng)
    for step in range(case.steps):
        pair.step([1, int(step % 3 != 2)])
    assert pair.worlds[1][2].counters.folds
    pair.check()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_history_longer_than_a_block(fused, rng, monkeypatch):
    case = Case(heads=2, groups=1, capacity=18, page_rows=4, batch=1, steps=19, fused=fused)
    force(monkeypatch, case)
    pair = Pair(case, rng)
    for _ in range(case.steps):
        pair.step([1])
    pair.check()


def test_real_head_sizes(rng, monkeypatch):
    case = Case(heads=1, groups=1, dim=80, state=128, batch=1, pads=0, capacity=3, steps=4)
    for fused in (True, False):
        case = dataclasses.replace(case, fused=fused)
        force(monkeypatch, case)
        pair = Pair(case, rng)
        for _ in range(case.steps):
            pair.step([1])
        pair.check()


def test_says_what_it_does_not_serve():
    pool = StatePool(Mamba2Spec(heads=2, dim=4, state=5), [0], 1)
    assert "state=5" in (TritonBackend().supports(pool) or "")


@pytest.mark.parametrize("odd", ["address", "stride"])
def test_refuses_pairs_that_lie_across_words(odd, rng, monkeypatch):
    force(monkeypatch, dataclasses.replace(BASE, fused=False))
    pool, sequences, wrapper = Pair(BASE, rng).worlds[1]
    bucket, spec = len(sequences), pool.spec
    inputs = mamba2_inputs(spec, 1, bucket, torch.bfloat16, rng)
    packed = torch.zeros(bucket, 1, spec.groups * spec.state + (2 if odd == "address" else 1))
    packed = packed.to(torch.bfloat16)
    values = packed[..., 1:-1] if odd == "address" else packed[..., :-1]
    inputs["B"] = values.view(bucket, 1, spec.groups, spec.state)
    wrapper.plan(sequences)
    wrapper.fold()
    rows = {name: field.clone() for name, field in pool.inputs.fields.items()}
    with pytest.raises(InputError, match="B: got bf16 at an address"):
        wrapper.run(2, **inputs)
    for name, field in pool.inputs.fields.items():
        assert torch.equal(field.nan_to_num(), rows[name].nan_to_num())
    wrapper.abort()
