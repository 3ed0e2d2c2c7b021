"""Seeding from a prefill: layouts, types, tails, and what others hold stays theirs."""

import pytest
import torch

from replayinfer import CapacityError, GDNSpec, InputError
from replayinfer.testing import assert_bitwise_equal

from .kit import FORMATS, SPECS, Unchanged, World, memory

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", SPECS)
def test_layouts_and_types(family, dtype, layout, rng):
    """The state is what was handed over, in float32, and decoding goes on from it."""
    spec = SPECS[family]
    world = World(spec, rng, capacity=4)
    (a,) = world.alloc()
    heads, dim, state = spec.state_shape
    shape = (heads, dim, state) if layout == "vk" else (heads, state, dim)
    given = {layer: world.normal(*shape).to(dtype) for layer in (1, 4)}
    world.seed(a, tokens=17, states=given, layout=layout)
    got = world.wrapper.materialize(a)
    for i, layer in enumerate((1, 4)):
        want = given[layer].float()
        assert_bitwise_equal(got[i], want if layout == "vk" else want.transpose(1, 2).contiguous())
    assert (world.pool.tokens(a), world.pool.history(a)) == (17, 0)
    world.grow(a, 6)
    world.check()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_into_every_format(dtype, fmt, rng):
    world = World(SPECS["gdn"], rng, format=fmt, layers=[0])
    (a,) = world.alloc()
    given = world.normal(*world.spec.state_shape).to(dtype)
    world.seed(a, tokens=1, states={0: given})
    plane = world.pool.format.plane_dtype
    stored = given.float() if world.pool.format.lossless else given.float().to(plane).float()
    assert_bitwise_equal(world.wrapper.materialize(a)[0], stored)
    if fmt == "fp32_split":
        page = torch.tensor([0])
        bits = given.float().view(torch.int32)
        rounded = ((bits + 0x8000) >> 16 << 16).view(torch.float32)
        assert_bitwise_equal(world.pool.checkpoints.read(0, page)[0], rounded)


@pytest.mark.parametrize("taps", range(7))
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 100, 2**40])
def test_tails_shorter_and_longer_than_the_window(taps, tokens, rng):
    """The newest row is the last; what is missing is zero on the left, what is old is dropped."""
    world = World(SPECS["mamba2"], rng, capacity=4, layers=[0])
    (a,) = world.alloc()
    tail = world.normal(world.spec.conv_channels, taps)
    world.pool.seed(a, {0: torch.zeros(world.spec.state_shape)}, conv={0: tail}, tokens=tokens)
    want = torch.cat([torch.zeros(world.spec.conv_channels, 3), tail], 1)[:, -3:]
    assert torch.equal(world.pool.conv_tail(a)[0], want)
    assert world.pool.tokens(a) == tokens


def test_decoding_goes_on_after_a_short_tail(rng):
    world = World(SPECS["gdn"], rng, capacity=4, max_window=2, layers=[0])
    for taps in (0, 1, 5):
        (a,) = world.alloc()
        world.seed(a, tokens=taps, conv={0: world.normal(world.spec.conv_channels, taps)})
        world.step({a: 2}, {a: 1})
        world.step({a: 2})
        world.check()


def test_a_tail_in_the_pools_own_type_is_kept_bit_for_bit(rng):
    world = World(SPECS["gdn"], rng, dtype=torch.bfloat16, layers=[0])
    (a,) = world.alloc()
    tail = world.normal(world.spec.conv_channels, 3).bfloat16()
    world.seed(a, tokens=3, conv={0: tail})
    assert_bitwise_equal(world.pool.conv_tail(a)[0], tail)
    world.seed(a, tokens=3, conv={0: tail.double()})
    assert_bitwise_equal(world.pool.conv_tail(a)[0], tail)


def test_a_layer_without_convolution_takes_no_tail(rng):
    spec = GDNSpec(heads=2, dim=3, state=4, gate="log", conv_width=0)
    world = World(spec, rng, layers=[2], capacity=2)
    (a,) = world.alloc()
    world.pool.seed(a, {2: world.normal(2, 3, 4)}, tokens=4)
    assert world.pool.tokens(a) == 4
    assert world.pool.conv_tail(a).shape == (1, 0, 0)


@pytest.mark.parametrize("rows", [0, 2, 3, 4])
@pytest.mark.parametrize("child", [False, True])
def test_seeding_one_sharer_leaves_the_other_alone(child, rows, rng):
    world = World(SPECS["gdn"], rng, capacity=4, page_rows=2, format="fp32_split")
    (a,) = world.alloc()
    world.seed(a, tokens=3)
    world.grow(a, rows)
    (b,) = world.fork(a)
    mine, other = (b, a) if child else (a, b)
    cur = world.pool.cursors
    before = world.wrapper.materialize(other)
    page, table = cur.checkpoint[cur.peek(other)], cur.table[cur.peek(other)].copy()
    world.seed(mine, tokens=40)
    assert_bitwise_equal(world.wrapper.materialize(other), before)
    assert cur.checkpoint[cur.peek(other)] == page != cur.checkpoint[cur.peek(mine)]
    assert cur.table[cur.peek(other)].tolist() == table.tolist()
    world.check()
    for _ in range(6):
        world.step([a, b])
    world.check()


