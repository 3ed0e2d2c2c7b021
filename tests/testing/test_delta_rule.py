"""The delta-rule oracles against explicit matrix products and the replayed (WY) form."""

import pytest
import torch

from replayinfer.spec import GDNSpec, KDASpec
from replayinfer.testing import (
    delta_inputs,
    delta_weights,
    gdn_recurrence,
    initial_states,
    kda_recurrence,
    recurrence,
    relative_error,
)
from replayinfer.testing.gates import beta_value, l2_normalise, softplus_gate

TOKENS = 9
BASE = {"heads": 6, "key_heads": 2, "dim": 3, "state": 5}


def matrix_product(S0, q, k, v, log_decay, beta, scale):
    """S_t = S_{t-1} diag(e^g) (I - b k k^T) + b v k^T, each state from S0 with no recurrence."""
    tokens, heads, dim = v.shape
    channels, ratio = k.shape[-1], heads // k.shape[1]
    y = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    final = torch.zeros(heads, dim, channels, dtype=torch.float64)
    eye = torch.eye(channels, dtype=torch.float64)
    for h in range(heads):
        keys, queries = k[:, h // ratio], q[:, h // ratio]
        factors = [
            torch.diag(log_decay[t, h].expand(channels).exp())
            @ (eye - beta[t, h] * torch.outer(keys[t], keys[t]))
            for t in range(tokens)
        ]
        for t in range(tokens):
            terms = [S0[h].double()]
            terms += [beta[j, h] * torch.outer(v[j, h], keys[j]) for j in range(t + 1)]
            S = torch.zeros(dim, channels, dtype=torch.float64)
            for first, term in enumerate(terms):  # S0 passes all factors, write j those after it
                for factor in factors[first : t + 1]:
                    term = term @ factor
                S = S + term
            y[t, h] = scale * (S @ queries[t])
        final[h] = S
    return y, final


@pytest.mark.parametrize("gates", ["realistic", "near_one", "strong", "extreme"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"key_heads": 6},
        {"key_heads": 1},
        {"gate": "log"},
        {"beta": "sigmoid2"},
        {"beta": "given"},
        {"norm": "none"},
        {"norm_eps": 1e-2},
        {"scale": 0.7},
    ],
    ids=str,
)
def test_gdn_equals_the_matrix_product(gates, change, rng):
    spec = GDNSpec(**{**BASE, **change})
    weights = delta_weights(spec, rng, gates)
    inputs = {n: t[0] for n, t in delta_inputs(spec, TOKENS, 1, torch.float32, rng, gates).items()}
    S0 = initial_states(spec, 1, rng)[0]
    y, final = recurrence(spec, S0, inputs, weights)

    q, k, v = (inputs[n].double() for n in "qkv")
    if spec.norm == "l2":
        q, k = l2_normalise(q, spec.norm_eps), l2_normalise(k, spec.norm_eps)
    g = inputs.get("g")
    if g is None:
        a, A_log, bias = (t.double() for t in (inputs["a"], weights["A_log"], weights["dt_bias"]))
        g = softplus_gate(a, A_log, bias)
    beta = beta_value(inputs["b"].double(), spec.beta)
    scale = spec.state**-0.5 if spec.scale is None else spec.scale
    want_y, want_final = matrix_product(S0, q, k, v, g.double()[..., None], beta, scale)
    # Reading out of an erased state cancels to almost nothing: held against the head's own size.
    assert relative_error(y, want_y, keep=(1,)) < 1e-11
    assert relative_error(final, want_final, keep=(0,)) < 1e-11


@pytest.mark.parametrize("gate", ["softplus", "bounded", "log"])
@pytest.mark.parametrize("flat_bias", [False, True])
def test_kda_equals_the_matrix_product(gate, flat_bias, rng):
    heads, channels, dim = 4, 5, 3
    q, k = (torch.randn(TOKENS, 2, channels, generator=rng) for _ in range(2))
    v, S0 = (torch.randn(n, heads, dim, generator=rng) for n in (TOKENS, channels))
    S0 = S0.permute(1, 2, 0)
    a = torch.randn(TOKENS, heads, channels, generator=rng)
    b = torch.randn(TOKENS, heads, generator=rng)
    A_log, bias = torch.randn(heads, generator=rng), torch.randn(heads, channels, generator=rng)
    inner = a.double() + bias.double()
    slope = A_log.double().exp()[:, None]
    g = (
        -slope * torch.log1p(inner.exp())
        if gate == "softplus"
        else -4.0 / (1 + (-slope * inner).exp())
    )
    raw = {"a": a, "A_log": A_log, "dt_bias": bias.flatten() if flat_bias else bias}
    y, final = kda_recurrence(
        S0, q, k, v, b=b, gate=gate, lower_bound=-4.0, **({"g": g} if gate == "log" else raw)
    )
    want_y, want_final = matrix_product(
        S0,
        l2_normalise(q.double(), 1e-6),
        l2_normalise(k.double(), 1e-6),
        v.double(),
        g,
        torch.sigmoid(b.double()),
        channels**-0.5,
    )
    assert relative_error(y, want_y, keep=(0, 1)) < 1e-11
    assert relative_error(final, want_final, keep=(0,)) < 1e-11


