"""Field report 18: the state's type is the pool's, whatever the activations'; gates stay fp32."""

import pytest
import torch

from replayinfer import ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    assert_bitwise_equal,
    conv_inputs,
    layer_inputs,
    layer_weights,
    recurrence,
    relative_error,
)

from ..pools.kit import FORMATS, SPECS, World

ACTIVATIONS = [torch.float32, torch.bfloat16, torch.float16]
GATES = {"mamba2": "dt", "gdn": "g"}


@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", SPECS)
def test_report_18_every_activation_type_in_every_format(family, fmt, dtype, rng):
    world = World(SPECS[family], rng, capacity=3, format=fmt, dtype=dtype, layers=[0])
    pool = world.pool
    stored = {"fp32": torch.float32, "fp32_split": torch.bfloat16, "bf16": torch.bfloat16}
    assert pool.checkpoints.plane.dtype == stored.get(fmt, torch.float16)
    assert pool.inputs.fields[GATES[family]].dtype == torch.float32
    assert pool.conv.rows.dtype == dtype
    assert {w.dtype for w in pool.weights.values()} == {torch.float32}
    seqs = world.alloc(2)
    for _ in range(8):
        world.step(seqs)
    world.check()
    assert world.wrapper.materialize(seqs[0]).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["fp32", "fp32_split"])
@pytest.mark.parametrize("family", SPECS)
def test_report_18_an_fp32_state_is_not_rounded_to_the_activations(family, fmt, dtype, rng):
    """Hundreds of tokens of 16-bit activations: the state keeps an error of fp32's own size."""
    spec, tokens = SPECS[family], 200
    world = World(spec, rng, capacity=8, format=fmt, dtype=dtype, layers=[0], gates="near_one")
    inputs = layer_inputs(spec, tokens, 1, dtype, rng, "near_one")
    rows = conv_inputs(spec, tokens, 1, dtype, rng)
    (seq,) = world.pool.alloc()
    for t in range(tokens):
        world.wrapper.plan([seq])
        world.wrapper.fold()
        world.wrapper.conv(0, rows[:, t : t + 1])
        world.wrapper.run(0, **{name: x[:, t : t + 1] for name, x in inputs.items()})
        world.wrapper.commit()
    weights = {name: w[0] for name, w in world.pool.weights.items()}
    zero = torch.zeros(1, *spec.state_shape)
    _, exact = recurrence(spec, zero, inputs, weights)
    _, plain = recurrence(spec, zero, inputs, weights, torch.float32)
    _, rounded = recurrence(spec, zero, inputs, weights, torch.float32, state_rounding=dtype)
    error = relative_error(world.wrapper.materialize(seq), exact)
    assert error < max(3 * relative_error(plain, exact), 1e-6)
    assert error < relative_error(rounded, exact) / 100


@pytest.mark.parametrize("family", SPECS)
def test_report_18_gates_of_16_bits_are_computed_in_fp32(family, rng):
    """The row's gate has the bits of a float32 computation, not of a 16-bit one."""
    spec = SPECS[family]
    world = World(spec, rng, capacity=4, dtype=torch.bfloat16, layers=[0])
    (seq,) = world.pool.alloc()
    plan = world.wrapper.plan([seq])
    world.wrapper.fold()
    drawn = world.draw(plan)
    world.run(plan, drawn)
    world.wrapper.commit()
    weights = {name: w[0].double() for name, w in world.pool.weights.items()}
    raw = drawn[0][0]["dt" if family == "mamba2" else "a"][0, 0].double()
    want = torch.nn.functional.softplus(raw + weights["dt_bias"], threshold=100.0)
    if family == "gdn":
        want = -torch.exp(weights["A_log"]) * want
    table = world.pool.cursors.table[world.pool.cursors.peek(seq)]
    got = world.pool.inputs.fields[GATES[family]][0, table[0], 0]
    assert got.dtype == torch.float32
    assert relative_error(got, want) < 1e-6
    rounded = (want.bfloat16().double() / want - 1).abs()
    assert rounded.max() > 1e-4  # or the line above says nothing


@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", SPECS)
def test_report_18_gates_may_have_another_type_than_activations(family, gates, rng):
    spec = SPECS[family]
    world = World(spec, rng, dtype=torch.bfloat16, layers=[0])
    (seq,) = world.pool.alloc()
    world.wrapper.plan([seq])
    world.wrapper.fold()
    inputs = layer_inputs(spec, 1, 1, torch.bfloat16, rng)
    kinds = {f.name: f.kind for f in spec.input_fields}
    given = {n: x.to(gates) if kinds[n] == "gate" else x for n, x in inputs.items()}
    same = {n: x.float().to(gates).float() if kinds[n] == "gate" else x for n, x in inputs.items()}
    assert_bitwise_equal(world.wrapper.run(0, **given), world.wrapper.run(0, **same))


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_report_18_outputs_have_the_pools_type_or_float32(out, rng):
    world = World(SPECS["mamba2"], rng, dtype=torch.bfloat16, layers=[0])
    (seq,) = world.pool.alloc()
    plan = world.wrapper.plan([seq])
    world.wrapper.fold()
    inputs, rows = world.draw(plan)[0]
    y, conv = world.wrapper.run(0, **inputs), world.wrapper.conv(0, rows)
    assert y.dtype == conv.dtype == torch.bfloat16
    mine, mine_conv = torch.empty_like(y, dtype=out), torch.empty_like(conv, dtype=out)
    if out == torch.float16:
        with pytest.raises(ValueError, match=r"^out: got float16 .+; allowed bfloat16 or float32 "):
            world.wrapper.run(0, out=mine, **inputs)
        return
    assert_bitwise_equal(world.wrapper.run(0, out=mine, **inputs).bfloat16(), y)
    assert_bitwise_equal(world.wrapper.conv(0, rows, out=mine_conv).bfloat16(), conv)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", SPECS)
def test_report_18_torchs_default_type_changes_nothing(family, default, rng):
    """Engines load models under another default, and may decode under it."""
    spec = SPECS[family]
    weights = layer_weights(spec, rng)
    inputs = layer_inputs(spec, 2, 1, torch.float32, rng)
    rows = conv_inputs(spec, 2, 1, torch.float32, rng)

    def decode():
        pool = StatePool(spec, [0], 1, capacity=2, max_window=2, format="fp32_split")
        pool.bind(0, **weights)
        (seq,) = pool.alloc()
        wrapper = ReplayDecodeWrapper(pool, backend="torch")
        outputs = []
        for _ in range(3):
            wrapper.plan([seq], 2)
            wrapper.fold()
            outputs += [wrapper.conv(0, rows), wrapper.run(0, **inputs)]
            wrapper.commit()
        return [*outputs, wrapper.materialize(seq)]

    want = decode()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = decode()
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b)


def test_nothing_is_recorded_for_gradients(rng):
    """Activations want gradients outside of no_grad: a graph would grow with every step."""
    world = World(SPECS["gdn"], rng, capacity=2, layers=[0])
    (seq,) = world.pool.alloc()
    for _ in range(4):
        plan = world.wrapper.plan([seq])
        world.wrapper.fold()
        inputs, rows = world.draw(plan)[0]
        conv = world.wrapper.conv(0, rows.requires_grad_())
        y = world.wrapper.run(0, **{name: x.requires_grad_() for name, x in inputs.items()})
        world.wrapper.commit()
        assert not y.requires_grad
        assert not conv.requires_grad
        tensors = [world.pool.checkpoints.storage, world.pool.conv.rows]
        assert not any(t.requires_grad for t in (*tensors, *world.pool.inputs.fields.values()))
