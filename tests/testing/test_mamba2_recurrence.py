"""The Mamba-2 oracle against DESIGN section 2's unrolled sum, which shares no code with it."""

import math

import pytest
import torch

from replayinfer.spec import Mamba2Spec
from replayinfer.testing import (
    initial_states,
    mamba2_inputs,
    mamba2_recurrence,
    mamba2_weights,
    recurrence,
    relative_error,
)

TOKENS = 9


def unrolled(spec, S0, inputs, weights):
    """y_t = exp(A d(0,t)) S0 C_t + sum_j dt_j exp(A d(j,t)) (B_j . C_t) x_j + D x_t; d by rows."""
    x, raw, B, C = (inputs[n].double() for n in ("x", "dt", "B", "C"))
    bias = weights["dt_bias"].double() if "dt_bias" in weights else torch.zeros(spec.heads)
    y = torch.zeros(len(x), spec.heads, spec.dim, dtype=torch.float64)
    final = torch.zeros(spec.state_shape, dtype=torch.float64)
    for h in range(spec.heads):
        group = h // (spec.heads // spec.groups)
        A = float(weights["A"][h])
        dt = [float(raw[t, h] + bias[h]) for t in range(len(x))]
        if spec.dt_softplus:
            dt = [max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in dt]
        dt = [min(max(v, spec.dt_limit[0]), spec.dt_limit[1]) for v in dt]
        for t in range(len(x)):
            S = math.exp(A * math.fsum(dt[: t + 1])) * S0[h].double()
            for j in range(t + 1):
                decay = math.exp(A * math.fsum(dt[j + 1 : t + 1]))
                S = S + dt[j] * decay * torch.outer(x[j, h], B[j, group])
            y[t, h] = S @ C[t, group]
            if "D" in weights:
                y[t, h] += float(weights["D"][h]) * x[t, h]
            if "z" in inputs:
                z = inputs["z"][t, h].double()
                y[t, h] *= z / (1 + torch.exp(-z))
        final[h] = S
    return y, final


BASE = {"heads": 4, "dim": 3, "state": 5, "groups": 2}


@pytest.mark.parametrize("gates", ["realistic", "near_one", "strong", "extreme"])
@pytest.mark.parametrize(
    ("change", "drop", "with_z"),
    [
        ({}, (), False),
        ({}, (), True),
        ({}, ("D", "dt_bias"), False),
        ({"groups": 1}, (), False),
        ({"groups": 4}, (), False),
        ({"dt_softplus": False}, (), False),
        ({"dt_limit": (0.01, 0.05)}, (), False),
    ],
    ids=["base", "z", "no-D-no-bias", "one-group", "group-per-head", "dt-given", "dt-limit"],
)
def test_equals_the_unrolled_sum(gates, change, drop, with_z, rng):
    spec = Mamba2Spec(**{**BASE, **change})
    weights = {n: w for n, w in mamba2_weights(spec, rng, gates).items() if n not in drop}
    inputs = mamba2_inputs(spec, TOKENS, 1, torch.float32, rng, gates, with_z=with_z)
    inputs = {n: t[0] for n, t in inputs.items()}
    S0 = initial_states(spec, 1, rng)[0]
    y, final = recurrence(spec, S0, inputs, weights)
    want_y, want_final = unrolled(spec, S0, inputs, weights)
    assert relative_error(y, want_y, keep=(0, 1)) < 1e-11
    assert relative_error(final, want_final, keep=(0,)) < 1e-11


def test_batch_axes_trace_and_split_runs(rng):
    spec = Mamba2Spec(**BASE)
    weights = mamba2_weights(spec, rng)
    inputs = mamba2_inputs(spec, TOKENS, 3, torch.float32, rng)
    S0 = initial_states(spec, 3, rng)
    trace = []
    y, final = recurrence(spec, S0, inputs, weights, trace=trace)
    assert len(trace) == TOKENS
    assert torch.equal(trace[-1], final)
    for b in range(3):
        y_b, final_b = recurrence(spec, S0[b], {n: t[b] for n, t in inputs.items()}, weights)
        assert relative_error(y[b], y_b) < 1e-13
        assert torch.equal(final[b], final_b)
    # Stopped after 4 tokens and resumed from the trace: the same bits, as the state has no sums.
    late = {n: t[:, 4:] for n, t in inputs.items()}
    y_late, final_late = recurrence(spec, trace[3], late, weights)
    assert relative_error(y_late, y[:, 4:]) < 1e-13
    assert torch.equal(final_late, final)


def test_no_tokens_change_nothing(rng):
    spec = Mamba2Spec(**BASE)
    S0 = initial_states(spec, 1, rng)
    inputs = mamba2_inputs(spec, 0, 1, torch.float32, rng)
    y, final = recurrence(spec, S0, inputs, mamba2_weights(spec, rng))
    assert y.shape == (1, 0, 4, 3)
    assert torch.equal(final, S0.double())


def test_inputs_are_not_written(rng):
    spec = Mamba2Spec(**BASE)
    inputs, weights = mamba2_inputs(spec, 5, 1, torch.float32, rng), mamba2_weights(spec, rng)
    S0 = initial_states(spec, 1, rng)
    copies = [t.clone() for t in (S0, *inputs.values(), *weights.values())]
    recurrence(spec, S0, inputs, weights, torch.float32)
    for now, copy in zip((S0, *inputs.values(), *weights.values()), copies, strict=True):
        assert torch.equal(now, copy)


def test_a_huge_gate_erases_the_history_exactly(rng):
    x, B = torch.ones(2, 1, 3), torch.ones(2, 1, 4)
    dt = torch.tensor([[1.0], [80.0]])  # the second token decays by exp(-1280)
    S0 = torch.full((1, 3, 4), 1e30)
    _, final = mamba2_recurrence(S0, x, dt, torch.tensor([-16.0]), B, B, dtype=torch.float32)
    assert torch.equal(final, torch.full((1, 3, 4), 80.0))


def test_computing_type_and_state_rounding_order_the_errors(rng):
    spec = Mamba2Spec(heads=2, dim=8, state=16)
    weights = mamba2_weights(spec, rng, "near_one")
    inputs = mamba2_inputs(spec, 512, 1, torch.float32, rng, "near_one")
    S0 = initial_states(spec, 1, rng)
    _, exact = recurrence(spec, S0, inputs, weights)
    _, fp32 = recurrence(spec, S0, inputs, weights, torch.float32)
    _, bf16 = recurrence(spec, S0, inputs, weights, torch.float32, state_rounding=torch.bfloat16)
    assert fp32.dtype == torch.float32
    assert torch.equal(bf16, bf16.bfloat16().float())
    # Near 1 the rounding of the decay itself is the same at every token: up to 512 * 2^-24.
    assert 1e-9 < relative_error(fp32, exact) < 3e-5
    assert relative_error(bf16, exact) > 100 * relative_error(fp32, exact)
