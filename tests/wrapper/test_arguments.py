"""Bad input gets one clear error and changes nothing; unusual but lawful input works."""

import numpy as np
import pytest
import torch

from replayinfer import GDNSpec, InputError, Mamba2Spec, PlanError, ReplayDecodeWrapper, StatePool
from replayinfer.testing import assert_bitwise_equal, assert_untouched, layer_inputs, split_channels

from .rig import LAYERS, SPECS, Rig

SHAPE = r"got .*; allowed .*; "


@pytest.fixture(params=SPECS, ids=lambda s: s.family)
def ready(request, rng):
    """A rig with a folded plan of 2 sequences in a bucket of 3, windows of 2, and good inputs."""
    rig = Rig(request.param, rng, sequences=2, dtype=torch.bfloat16)
    rig.step(3)
    rig.wrapper.plan(rig.sequences, 2, bucket=3)
    rig.wrapper.fold()
    inputs = layer_inputs(rig.spec, 2, 3, torch.bfloat16, rng)
    if rig.spec.family == "mamba2":
        inputs["z"] = torch.randn(inputs["x"].shape, generator=rng).bfloat16()
    return rig, inputs


def refuses(rig, error, message, call, *args, **kwargs):
    before = rig.everything()
    with pytest.raises(error, match=message):
        call(*args, **kwargs)
    assert_untouched(before, rig.everything())


def spoiled(field, good):
    """Wrong versions of one input, by what is wrong."""
    wrong = {
        "a float64": good.double(),
        "an integer": good.int(),
        "another device": torch.empty_like(good, device="meta"),
        "a list": good.tolist(),
        "an array": good.float().numpy(),
        "one axis too few": good[0],
        "one axis too many": good[None],
        "strided": torch.cat([good, good], -1)[..., ::2],
    }
    if field.kind == "activation":
        wrong["another activation type"] = good.half()
    for axis in range(good.dim()):
        wrong[f"axis {axis} too long"] = torch.cat([good, good], axis)
        wrong[f"axis {axis} too short"] = good.narrow(axis, 0, good.shape[axis] - 1)
    return wrong


def test_every_input_is_checked(ready):
    rig, inputs = ready
    for field in rig.spec.input_fields:
        for value in spoiled(field, inputs[field.name]).values():
            bad = inputs | {field.name: value}
            refuses(rig, InputError, f"^{field.name}: {SHAPE}", rig.wrapper.run, 1, **bad)
        if not field.optional:
            without = {name: t for name, t in inputs.items() if name != field.name}
            for bad in (without, inputs | {field.name: None}):
                refuses(rig, InputError, f"^{field.name}: got None", rig.wrapper.run, 1, **bad)
    for layer in LAYERS:
        rig.wrapper.run(layer, **inputs)
    rig.wrapper.commit()


def test_unknown_names_and_layers(ready):
    rig, inputs = ready
    other = "q" if rig.spec.family == "mamba2" else "x"
    extra = inputs | {other: torch.zeros(1)}
    refuses(rig, InputError, f"^inputs: got {other}; allowed", rig.wrapper.run, 1, **extra)
    for layer in (0, -1, 2, "1", None, 1.5, [1]):
        message = r"^layer: got .*; allowed the layers of this pool, \[1, 4\]"
        refuses(rig, InputError, message, rig.wrapper.run, layer, **inputs)
        refuses(rig, InputError, message, rig.wrapper.conv, layer, torch.zeros(1))


def outputs(shape):
    """Wrong `out` tensors, by what is wrong."""
    return {
        "another 16-bit type": torch.zeros(shape, dtype=torch.float16),
        "float64": torch.zeros(shape, dtype=torch.float64),
        "no tensor": np.zeros(shape, dtype=np.float32),
        "another device": torch.zeros(shape, device="meta"),
        "no pads": torch.zeros(2, *shape[1:]),
        "flat": torch.zeros(*shape[:2], shape[2] * shape[-1]),
        "strided": torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2],
        "expanded": torch.zeros(1, *shape[1:]).expand(shape),
        "overlapping": torch.zeros(10000).as_strided(shape, (8, *torch.zeros(shape[1:]).stride())),
    }


def test_every_output_is_checked(ready):
    rig, inputs = ready
    heads, dim = (getattr(rig.spec, name) for name in rig.spec.output_dims)
    for out in outputs((3, 2, heads, dim)).values():
        refuses(rig, InputError, f"^out: {SHAPE}", rig.wrapper.run, 1, out=out, **inputs)
    rows = torch.zeros(3, 2, rig.spec.conv_channels, dtype=torch.bfloat16)
    for out in outputs(rows.shape).values():
        refuses(rig, InputError, f"^out: {SHAPE}", rig.wrapper.conv, 1, rows, out=out)
    for x in (rows.float(), rows[:2], rows[:, :1], rows[..., 1:], rows[0], None):
        refuses(rig, InputError, f"^x: {SHAPE}", rig.wrapper.conv, 1, x)


