"""What the arms decode lies as a model leaves it."""

from __future__ import annotations

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.bench.work import make_work
from replayinfer.testing import split_channels

SPECS = [
    Mamba2Spec(heads=2, dim=4, state=8, groups=1),
    GDNSpec(heads=4, dim=4, state=8, key_heads=2),
    KDASpec(heads=2, dim=4, state=8, key_heads=2),
    GDNSpec(heads=4, dim=4, state=8, key_heads=2, gate="log"),
    Mamba2Spec(heads=2, dim=4, state=8, conv_width=0),
]
BF16 = torch.bfloat16


def make(spec, **options):
    settings = {"batch": 3, "layers": 2, "dtype": BF16, "state_dtype": BF16}
    return make_work(spec, **settings | {"device": torch.device("cpu")} | options)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shapes_types_and_places(spec):
    work = make(spec)
    assert work.layers == len(work.tokens) == len(work.weights) == 2
    for tokens, state, window in zip(work.tokens, work.states, work.windows, strict=True):
        assert state.shape == (3, *spec.state_shape)
        assert state.dtype == BF16
        assert tokens.rows.shape == tokens.convolved.shape == (3, spec.conv_channels)
        assert window.shape == (3, spec.conv_channels, max(spec.conv_width - 1, 0))
        for field in spec.input_fields:
            if field.optional:
                assert field.name not in tokens.inputs
                continue
            value = tokens.inputs[field.name]
            assert value.shape == (3, *(getattr(spec, d) for d in field.dims))
            assert value.stride(-1) == 1
        # The rows and the 16-bit gates are slices of one tensor, on 16 bytes.
        parts = {"rows": tokens.rows, **tokens.inputs}
        gates = [f.name for f in spec.input_fields if f.kind == "gate"]
        shared = ["rows", *(n for n in gates if parts[n].dtype == BF16)]
        stores = {parts[n].untyped_storage().data_ptr() for n in shared}
        assert len(stores) == 1
        assert all(parts[n].storage_offset() % 8 == 0 for n in shared)
        # What the step takes are views of the convolution's output.
        for name, view in split_channels(spec, tokens.convolved).items():
            assert tokens.inputs[name].data_ptr() == view.data_ptr()
            assert torch.equal(tokens.inputs[name], view)


def test_a_slice_is_not_part_of_another():
    work = make(SPECS[0], layers=1)
    tokens = work.tokens[0]
    before = tokens.inputs["dt"].clone()
    tokens.rows.fill_(float("nan"))
    assert torch.equal(tokens.inputs["dt"], before)


def test_the_same_seed_gives_the_same_work_and_another_another():
    a, b, c = make(SPECS[1]), make(SPECS[1]), make(SPECS[1], seed=1)
    assert torch.equal(a.states[1], b.states[1])
    assert torch.equal(a.tokens[1].rows, b.tokens[1].rows)
    assert not torch.equal(a.states[1], c.states[1])
    assert not torch.equal(a.states[0], a.states[1])


def test_parameters_have_values_that_a_16_bit_model_can_hold():
    for spec in SPECS[:3]:
        for name, value in make(spec).weights[0].items():
            assert value.dtype == torch.float32
            if name not in ("A", "A_log"):
                assert torch.equal(value, value.to(BF16).float()), name


def test_gate_and_bias_only_where_the_model_has_them():
    work = make(SPECS[0], gated=True, conv_bias=False)
    assert work.tokens[0].inputs["z"].shape == (3, 2, 4)
    assert not work.weights[0]["conv_bias"].any()
    assert make(SPECS[0]).weights[0]["conv_bias"].any()
    assert "z" not in make(SPECS[1], gated=True).tokens[0].inputs