def test_kda_with_equal_channels_is_gdn(rng):
    S0 = torch.randn(2, 3, 5, generator=rng)
    q, k, v = (torch.randn(TOKENS, 2, n, generator=rng) for n in (5, 5, 3))
    g, b = -torch.rand(TOKENS, 2, generator=rng), torch.randn(TOKENS, 2, generator=rng)
    one = gdn_recurrence(S0, q, k, v, g=g, b=b, gate="log")
    per_channel = g[..., None].expand(-1, -1, 5)
    two = kda_recurrence(S0, q, k, v, g=per_channel, b=b, gate="log")
    assert relative_error(one[0], two[0]) < 1e-13
    assert relative_error(one[1], two[1]) < 1e-13


def test_the_corrected_value_replays_linearly(rng):
    """u from the triangular system of DESIGN section 2 rebuilds the final state from S0."""
    spec = GDNSpec(heads=1, key_heads=1, dim=4, state=6, gate="log", beta="given", norm="none")
    inputs = {n: t[0] for n, t in delta_inputs(spec, TOKENS, 1, torch.float64, rng).items()}
    S0 = initial_states(spec, 1, rng)[0].double()
    _, final = recurrence(spec, S0, inputs, {})
    k, v = inputs["k"][:, 0], inputs["v"][:, 0]
    g, beta = inputs["g"][:, 0].double(), inputs["b"][:, 0].double()
    since = g.cumsum(0)  # decay from the checkpoint up to each row
    A = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    for i in range(TOKENS):
        for j in range(i):
            A[i, j] = beta[i] * g[j + 1 : i + 1].sum().exp() * (k[i] @ k[j])
    rhs = beta[:, None] * (v - since.exp()[:, None] * (k @ S0[0].T))
    u = torch.linalg.solve_triangular(torch.eye(TOKENS) + A, rhs, upper=False, unitriangular=True)
    replayed = since[-1].exp() * S0[0]
    for j in range(TOKENS):
        replayed = replayed + g[j + 1 :].sum().exp() * torch.outer(u[j], k[j])
    assert relative_error(replayed, final[0]) < 1e-13


def test_batch_axes_trace_and_beta_itself(rng):
    spec = GDNSpec(**BASE)
    weights = delta_weights(spec, rng)
    inputs = delta_inputs(spec, TOKENS, 3, torch.float32, rng)
    S0 = initial_states(spec, 3, rng)
    trace = []
    y, final = recurrence(spec, S0, inputs, weights, trace=trace)
    assert len(trace) == TOKENS
    assert torch.equal(trace[-1], final)
    for b in range(3):
        y_b, final_b = recurrence(spec, S0[b], {n: t[b] for n, t in inputs.items()}, weights)
        # Not bit for bit: torch may add up a sum in another order at another shape.
        assert relative_error(y[b], y_b) < 1e-13
        assert relative_error(final[b], final_b) < 1e-13
    given = {n: t for n, t in inputs.items() if n != "b"}
    given["beta"] = torch.sigmoid(inputs["b"].double())
    used = {n: w for n, w in weights.items() if not n.startswith("conv_")}
    assert relative_error(gdn_recurrence(S0, **given, **used)[0], y) < 1e-13


def test_errors_of_the_standard_formats_are_those_of_the_design(rng):
    """DESIGN: after 2,048 tokens plain fp32 has 5e-7, a bf16 state written every token 2e-2."""
    spec = GDNSpec(heads=1, key_heads=1, dim=128, state=128)
    weights = delta_weights(spec, rng, "near_one")
    inputs = {
        n: t[0] for n, t in delta_inputs(spec, 2048, 1, torch.float32, rng, "near_one").items()
    }
    S0 = torch.zeros(spec.state_shape)
    _, exact = recurrence(spec, S0, inputs, weights)
    _, fp32 = recurrence(spec, S0, inputs, weights, torch.float32)
    _, bf16 = recurrence(spec, S0, inputs, weights, torch.float32, state_rounding=torch.bfloat16)
    assert 1e-7 < relative_error(fp32, exact) < 2e-6
    assert 4e-3 < relative_error(bf16, exact) < 1e-1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"gate": "exp"}, "gate: got 'exp'"),
        ({"gate": "bounded"}, "gate: got 'bounded'"),
        ({"gate": "log"}, "gate: got 'log' without g"),
        ({"gate": "softplus"}, "without a and A_log"),
        ({"gate": "log", "g": True, "b": None}, "beta: got both or neither"),
        ({"gate": "log", "g": True, "beta": True}, "beta: got both or neither"),
        ({"gate": "log", "g": True, "norm": "rms"}, "norm: got 'rms'"),
    ],
    ids=str,
)
def test_wrong_variants_are_refused(call, message):
    heads = torch.zeros(1, 1)
    call = {n: heads if v is True else v for n, v in {"b": True, **call}.items()}
    q = torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match=message):
        gdn_recurrence(torch.zeros(1, 2, 2), q, q, q, **call)


@pytest.mark.parametrize("gate", ["softplus", "bounded", "log"])
def test_recurrence_passes_a_kda_spec_on(gate, rng):
    spec = KDASpec(**BASE, gate=gate, lower_bound=-3.0, beta="sigmoid2", norm_eps=1e-2, scale=0.7)
    weights = delta_weights(spec, rng)
    inputs = {n: t[0] for n, t in delta_inputs(spec, TOKENS, 1, torch.float32, rng).items()}
    S0 = initial_states(spec, 1, rng)[0]
    got = recurrence(spec, S0, inputs, weights)
    used = {n: w for n, w in weights.items() if not n.startswith("conv_")}
    options = {"beta_rule": "sigmoid2", "norm_eps": 1e-2, "scale": 0.7, "lower_bound": -3.0}
    want = kda_recurrence(S0, gate=gate, **options, **inputs, **used)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