@pytest.mark.parametrize(
    "accepted",
    [[-1, 0], [0, 3], [2, 1, 0], [2], 2, [[1, 1]], [1.0, 1.0], [True, True], ["1", "1"], [None, 1]],
    ids=str,
)
def test_accepted_counts(ready, accepted):
    rig, inputs = ready
    for layer in LAYERS:
        rig.wrapper.run(layer, **inputs)
    refuses(rig, InputError, f"^accepted: {SHAPE}", rig.wrapper.commit, accepted)
    assert rig.wrapper.commit(np.array([0, 2], dtype=np.int8)).tolist() == [0, 2]
    assert [rig.pool.tokens(s) for s in rig.sequences] == [3, 5]


def test_a_refused_plan_leaves_no_plan(rng):
    rig = Rig(SPECS[0], rng)
    rig.step(3)
    bad = [
        ((rig.sequences, [1, 4, 1]), "windows: got 4; allowed 0..3"),
        ((rig.sequences, [1, -1, 1]), "windows: got -1"),
        (([rig.sequences[0]] * 2,), "twice"),
    ]
    for args, message in bad:
        refuses(rig, InputError, message, rig.wrapper.plan, *args)
    refuses(rig, InputError, "bucket: got 2", rig.wrapper.plan, rig.sequences, bucket=2)
    refuses(rig, InputError, "window: got 1", rig.wrapper.plan, rig.sequences, 2, window=1)
    rig.step(1)


def test_unbound_weights(rng):
    pool = StatePool(SPECS[0], LAYERS, 1)
    wrapper = ReplayDecodeWrapper(pool)
    (seq,) = pool.alloc()
    for bound, missing in (((), r"\[1, 4\]"), ((4,), r"\[1\]")):
        for layer in bound:
            pool.bind(layer, **Rig(SPECS[0], rng).weights[layer])
        for call in (lambda: wrapper.plan([seq]), lambda: wrapper.materialize(seq)):
            with pytest.raises(PlanError, match=f"weights: got none for layers {missing}"):
                call()
    pool.bind(1, **Rig(SPECS[0], rng).weights[1])
    wrapper.plan([seq])
    wrapper.abort()


def test_a_layer_without_required_weights_needs_no_bind(rng):
    spec = GDNSpec(heads=2, dim=4, state=8, gate="log", conv_width=0)
    pool = StatePool(spec, [0], 1)
    wrapper = ReplayDecodeWrapper(pool)
    wrapper.plan(pool.alloc())
    wrapper.fold()
    wrapper.run(0, **layer_inputs(spec, 1, 1, torch.float32, rng))
    wrapper.commit()


def test_a_spec_without_convolution_refuses_one(rng):
    spec = Mamba2Spec(heads=2, dim=4, state=8, conv_width=0)
    pool = StatePool(spec, [0], 1)
    pool.bind(0, A=-torch.ones(2))
    wrapper = ReplayDecodeWrapper(pool)
    wrapper.plan(pool.alloc())
    wrapper.fold()
    with pytest.raises(InputError, match="got a spec with conv_width=0"):
        wrapper.conv(0, torch.zeros(1, 1, spec.conv_channels))


# Lawful ---------------------------------------------------------------------------------------


def test_out_is_filled_and_returned(ready):
    """NaN before; float32 holds what the pool's type holds rounded; running twice is the same."""
    rig, inputs = ready
    y = rig.wrapper.run(1, **inputs)
    assert y.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(y.shape, np.nan, dtype=dtype)
        assert rig.wrapper.run(1, out=out, **inputs) is out
        assert_bitwise_equal(out.bfloat16(), y)
        assert not out[2].any(), "the pad row"
        assert out[:2].any()
    assert not torch.equal(rig.wrapper.run(1, out=torch.empty(y.shape), **inputs), y.float())


def test_padded_strides_and_views(ready):
    """Rows of wider buffers, as fused projections leave them, in and out; nothing around moves."""
    rig, inputs = ready
    y = rig.wrapper.run(1, **inputs)
    views, width = {}, 3
    for name, value in inputs.items():
        wide = value.new_full((*value.shape[:-1], value.shape[-1] + width), np.nan)
        wide[..., : value.shape[-1]] = value
        views[name] = wide[..., : value.shape[-1]]
    wide = y.new_full((*y.shape[:-1], y.shape[-1] + width), 7.0)
    out = rig.wrapper.run(1, out=wide[..., : y.shape[-1]], **views)
    assert_bitwise_equal(out.contiguous(), y)
    assert (wide[..., y.shape[-1] :] == 7).all()
    # Several sequences may read one row.
    first = {name: value[:1].expand(value.shape) for name, value in inputs.items()}
    dense = {name: value.contiguous() for name, value in first.items()}
    assert_bitwise_equal(rig.wrapper.run(1, **first), rig.wrapper.run(1, **dense))


def test_convolved_channels_are_views(ready, rng):
    rig, inputs = ready
    rows = torch.randn(3, 2, rig.spec.conv_channels, generator=rng).bfloat16()
    parts = split_channels(rig.spec, rig.wrapper.conv(1, rows))
    parts = {name: part for name, part in parts.items() if name in inputs}
    dense = {name: part.contiguous() for name, part in parts.items()}
    run = rig.wrapper.run
    assert_bitwise_equal(run(1, **(inputs | parts)), run(1, **(inputs | dense)))
