"""Where bytes lie: planes side by side in a page, fields by row, and views that stay views."""

import pytest
import torch

from replayinfer import StatePool
from replayinfer.testing import assert_bitwise_equal

from .kit import FORMATS, SPECS, World, random_int


def address(tensor, *index):
    """Byte offset of an element in the tensor's storage."""
    places = zip(tensor.stride(), index, strict=True)
    return (tensor.storage_offset() + sum(s * i for s, i in places)) * tensor.element_size()


def raw(pool):
    """The checkpoint storage as bytes."""
    return pool.checkpoints.storage.view(torch.uint8).flatten()


@pytest.mark.parametrize("family", SPECS)
def test_a_split_page_holds_high_then_low_plane_by_head(family, rng):
    """The bytes of every head: all high halves, then all low halves, where fp32 has the head."""
    world = World(SPECS[family], rng, format="fp32_split", layers=(0, 3))
    plain = StatePool(SPECS[family], (0, 3), 6, checkpoint_pages=24)
    heads, dim, state = world.spec.state_shape
    seqs = world.alloc(3)
    given = {s: {layer: world.normal(heads, dim, state) for layer in (0, 3)} for s in seqs}
    for seq in seqs:
        world.seed(seq, states=given[seq], tokens=0)
    pool, bytes_ = world.pool, raw(world.pool)
    assert bytes_.numel() == raw(plain).numel()
    head_bytes = dim * state * 4
    for i, layer in enumerate((0, 3)):
        for seq in seqs:
            page = int(pool.cursors.checkpoint[pool.cursors.peek(seq)])
            for head in range(heads):
                start = address(plain.checkpoints.storage, i, page, head, 0, 0)
                bits = given[seq][layer][head].contiguous().view(torch.int32).flatten()
                high = ((bits + 0x8000) >> 16).to(torch.int16)
                low = (bits & 0xFFFF).to(torch.int16)
                want = torch.cat([high, low]).view(torch.uint8)
                assert torch.equal(bytes_[start : start + head_bytes], want)
                assert address(pool.checkpoints.plane, i, page, head, 0, 0) == start
                assert address(pool.checkpoints.low, i, page, head, 0, 0) == start + head_bytes // 2


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_planes_are_views_of_the_storage(fmt):
    pool = StatePool(SPECS["gdn"], [0, 1], 3, format=fmt)
    checkpoints = pool.checkpoints
    assert checkpoints.plane.dtype == pool.format.plane_dtype
    assert checkpoints.plane.shape == (2, 3, *pool.spec.state_shape)
    assert checkpoints.plane.stride(-1) == 1
    assert checkpoints.plane.stride(-2) == pool.spec.state  # dim * state in one piece
    assert checkpoints.nbytes == checkpoints.storage.untyped_storage().nbytes()
    assert (checkpoints.low is not None) == (fmt == "fp32_split")
    for plane in filter(lambda p: p is not None, (checkpoints.plane, checkpoints.low)):
        assert (
            plane.untyped_storage().data_ptr() == checkpoints.storage.untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_and_loaded(fmt, rng):
    """Lossless formats give every bit back; others what their type holds; pages do not mix."""
    pool = StatePool(SPECS["mamba2"], [0, 1], 5, format=fmt)
    pages = torch.tensor([3, 0])
    state = torch.randn(2, *pool.spec.state_shape, generator=rng)
    before = pool.checkpoints.storage.clone()
    pool.checkpoints.store(1, pages, state)
    want = state if pool.format.lossless else state.to(pool.format.plane_dtype).float()
    assert_bitwise_equal(pool.checkpoints.load(1, pages), want)
    assert_bitwise_equal(pool.checkpoints.load(1, pages.flip(0)), want.flip(0))
    others = torch.tensor([1, 2, 4])
    assert torch.equal(pool.checkpoints.storage[1, others], before[1, others])
    assert torch.equal(pool.checkpoints.storage[0], before[0])
    pool.checkpoints.copy(pages, torch.tensor([4, 1]))
    assert_bitwise_equal(pool.checkpoints.load(1, torch.tensor([4, 1])), want)
    pool.checkpoints.zero(torch.tensor([3]))
    assert not pool.checkpoints.load(1, torch.tensor([3])).any()
    assert_bitwise_equal(pool.checkpoints.load(1, torch.tensor([0])), want[1:])


def test_rows_and_rings():
    spec = SPECS["gdn"]
    pool = StatePool(
        spec, [0, 1, 2], 4, capacity=10, max_window=3, page_rows=4, format="fp32_split",
        dtype=torch.float16, input_pages=7,
    )  # fmt: skip
    shapes = {name: (f.dtype, tuple(f.shape)) for name, f in pool.inputs.fields.items()}
    lead = (3, 7, 4)
    assert shapes == {
        "k": (torch.float16, (*lead, 2, 5)),
        "k_scale": (torch.float32, (*lead, 2)),
        "g": (torch.float32, (*lead, 4)),
        "u": (torch.bfloat16, (*lead, 4, 3)),
        "v": (torch.float16, (*lead, 4, 3)),
        "beta": (torch.float32, (*lead, 4)),
    }
    assert pool.conv.rows.shape == (3, 4, 3 + 3, spec.conv_channels)
    assert pool.conv.rows.dtype == torch.float16
    assert pool.cursors.table.shape == (4, 3)


@pytest.mark.parametrize("max_window", [1, 3])
def test_token_n_of_a_ring_lies_at_n_modulo_its_length(max_window, rng):
    """Whatever was folded, rejected or seeded in between."""
    world = World(SPECS["mamba2"], rng, capacity=5, max_window=max_window, layers=[0])
    ring = world.pool.conv.ring
    assert ring == 3 + max_window
    (a,) = world.alloc()
    world.seed(a, tokens=random_int(rng, 3, 10**9))
    for _ in range(12):
        window = random_int(rng, 0, max_window)
        before = world.pool.tokens(a)
        plan = world.step({a: window}, {a: random_int(rng, 0, window)})
        assert int(plan.arrays.conv_place[0]) == before % ring
        tail = world.model.conv_window(a, 0)
        for back in range(1, 4):
            place = (world.pool.tokens(a) - back) % ring
            assert torch.equal(world.pool.conv.rows[0, 0, place], tail[-back])


def test_row_i_lies_in_its_page_at_its_offset(rng):
    world = World(SPECS["mamba2"], rng, capacity=12, page_rows=4, layers=[2])
    (a,) = world.alloc()
    log = []
    for _ in range(10):
        plan = world.wrapper.plan([a])
        world.wrapper.fold()
        drawn = world.draw(plan)
        world.run(plan, drawn)
        world.wrapper.commit()
        log.append(drawn[2][0]["x"][0, 0])
    table = world.pool.cursors.table[0]
    for i, x in enumerate(log):
        assert torch.equal(world.pool.inputs.fields["x"][0, table[i // 4], i % 4], x)
