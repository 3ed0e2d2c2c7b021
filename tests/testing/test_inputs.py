"""Generated inputs have the declared shapes and really reach the gates that they promise."""

import pytest
import torch

from replayinfer.spec import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.testing import (
    conv_inputs,
    initial_states,
    layer_inputs,
    layer_weights,
    mamba2_inputs,
    recurrence,
    split_channels,
)
from replayinfer.testing.gates import bounded_gate, mamba2_step, softplus_gate

SPECS = [
    Mamba2Spec(heads=6, dim=4, state=8, groups=2),
    Mamba2Spec(heads=6, dim=4, state=8, dt_softplus=False, conv_width=0),
    GDNSpec(heads=6, dim=4, state=8, key_heads=2),
    GDNSpec(heads=6, dim=4, state=8, key_heads=3, gate="log", beta="given", norm="none"),
    GDNSpec(heads=6, dim=4, state=8, key_heads=1, beta="sigmoid2", conv_width=2),
    KDASpec(heads=6, dim=4, state=8, key_heads=3),
    KDASpec(heads=6, dim=4, state=8, key_heads=6, gate="log"),
    KDASpec(heads=6, dim=4, state=8, key_heads=6, gate="bounded"),
]
NAMES = [f"{spec.family}-{i}" for i, spec in enumerate(SPECS)]


def log_decays(spec, rng, gates, tokens=64):
    weights = layer_weights(spec, rng, gates)
    inputs = layer_inputs(spec, tokens, 2, torch.float32, rng, gates)
    if isinstance(spec, Mamba2Spec):
        dt = mamba2_step(
            inputs["dt"].double(), weights.get("dt_bias"), dt_softplus=spec.dt_softplus
        )
        return weights["A"].double() * dt
    if spec.gate == "log":
        return inputs["g"].double()
    a, A_log, bias = (t.double() for t in (inputs["a"], weights["A_log"], weights["dt_bias"]))
    if isinstance(spec, KDASpec):
        A_log = A_log[:, None]
    if spec.gate == "bounded":
        return bounded_gate(a, A_log, bias, lower_bound=spec.lower_bound)
    return softplus_gate(a, A_log, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_shapes_and_types_are_those_the_spec_declares(spec, dtype, rng):
    inputs = layer_inputs(spec, 5, 3, dtype, rng)
    declared = {field.name: field for field in spec.input_fields if not field.optional}
    assert set(inputs) == set(declared)
    for name, tensor in inputs.items():
        dims = [getattr(spec, dim) for dim in declared[name].dims]
        assert list(tensor.shape) == [3, 5, *dims], name
        assert tensor.dtype in (
            (dtype, torch.float32) if declared[name].kind == "gate" else (dtype,)
        )
    weights, fields = layer_weights(spec, rng), {f.name: f for f in spec.weight_fields}
    assert {name for name, field in fields.items() if field.default is None} <= set(weights)
    for name, tensor in weights.items():
        assert tuple(tensor.shape) == fields[name].shape
        assert tensor.dtype == torch.float32
    assert initial_states(spec, 3, rng).shape == (3, *spec.state_shape)


@pytest.mark.parametrize("gates", ["realistic", "near_one", "strong", "extreme"])
@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_inputs_run_and_stay_finite(spec, gates, rng):
    weights = layer_weights(spec, rng, gates)
    inputs = layer_inputs(spec, 40, 2, torch.float32, rng, gates)
    S0 = initial_states(spec, 2, rng)
    for dtype in (torch.float64, torch.float32):
        y, final = recurrence(spec, S0, inputs, weights, dtype)
        assert torch.isfinite(y).all()
        assert torch.isfinite(final).all()


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_gates_reach_what_they_promise(spec, rng):
    near, strong = (log_decays(spec, rng, gates) for gates in ("near_one", "strong"))
    assert near.min() > -2e-3
    assert near.max() < 0
    assert strong.min() > -30
    assert strong.max() < -0.2
    extreme = log_decays(spec, rng, "extreme")
    if isinstance(spec, KDASpec) and spec.gate == "bounded":
        assert extreme.min() == spec.lower_bound
        assert extreme.max() > -1e-30
        return
    assert torch.isclose(extreme, torch.tensor(-1280.0, dtype=torch.float64)).any()
    assert extreme.min() < -1e9
    assert extreme.max() > -1e-40
    assert (extreme <= 0).all()


def test_extreme_steps_reach_both_ends_as_given(rng):
    spec = SPECS[0]
    dt = mamba2_inputs(spec, 32, 1, torch.bfloat16, rng, "extreme")["dt"]
    assert dt.min() == -80
    assert dt.max() == 80
    assert (layer_weights(spec, rng, "extreme")["dt_bias"] == 0).all()


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[5]], ids=["mamba2", "gdn", "kda"])
def test_split_channels(spec, rng):
    rows = conv_inputs(spec, 5, 2, torch.float32, rng)
    parts = split_channels(spec, rows)
    assert torch.equal(torch.cat([part.flatten(2) for part in parts.values()], dim=-1), rows)
    inputs = layer_inputs(spec, 5, 2, torch.float32, rng)
    assert all(inputs[name].shape == part.shape for name, part in parts.items())


def test_a_generator_makes_the_same_again():
    one, two = (
        layer_inputs(SPECS[0], 3, 2, torch.float32, torch.Generator().manual_seed(5), "extreme")
        for _ in range(2)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