def test_seeding_again_forgets_everything(rng):
    """Rows, undo and position: nothing of the sequence before survives, its own pages are kept."""
    world = World(SPECS["mamba2"], rng, capacity=8, max_window=3, page_rows=2)
    (a,) = world.alloc()
    for tokens in (1000, 1, 0, 7):
        world.step({a: 3})
        world.step({a: 3}, {a: 2})
        pages = world.pool.pages_in_use()
        world.seed(a, tokens=tokens)
        assert world.pool.pages_in_use() == pages
        assert (world.pool.tokens(a), world.pool.history(a)) == (tokens, 0)
        with pytest.raises(InputError, match=r"rows: got 1 to drop; allowed 0\.\.0 "):
            world.pool.rollback(a, 1)
        world.check()


def test_only_the_sequence_is_written(rng):
    world = World(SPECS["mamba2"], rng)
    a, b = world.alloc(2)
    world.grow(b, 3)
    before = {name: t.clone() for name, t in memory(world.pool).items()}
    world.seed(a, tokens=2)
    for name, tensor in memory(world.pool).items():
        same = tensor.eq(before[name]) | tensor.isnan() & before[name].isnan()
        assert same[:, 1:].all(), name  # a has page 0 and slot 0
        assert bool(same.all()) == name.startswith("rows."), name


def test_what_was_handed_over_is_copied(rng):
    world = World(SPECS["mamba2"], rng, layers=[0])
    (a,) = world.alloc()
    state = world.normal(*world.spec.state_shape).requires_grad_()
    tail = world.normal(world.spec.conv_channels, 3)
    world.pool.seed(a, {0: state}, conv={0: tail}, tokens=0)
    want, want_tail = world.wrapper.materialize(a).clone(), world.pool.conv_tail(a).clone()
    state.detach().zero_()
    tail.zero_()
    assert torch.equal(world.wrapper.materialize(a), want)
    assert torch.equal(world.pool.conv_tail(a), want_tail)
    assert not world.pool.checkpoints.storage.requires_grad


def test_no_page_to_move_to(rng):
    world = World(SPECS["mamba2"], rng, checkpoint_pages=1, layers=[0])
    (a,) = world.alloc()
    world.fork(a)
    state, tail = world.normal(*world.spec.state_shape), world.normal(world.spec.conv_channels, 3)
    with Unchanged(world.pool), pytest.raises(CapacityError) as error:
        world.pool.seed(a, {0: state}, conv={0: tail}, tokens=5)
    assert (error.value.pool, error.value.needed, error.value.free) == ("checkpoint pages", 1, 0)


WRONG = {
    "states": lambda s, t: {"states": {1: s}},
    "states ": lambda s, t: {"states": {1: s, 2: s, 4: s}},
    "states  ": lambda s, t: {"states": s},
    "states   ": lambda s, t: {"states": None},
    "states    ": lambda s, t: {"states": {1: s, "4": s}},
    "states[4]": lambda s, t: {"states": {1: s, 4: s[:1]}},
    "states[4] ": lambda s, t: {"states": {1: s, 4: s[None]}},
    "states[4]  ": lambda s, t: {"states": {1: s, 4: s.transpose(1, 2).contiguous()}},
    "states[1]": lambda s, t: {"states": {1: s, 4: s}, "layout": "kv"},
    "states[1] ": lambda s, t: {"states": {1: s.int(), 4: s}},
    "states[1]  ": lambda s, t: {"states": {1: s.tolist(), 4: s}},
    "states[1]   ": lambda s, t: {"states": {1: s.to("meta"), 4: s}},
    "states[1]    ": lambda s, t: {"states": {1: s.repeat(1, 1, 2)[:, :, ::2], 4: s}},
    "layout": lambda s, t: {"layout": "VK"},
    "layout ": lambda s, t: {"layout": None},
    "tokens": lambda s, t: {"tokens": -1},
    "tokens ": lambda s, t: {"tokens": 1.0},
    "tokens  ": lambda s, t: {"tokens": True},
    "conv": lambda s, t: {"conv": None},
    "conv ": lambda s, t: {"conv": {1: t}},
    "conv  ": lambda s, t: {"conv": t},
    "conv[4]": lambda s, t: {"conv": {1: t, 4: t[:-1]}},
    "conv[4] ": lambda s, t: {"conv": {1: t, 4: t.T.contiguous()}},
    "conv[4]  ": lambda s, t: {"conv": {1: t, 4: t[None]}},
    "conv[4]   ": lambda s, t: {"conv": {1: t, 4: t.to(torch.int8)}},
    "conv[4]    ": lambda s, t: {"conv": {1: t, 4: t.T.contiguous().T}},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, rng):
    world = World(SPECS["mamba2"], rng)
    (a,) = world.alloc()
    world.grow(a, 3)
    state, tail = world.normal(*world.spec.state_shape), world.normal(world.spec.conv_channels, 3)
    good = {"states": {1: state, 4: state}, "conv": {1: tail, 4: tail}, "tokens": 2, "layout": "vk"}
    change = WRONG[case](state, tail)
    with Unchanged(world.pool), pytest.raises(InputError) as error:
        world.pool.seed(a, **{**good, **change})
    message = str(error.value)
    assert message.startswith(f"{case.strip()}: got "), message
    assert "; allowed " in message
    world.pool.seed(a, **good)
