"""Bad input to a step: one clear error that names the argument, and nothing is changed."""

import re

import pytest
import torch

from replayinfer import GDNSpec, InputError, PlanError, StaleHandleError, ops

from ..pools.kit import SPECS, Unchanged, World

CHANGES = {
    "one batch row less": lambda x: x[:-1],
    "one token more": lambda x: torch.cat([x, x[:, :1]], 1),
    "another last size": lambda x: x[..., :-1].contiguous(),
    "no batch": lambda x: x[0],
    "another axis": lambda x: x[..., None],
    "float64": lambda x: x.double(),
    "int32": lambda x: torch.zeros(x.shape, dtype=torch.int32),
    "complex": lambda x: x.to(torch.complex64),
    "another device": lambda x: x.to("meta"),
    "strides": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "a number": lambda x: 1.0,
}
FORM = r"^{}: got .+; allowed .+; .+$"


@pytest.fixture(params=SPECS)
def stepping(request, rng):
    """A folded plan of two sequences, a third row of padding and two tokens; good arguments."""
    world = World(SPECS[request.param], rng, capacity=4, max_window=2, page_rows=2)
    seqs = world.alloc(2)
    world.grow(seqs[0], 3)
    world.plan = world.wrapper.plan(seqs, [2, 1], bucket=3)
    world.wrapper.fold()
    return world, *world.draw(world.plan)[4]


def refuse(world, name, call, error=InputError):
    with Unchanged(world.pool), pytest.raises(error) as caught:
        call()
    assert re.match(FORM.format(re.escape(name)), str(caught.value), re.DOTALL), caught.value
    return str(caught.value)


def test_every_input_of_a_layer(stepping):
    world, inputs, _ = stepping
    kinds = {f.name: f.kind for f in world.spec.input_fields}
    if "z" in kinds:
        inputs["z"] = torch.zeros_like(inputs["x"])
    for name, good in inputs.items():
        for change in (*CHANGES.values(), lambda x: x.bfloat16()):
            bad = change(good)
            if kinds[name] == "gate" and getattr(bad, "dtype", None) == torch.bfloat16:
                continue  # gates may be 16-bit
            call = {**inputs, name: bad}
            message = refuse(world, name, lambda call=call: world.wrapper.run(4, **call))
            assert "bucket=3, window=2" in message or "got strides" in message
        if name != "z":
            for call in ({**inputs, name: None}, {n: x for n, x in inputs.items() if n != name}):
                refuse(world, name, lambda call=call: world.wrapper.run(4, **call))
    world.wrapper.run(4, **inputs)


def test_outputs(stepping):
    world, inputs, rows = stepping
    y, conv = world.wrapper.run(4, **inputs), world.wrapper.conv(4, rows)
    for change in (*CHANGES.values(), lambda x: x.half(), lambda x: x[:1].expand(x.shape)):
        refuse(world, "out", lambda c=change: world.wrapper.run(4, out=c(y), **inputs))
        refuse(world, "out", lambda c=change: world.wrapper.conv(4, rows, out=c(conv)))


def test_rows_before_the_convolution(stepping):
    world, _, rows = stepping
    for change in (*CHANGES.values(), lambda x: x.bfloat16(), lambda x: None):
        refuse(world, "x", lambda c=change: world.wrapper.conv(4, c(rows)))
    world.wrapper.conv(4, rows)


def test_unknown_names_and_layers(stepping):
    world, inputs, rows = stepping
    other = "B" if world.spec.family == "gdn" else "q"
    message = refuse(world, "inputs", lambda: world.wrapper.run(4, **inputs, **{other: rows}))
    assert f"got {other}; allowed " in message
    for layer in (0, -1, 2, None, "4", [4], 1.5):
        refuse(world, "layer", lambda layer=layer: world.wrapper.run(layer, **inputs))
        refuse(world, "layer", lambda layer=layer: world.wrapper.conv(layer, rows))


def test_a_shard_is_told_how_to_get_one(stepping):
    """The likeliest wrong size is that of a tensor-parallel rank."""
    world, inputs, _ = stepping
    name = "x" if world.spec.family == "mamba2" else "v"
    half = {**inputs, name: inputs[name][:, :, :2]}
    message = refuse(world, name, lambda: world.wrapper.run(4, **half))
    assert "[3, 2, 2, 3]" in message
    assert "heads=4, dim=3" in message
    assert "for a shard use spec.shard(rank, size)" in message


def test_a_layer_whose_caller_convolves(rng):
    spec = GDNSpec(heads=2, dim=2, state=2, gate="log", conv_width=0)
    world = World(spec, rng, layers=[0])
    world.wrapper.plan(world.alloc())
    world.wrapper.fold()
    for call in (
        world.wrapper.conv,
        lambda *a: ops.conv_update(world.pool, world.wrapper._plan, *a),
    ):
        with (
            Unchanged(world.pool),
            pytest.raises(InputError, match=r"got a spec with conv_width=0; "),
        ):
            call(0, torch.zeros(1, 1, 8))


def test_rows_to_materialize(rng):
    world = World(SPECS["mamba2"], rng, capacity=4)
    (a,) = world.alloc()
    world.grow(a, 3)
    for rows in (-1, 4, 1.0, True, "2"):
        refuse(world, "rows", lambda rows=rows: world.wrapper.materialize(a, rows))
    states = [world.wrapper.materialize(a, rows) for rows in range(4)]
    for rows, state in enumerate(states):
        for i, layer in enumerate((1, 4)):
            want = world.model._find(a).states[layer][rows]
            assert torch.allclose(state[i].double(), want, rtol=1e-4, atol=1e-6)
    assert torch.equal(world.wrapper.materialize(a), states[3])


def test_handles_and_order(stepping):
    world, inputs, _ = stepping
    other = World(world.spec, world.rng)
    (foreign,) = other.alloc()
    world.wrapper.abort()
    refuse(world, "sequence", lambda: world.wrapper.plan([foreign]), StaleHandleError)
    refuse(world, "run", lambda: world.wrapper.run(4, **inputs), PlanError)
    refuse(world, "readout", lambda: ops.readout(world.pool, world.plan, 4, **inputs), PlanError)
    refuse(other, "readout", lambda: ops.readout(other.pool, world.plan, 4, **inputs), PlanError)
