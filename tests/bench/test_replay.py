"""Our arm: a cycle of steps in the steady state, and the bytes that it must move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.backends.torch import TorchBackend
from replayinfer.bench import replay
from replayinfer.bench.replay import bytes_per_step, make_steps
from replayinfer.formats import get_format

SPECS = [
    Mamba2Spec(heads=2, dim=4, state=8, groups=1),
    GDNSpec(heads=4, dim=4, state=8, key_heads=2),
    KDASpec(heads=2, dim=4, state=8, key_heads=2),
]


class Noting:
    """The torch backend, which notes what it is asked to do."""

    name = "noting"

    def __init__(self):
        self.calls = []
        self.outputs = []

    def supports(self, pool):
        return None

    def prefers_direct(self, pool, bucket):
        return bucket <= 2

    def _ask(self, name, pool, plan, *rest):
        layer = rest[0] if rest else None
        self.calls.append((name, plan, layer))
        getattr(TorchBackend(), name)(pool, plan, *rest)
        if rest:
            self.outputs.append(rest[-1])

    def __getattr__(self, name):
        if name not in ("fold", "conv", "readout", "direct"):
            raise AttributeError(name)
        return lambda pool, plan, *rest: self._ask(name, pool, plan, *rest)


def steps_of(spec, backend, **options):
    settings = {"batch": 6, "layers": 2, "capacity": 3, "format": "fp32_split"}
    settings |= {"dtype": torch.bfloat16, "device": torch.device("cpu")} | options
    return make_steps(spec, backend=backend, **settings)


@pytest.mark.parametrize("scope", ["ssm", "mixer"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_a_cycle_folds_every_sequence_once_and_levels_the_folds(spec, scope):
    backend = Noting()
    steps = steps_of(spec, backend, scope=scope)
    assert (steps.steps, steps.direct, steps.backend) == (3, False, "noting")
    steps.launch()
    per_layer = ["conv", "readout"] if scope == "mixer" else ["readout"]
    wanted = ["fold", *[(name, layer) for layer in (0, 1) for name in per_layer]] * 3
    got = [name if layer is None else (name, layer) for name, _, layer in backend.calls]
    assert got == wanted

    plans = [plan for name, plan, _ in backend.calls if name == "fold"]
    assert [plan.fold_count for plan in plans] == [2, 2, 2]
    folded = np.concatenate([plan.slots[plan.fold] for plan in plans])
    assert sorted(folded) == list(range(6))
    for plan in plans:
        assert set(plan.fold_rows[plan.fold]) == {3}
        assert sorted(plan.starts) == [0, 0, 1, 1, 2, 2]
        assert (plan.arrays.table >= 0).all()
    assert all(out.isfinite().all() and out.any() for out in backend.outputs)


def test_convolved_rows_are_what_the_step_reads():
    backend = Noting()
    spec = SPECS[0]
    steps_of(spec, backend, scope="mixer").launch()
    convolved = [out for out in backend.outputs if out.shape[-1] == spec.conv_channels]
    assert len(convolved) == 6
    first, second, _ = convolved[::2]
    assert first.data_ptr() == second.data_ptr() != convolved[1].data_ptr()


@pytest.mark.parametrize(
    ("direct", "batch", "chosen"),
    [("auto", 2, True), ("auto", 3, False), ("never", 2, False), ("always", 3, True)],
)
def test_direct_steps_where_they_are_faster(direct, batch, chosen):
    backend = Noting()
    steps = steps_of(SPECS[0], backend, batch=batch, direct=direct)
    assert steps.direct is chosen
    assert steps.steps == (1 if chosen else 3)
    steps.launch()
    steps.launch()  # a graph replays a step on the same plan
    names = {name for name, _, _ in backend.calls}
    assert names == ({"fold", "direct"} if chosen else {"fold", "readout"})
    if chosen:
        assert {plan.fold_count for _, plan, _ in backend.calls} == {0}


def test_a_gate_after_the_step_goes_into_ours(monkeypatch):
    seen = []
    backend = Noting()
    monkeypatch.setattr(
        Noting, "_ask", lambda self, name, pool, plan, *rest: seen.append((name, rest))
    )
    for gated in (False, True):
        steps_of(SPECS[0], backend, gated=gated, layers=1).launch()
    inputs = [rest[1] for name, rest in seen if name == "readout"]
    assert ["z" in given for given in inputs] == [False] * 3 + [True] * 3


def test_nothing_in_the_pool_is_zero(monkeypatch):
    pools = []
    backend = Noting()
    monkeypatch.setattr(
        Noting,
        "supports",
        lambda self, pool: pools.append(pool),  # and no reason
    )
    for spec in SPECS:
        steps_of(spec, backend)
    for pool in pools:
        every = torch.arange(pool.sizes.checkpoint_pages)
        for index in range(len(pool.layers)):
            assert (pool.checkpoints.load(index, every) != 0).all()
        for name, rows in pool.inputs.fields.items():
            assert (rows != 0).double().mean() > 0.99, name
        assert (pool.conv.rows != 0).double().mean() > 0.99


SUPER = Mamba2Spec(heads=128, dim=64, state=128, groups=8)


def test_bytes_of_the_table_in_the_docs():
    """4 bytes a value: 117 us of planes, 29 of folds, 9 of rows at 4.57 TB/s and batch 256."""
    fmt = get_format("fp32_split")
    moved = bytes_per_step(SUPER, fmt, torch.bfloat16, batch=256, capacity=16)
    planes = 256 * 128 * 64 * 128 * 2
    row = (128 * 64 + 8 * 128) * 2 + 128 * 4
    rows = 256 * row * (7.5 + 1)
    folds = 256 * (2 * 128 * 64 * 128 * 4 + 16 * row) / 16
    assert moved == round(planes + folds + rows)
    assert round(planes / 4.57e6) == 117
    assert round(moved / 4.57e6) == pytest.approx(155, abs=3)


def test_bytes_of_direct_steps_and_of_mixers():
    fmt = get_format("fp32_split")
    both = {"batch": 3, "capacity": 4}
    direct = bytes_per_step(SUPER, fmt, torch.bfloat16, direct=True, **both)
    assert direct == 3 * 128 * 64 * 128 * 4 * 2
    for is_direct in (False, True):
        ssm, mixer = (
            bytes_per_step(SUPER, fmt, torch.bfloat16, direct=is_direct, scope=scope, **both)
            for scope in ("ssm", "mixer")
        )
        assert mixer - ssm == 3 * 4 * SUPER.conv_channels * 2  # three rows read, one written
    assert dataclasses.replace(SUPER, conv_width=0).conv_width == 0
    assert replay.__all__ == ["ReplaySteps", "bytes_per_step", "make_steps"]
