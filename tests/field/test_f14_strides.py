"""Field report 14: padded strides work, what cannot be addressed is refused, nothing is copied."""

import pytest
import torch

from replayinfer import InputError
from replayinfer.testing import assert_bitwise_equal, assert_no_poison, is_poison, poison_, poisoned

from ..pools.kit import FORMATS, SPECS, Unchanged, World, memory


def padded(tensor, axis):
    """A larger allocation that is poison, and the same elements and shape as a view inside it."""
    shape = list(tensor.shape)
    shape[axis] += 3
    whole = poisoned(shape, tensor.dtype)
    view = whole.narrow(axis, 1, tensor.shape[axis])
    view.copy_(tensor)
    return whole, view


def pad_pool(pool, axis):
    """Give a pool tensors whose strides are larger than their shapes; views of all the gaps."""
    gaps = []

    def replace(tensor, axis):
        whole, view = padded(tensor, axis)
        gaps.extend((whole.narrow(axis, 0, 1), whole.narrow(axis, 1 + tensor.shape[axis], 2)))
        return view

    checkpoints = pool.checkpoints
    storage = replace(checkpoints.storage, axis)
    checkpoints.storage = checkpoints.plane = storage
    if checkpoints.low is not None:
        checkpoints.plane = storage[:, :, :, 0].view(torch.bfloat16)
        checkpoints.low = storage[:, :, :, 1]
    for name, field in pool.inputs.fields.items():
        pool.inputs.fields[name] = replace(field, axis)
    pool.conv.rows = replace(pool.conv.rows, axis)
    return gaps


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", SPECS)
def test_report_14_padded_pools_compute_the_same_bits(family, fmt, axis, rng):
    """Padded layers, pages or rows: every write arrives, no gap is touched."""
    options = {"capacity": 3, "page_rows": 2, "format": fmt, "max_sequences": 3}
    plain, strided = (World(SPECS[family], rng, **options) for _ in range(2))
    for i, layer in enumerate((1, 4)):
        weights = {name: w[i].clone() for name, w in plain.pool.weights.items()}
        strided.pool.bind(layer, **weights)
    gaps = pad_pool(strided.pool, axis)
    worlds = (plain, strided)
    seqs = [list(world.pool.alloc(2)) for world in worlds]
    for turn in range(8):
        if turn == 2:
            for world, mine in zip(worlds, seqs, strict=True):
                mine += world.pool.fork(mine[0])
        drawn, outputs = None, []
        for world, mine in zip(worlds, seqs, strict=True):
            plan = world.wrapper.plan(mine, bucket=4)
            world.wrapper.fold()
            drawn = drawn or world.draw(plan)
            outputs.append(world.run(plan, drawn))
            world.wrapper.commit()
        for layer in (1, 4):
            for want, got in zip(outputs[0][layer], outputs[1][layer], strict=True):
                assert_bitwise_equal(got, want)
                assert_no_poison(got)
    for a, b in zip(*seqs, strict=True):
        want, got = plain.wrapper.materialize(a), strided.wrapper.materialize(b)
        assert_bitwise_equal(got, want)
        assert torch.equal(strided.pool.conv_tail(b), plain.pool.conv_tail(a))
    assert all(is_poison(gap).all() for gap in gaps)


def test_report_14_the_pools_tensors_stay_where_they_are(rng):
    """No operation replaces a tensor by a copy of it."""
    world = World(SPECS["gdn"], rng, capacity=4, page_rows=2, max_window=2, format="fp32_split")
    pool = world.pool

    def addresses():
        tensors = {**memory(pool), **pool.weights, "plane": pool.checkpoints.plane}
        return {n: (t.data_ptr(), t.stride()) for n, t in tensors.items()}

    before = addresses()
    a, b = world.alloc(2)
    world.seed(a, tokens=3)
    for _ in range(5):
        world.step({a: 2, b: 1})
    world.rollback(a, 1)
    (c,) = world.fork(a)
    world.step({a: 1, b: 1, c: 2}, force=[a, b, c])
    world.free([a, b, c])
    assert addresses() == before


