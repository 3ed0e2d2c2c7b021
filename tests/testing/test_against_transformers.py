"""The oracles against the plain torch functions of transformers, which we did not write.

Theirs compute in float32, so they are held to the budget of our own plain float32 computation.
"""

import pytest
import torch

from replayinfer.spec import GDNSpec, Mamba2Spec
from replayinfer.testing import (
    assert_within_budget,
    causal_conv,
    delta_inputs,
    delta_weights,
    initial_states,
    kda_recurrence,
    mamba2_inputs,
    mamba2_weights,
    recurrence,
)
from replayinfer.testing.gates import softplus_gate

pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = 21
MAMBA2 = Mamba2Spec(heads=4, dim=8, state=16, groups=2)
GDN = GDNSpec(heads=4, key_heads=2, dim=8, state=16)


def model_function(family, name):
    module = pytest.importorskip(
        f"transformers.models.{family}.modeling_{family}",
        reason=f"this transformers has no {family}",
    )
    if not hasattr(module, name):
        pytest.skip(f"this transformers has no {family}.{name}")
    return getattr(module, name)


def both_references(spec, S0, inputs, weights):
    exact = recurrence(spec, S0, inputs, weights)
    return exact, recurrence(spec, S0, inputs, weights, torch.float32)


@pytest.mark.parametrize("gates", ["realistic", "near_one", "strong"])
def test_mamba2_decode_step(gates, rng):
    update = model_function("nemotron_h", "mamba2_selective_state_update")
    w = mamba2_weights(MAMBA2, rng, gates)
    inputs = mamba2_inputs(MAMBA2, TOKENS, 2, torch.float32, rng, gates, with_z=True)
    S0 = initial_states(MAMBA2, 2, rng)
    (y, final), (y32, final32) = both_references(MAMBA2, S0, inputs, w)
    _, dim, state = MAMBA2.state_shape
    theirs, theirs_state = torch.empty(y.shape), S0.clone()
    for t in range(TOKENS):
        theirs[:, t] = update(
            theirs_state,
            inputs["x"][:, t],
            inputs["dt"][:, t, :, None].expand(-1, -1, dim),
            w["A"][:, None, None].expand(-1, dim, state),
            inputs["B"][:, t],
            inputs["C"][:, t],
            w["D"][:, None].expand(-1, dim),
            z=inputs["z"][:, t],
            dt_bias=w["dt_bias"][:, None].expand(-1, dim),
            dt_softplus=True,
        )
    assert_within_budget(theirs, exact=y, rounded=y32, name="y")
    assert_within_budget(theirs_state, exact=final, rounded=final32, name="state")


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.01, 0.05)], ids=str)
@pytest.mark.parametrize("chunk", [4, 8, 32])
def test_mamba2_chunk_scan(chunk, limit, rng):
    scan = model_function("nemotron_h", "mamba2_chunk_scan")
    spec = Mamba2Spec(heads=4, dim=8, state=16, groups=2, dt_limit=limit)
    w = mamba2_weights(spec, rng)
    inputs = mamba2_inputs(spec, TOKENS, 2, torch.float32, rng)
    S0 = initial_states(spec, 2, rng)
    (y, final), (y32, final32) = both_references(spec, S0, inputs, w)
    theirs, theirs_state = scan(
        inputs["x"],
        inputs["dt"],
        w["A"],
        inputs["B"],
        inputs["C"],
        chunk_size=chunk,
        D=w["D"],
        dt_bias=w["dt_bias"],
        initial_states=S0,
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )
    # Differences of prefix sums: a few times the plain recurrence's own error.
    assert_within_budget(theirs, exact=y, rounded=y32, factor=10, name="y")
    assert_within_budget(theirs_state, exact=final, rounded=final32, factor=10, name="state")


@pytest.mark.parametrize("gates", ["realistic", "near_one", "strong", "extreme"])
def test_gated_delta_rule(gates, rng):
    rule = model_function("qwen3_next", "torch_recurrent_gated_delta_rule")
    w = delta_weights(GDN, rng, gates)
    inputs = delta_inputs(GDN, TOKENS, 2, torch.float32, rng, gates)
    S0 = initial_states(GDN, 2, rng)
    (y, final), (y32, final32) = both_references(GDN, S0, inputs, w)
    theirs, theirs_state = rule(
        inputs["q"].repeat_interleave(2, dim=2),
        inputs["k"].repeat_interleave(2, dim=2),
        inputs["v"],
        g=softplus_gate(inputs["a"], w["A_log"], w["dt_bias"]),
        beta=inputs["b"].sigmoid(),
        initial_state=S0.mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_within_budget(theirs, exact=y, rounded=y32, name="y")
    assert_within_budget(theirs_state.mT, exact=final, rounded=final32, name="state")


def test_kimi_delta_attention(rng):
    rule = model_function("kimi_linear", "recurrent_kimi_delta_attention")
    forget_gate = model_function("kimi_linear", "KimiLinearForgetGate")
    heads, channels = 2, 16

    class Config:
        linear_head_dim, linear_num_heads, hidden_size = channels, heads, 12

    gate = forget_gate(Config())
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, generator=rng)
    hidden = torch.randn(2, TOKENS, 12, generator=rng)
    q, k, v = (torch.randn(2, TOKENS, heads, channels, generator=rng) for _ in range(3))
    b = torch.randn(2, TOKENS, heads, generator=rng)
    S0 = torch.randn(2, heads, channels, channels, generator=rng)
    with torch.no_grad():
        g = gate(hidden)
        a = gate.f_b_proj(gate.f_a_proj(hidden)).unflatten(-1, (heads, channels))
        theirs, theirs_state = rule(
            q, k, v, g, b.sigmoid(), S0.mT.contiguous(), True, use_qk_l2norm_in_kernel=True
        )
        raw = {"a": a, "b": b, "A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias}
        y, final = kda_recurrence(S0, q, k, v, **raw)
        y32, final32 = kda_recurrence(S0, q, k, v, **raw, dtype=torch.float32)
    assert_within_budget(theirs, exact=y, rounded=y32, name="y")
    assert_within_budget(theirs_state.mT, exact=final, rounded=final32, name="state")


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_convolution_step(family, rng):
    update = model_function(family, "causal_conv1d_update")
    x = torch.randn(2, 1, 6, generator=rng)
    history = torch.randn(2, 3, 6, generator=rng)
    weight, bias = torch.randn(6, 4, generator=rng), torch.randn(6, generator=rng)
    theirs = update(x.mT.contiguous(), history.mT.contiguous(), weight, bias, "silu").mT
    y = causal_conv(x, weight, bias, "silu", history)
    y32 = causal_conv(x, weight, bias, "silu", history, torch.float32)
    assert_within_budget(theirs, exact=y, rounded=y32)
