"""The bare functions compose to what the wrapper does, bit for bit, and refuse what it refuses."""

import dataclasses

import numpy as np
import pytest
import torch

from replayinfer import (
    GDNSpec,
    HostPlanner,
    InputError,
    KDASpec,
    Mamba2Spec,
    PlanError,
    ReplayDecodeWrapper,
    StatePool,
    ops,
)
from replayinfer.testing import (
    assert_bitwise_equal,
    assert_untouched,
    conv_inputs,
    layer_inputs,
    layer_weights,
    snapshot,
    split_channels,
)

SPECS = [
    Mamba2Spec(heads=4, dim=8, state=16, groups=2),
    GDNSpec(heads=4, dim=8, state=16, key_heads=2),
    KDASpec(heads=4, dim=8, state=16, key_heads=2),
]
LAYERS = [2, 5]


def make_pools(spec, rng, count=2, **options):
    """Equal pools with two sequences each."""
    weights = {layer: layer_weights(spec, rng) for layer in LAYERS}
    pools = [StatePool(spec, LAYERS, 3, capacity=5, max_window=3, **options) for _ in range(count)]
    for pool in pools:
        for layer in LAYERS:
            pool.bind(layer, **weights[layer])
    return pools


def draw(spec, rng, dtype=torch.float32):
    inputs = layer_inputs(spec, 3, 2, dtype, rng)
    return conv_inputs(spec, 3, 2, dtype, rng), inputs


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
@pytest.mark.parametrize("format", ["fp32", "fp32_split", "fp16"])
def test_the_functions_do_what_the_wrapper_does(spec, format, rng):
    mine, theirs = make_pools(spec, rng, format=format)
    planner, wrapper = (
        HostPlanner(mine, policy="spread"),
        ReplayDecodeWrapper(theirs, policy="spread"),
    )
    a, b = mine.alloc(2), theirs.alloc(2)
    for step in range(12):
        windows, accepted = [3, step % 4], [step % 3, step % 4]
        plan = planner.plan(a, windows)
        ops.fold(planner, plan)
        wrapper.plan(b, windows)
        wrapper.fold()
        for layer in LAYERS:
            rows, inputs = draw(spec, rng)
            convolved = ops.conv_update(mine, plan, layer, rows)
            assert_bitwise_equal(convolved, wrapper.conv(layer, rows))
            inputs |= split_channels(spec, convolved)
            y = ops.readout(mine, plan, layer, **inputs)
            assert_bitwise_equal(y, wrapper.run(layer, **inputs))
        assert (ops.commit(planner, plan, accepted) == wrapper.commit(accepted)).all()
        assert_bitwise_equal(ops.materialize(mine, a[0]), wrapper.materialize(b[0]))
    held = [vars(pool.cursors) for pool in (mine, theirs)]
    for name in ("base", "history", "undo", "checkpoint", "table"):
        assert np.array_equal(held[0][name], held[1][name]), name
    assert_bitwise_equal(mine.checkpoints.storage, theirs.checkpoints.storage)
    for name, field in mine.inputs.fields.items():
        assert_bitwise_equal(field, theirs.inputs.fields[name], name)
    mine.free(a)
    assert not any(mine.pages_in_use().values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_out_and_backend_arguments(spec, rng):
    (pool,) = make_pools(spec, rng, 1, dtype=torch.bfloat16)
    planner = HostPlanner(pool)
    plan = planner.plan(pool.alloc(2), 3)
    ops.fold(planner, plan, backend="torch")
    rows, inputs = draw(spec, rng, torch.bfloat16)
    out = torch.full(rows.shape, np.nan)
    assert ops.conv_update(pool, plan, 2, rows, out=out, backend="torch") is out
    assert_bitwise_equal(out.bfloat16(), ops.conv_update(pool, plan, 2, rows))
    y = ops.readout(pool, plan, 2, **inputs)
    wide = torch.full(y.shape, np.nan)
    assert ops.readout(pool, plan, 2, out=wide, backend="torch", **inputs) is wide
    assert_bitwise_equal(wide.bfloat16(), y)


def test_wrong_orders(rng):
    spec = SPECS[1]
    pool, other = make_pools(spec, rng)
    planner = HostPlanner(pool)
    rows, inputs = draw(spec, rng)
    plan = planner.plan(pool.alloc(2), 3)
    tensors = {"checkpoints": pool.checkpoints.storage, "conv": pool.conv.rows}
    tensors |= pool.inputs.fields
    before = snapshot(tensors)

    def refuse(*names, where=pool):
        calls = {
            "fold": lambda: ops.fold(planner, plan),
            "conv": lambda: ops.conv_update(where, plan, 2, rows),
            "readout": lambda: ops.readout(where, plan, 2, **inputs),
            "commit": lambda: ops.commit(planner, plan),
        }
        for name in names:
            with pytest.raises(PlanError, match=r"^\w+: got a plan .*; allowed .*; "):
                calls[name]()

    refuse("conv", "readout", "commit")
    ops.fold(planner, plan)
    refuse("fold")
    refuse("conv", "readout", where=other)
    with pytest.raises(PlanError, match="of another planner"):
        ops.commit(HostPlanner(pool), plan)
    assert_untouched(before, tensors)
    ops.commit(planner, plan)
    refuse("fold", "conv", "readout", "commit")


def test_inputs_are_checked_before_anything_is_written(rng):
    spec = SPECS[0]
    (pool,) = make_pools(spec, rng, 1)
    planner = HostPlanner(pool)
    plan = planner.plan(pool.alloc(2), 3)
    ops.fold(planner, plan)
    _, inputs = draw(spec, rng)
    tensors = {"checkpoints": pool.checkpoints.storage} | pool.inputs.fields
    before = snapshot(tensors)
    # The last input is the wrong one: the rows of the others must not be there already.
    with pytest.raises(InputError, match="C: got"):
        ops.readout(pool, plan, 2, **(inputs | {"C": inputs["C"][:, :1]}))
    with pytest.raises(InputError, match="out: got"):
        ops.readout(pool, plan, 2, out=torch.empty(1), **inputs)
    with pytest.raises(InputError, match="inputs: got"):
        ops.readout(pool, plan, 2, q=inputs["C"], **inputs)
    assert_untouched(before, tensors)


def test_a_shard_decodes_its_part_of_the_whole(rng):
    """Two ranks, each with its heads and shared heads, give the two halves of the layer."""
    for spec in SPECS:
        spec = dataclasses.replace(spec, conv_width=0)
        shared, _ = spec.shared_heads
        weights = layer_weights(spec, rng)
        inputs = layer_inputs(spec, 3, 2, torch.float32, rng)
        halves = [spec.shard(rank, 2) for rank in range(2)]
        ys, states = [], []
        for rank, part in enumerate([spec, *halves]):
            cut = {} if part is spec else spec.shard_ranges(rank - 1, 2)
            take = {name: slice(r.start, r.stop) for name, r in cut.items()}
            pool = StatePool(part, [0], 2, max_window=3)
            pool.bind(0, **{name: w[take.get("heads", slice(None))] for name, w in weights.items()})
            wrapper = ReplayDecodeWrapper(pool)
            seqs = pool.alloc(2)
            wrapper.plan(seqs, 3)
            wrapper.fold()
            mine = {
                f.name: inputs[f.name][:, :, take.get(f.dims[0], slice(None))]
                for f in part.input_fields
                if not f.optional
            }
            ys.append(wrapper.run(0, **mine))
            wrapper.commit()
            states.append(torch.stack([wrapper.materialize(s)[0] for s in seqs]))
        assert shared in cut
        torch.testing.assert_close(torch.cat(ys[1:], 2), ys[0], rtol=0, atol=0)
        torch.testing.assert_close(torch.cat(states[1:], 1), states[0], rtol=0, atol=0)