@pytest.fixture
def stepping(rng):
    """A folded plan of a bucket of three, and good arguments for its calls."""
    world = World(SPECS["mamba2"], rng, capacity=4, max_window=2, layers=[0])
    plan = world.wrapper.plan(world.alloc(2), 2, bucket=3)
    world.wrapper.fold()
    inputs, rows = world.draw(plan)[0]
    return world, inputs, rows


def strided_inside(tensor):
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "conv", "out"])
def test_report_14_a_non_unit_inner_stride_is_refused(stepping, name):
    world, inputs, rows = stepping
    inputs["z"] = torch.zeros_like(inputs["x"])
    call = {"inputs": dict(inputs), "out": None}
    if name == "conv":
        with (
            Unchanged(world.pool),
            pytest.raises(InputError, match=r"^x: got strides .+; allowed an"),
        ):
            world.wrapper.conv(0, strided_inside(rows))
        return
    if name == "out":
        call["out"] = strided_inside(torch.zeros_like(inputs["x"]))
    else:
        call["inputs"][name] = strided_inside(inputs[name])
    with Unchanged(world.pool), pytest.raises(InputError) as error:
        world.wrapper.run(0, out=call["out"], **call["inputs"])
    assert str(error.value).startswith(f"{name}: got strides (")
    assert "allowed an innermost stride of 1; call .contiguous()" in str(error.value)


def test_report_14_outputs_whose_elements_overlap_are_refused(stepping):
    world, inputs, rows = stepping
    heads, dim, _ = world.spec.state_shape
    shape, row = (3, 2, heads, dim), heads * dim
    flat = torch.zeros(10 * row)
    for out in (
        torch.zeros(1, 2, heads, dim).expand(shape),
        torch.zeros(3, 1, heads, dim).expand(shape),
        flat.as_strided(shape, (row + 1, row, dim, 1)),
        flat.as_strided(shape, (3 * row, row, dim - 1, 1)),
    ):
        with (
            Unchanged(world.pool),
            pytest.raises(InputError, match=r"^out: got strides .+ overlap; "),
        ):
            world.wrapper.run(0, out=out, **inputs)
    conv = torch.zeros(1, 2, rows.shape[2]).expand(3, 2, -1)
    with Unchanged(world.pool), pytest.raises(InputError, match=r"^out: got strides .+ overlap; "):
        world.wrapper.conv(0, rows, out=conv)


def test_report_14_padded_inputs_and_outputs_are_taken_as_they_are(stepping):
    """Slices of a larger activation, as a fused projection leaves them; gaps stay untouched."""
    world, inputs, rows = stepping
    conv_want, want = world.wrapper.conv(0, rows), world.wrapper.run(0, **inputs)
    wide = {name: padded(x, 1)[1] for name, x in inputs.items()}
    for axis in (0, 1, 2, 3):
        whole, out = padded(want, axis)
        poison_(out)
        assert world.wrapper.run(0, out=out, **wide) is out
        assert_bitwise_equal(out.contiguous(), want)
        assert int(whole.isnan().sum()) == whole.numel() - want.numel()
    for axis in (0, 1, 2):
        whole, out = padded(conv_want, axis)
        poison_(out)
        world.wrapper.conv(0, padded(rows, axis)[1], out=out)
        assert_bitwise_equal(out.contiguous(), conv_want)
        assert int(whole.isnan().sum()) == whole.numel() - conv_want.numel()


def test_report_14_an_expanded_input_is_fine(stepping):
    """Inputs are only read, so their elements may share addresses."""
    world, inputs, _ = stepping
    same = {name: x[:1].clone() for name, x in inputs.items()}
    want = world.wrapper.run(0, **{n: x.repeat(3, *[1] * (x.dim() - 1)) for n, x in same.items()})
    got = world.wrapper.run(0, **{n: x.expand(3, *x.shape[1:]) for n, x in same.items()})
    assert_bitwise_equal(got, want)
