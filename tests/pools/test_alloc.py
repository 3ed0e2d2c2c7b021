"""Allocation resets the whole package, whatever its pages, ring and cursors held before."""

import numpy as np
import pytest
import torch

from .kit import FORMATS, SPECS, World, check_books, memory, poison_pool

MIXED = [(family, fmt, torch.float32) for family in SPECS for fmt in FORMATS]
MIXED += [
    (family, "fp32_split", dtype) for family in SPECS for dtype in (torch.bfloat16, torch.half)
]


@pytest.mark.parametrize(("family", "fmt", "dtype"), MIXED)
def test_recycled_memory_starts_at_zero_and_decodes(family, fmt, dtype, rng):
    world = World(SPECS[family], rng, capacity=4, page_rows=2, format=fmt, dtype=dtype)
    pool = world.pool
    used = world.alloc(pool.sizes.max_sequences)
    for _ in range(6):
        world.step(used)
    world.free(used)
    poison_pool(pool)

    seqs = world.alloc(3)
    for seq in seqs:
        assert torch.equal(pool.conv_tail(seq), torch.zeros_like(pool.conv_tail(seq)))
        state = world.wrapper.materialize(seq)
        assert torch.equal(state, torch.zeros_like(state))
        assert (pool.tokens(seq), pool.history(seq)) == (0, 0)
    slots = pool.cursors.resolve(seqs)
    assert (pool.cursors.table[slots] == -1).all()
    assert (pool.cursors.undo[slots] == 0).all()
    pages = torch.from_numpy(pool.cursors.checkpoint[slots]).long()
    assert not pool.checkpoints.storage[:, pages].any()  # every plane
    assert not pool.conv.rows[:, torch.from_numpy(slots)].any()
    for _ in range(6):
        world.step(seqs)
    world.check()


def test_nothing_but_the_new_sequences_is_written(rng):
    world = World(SPECS["gdn"], rng, format="fp32_split")
    (old,) = world.alloc()
    world.grow(old, 3)
    before = {name: tensor.clone() for name, tensor in memory(world.pool).items()}
    new = world.pool.alloc(2)
    cur = world.pool.cursors
    slots = cur.resolve(new)
    for name, tensor in memory(world.pool).items():
        ids = {"checkpoints": cur.checkpoint[slots], "conv": slots}.get(name, np.empty(0, int))
        keep = torch.ones(tensor.shape[1], dtype=torch.bool)
        keep[torch.from_numpy(ids).long()] = False
        equal = tensor[:, keep].eq(before[name][:, keep])
        both_nan = tensor[:, keep].isnan() & before[name][:, keep].isnan()
        assert (equal | both_nan).all(), name
    check_books(world.pool)


def test_ids_are_handed_out_in_order_and_the_last_released_comes_first(rng):
    world = World(SPECS["mamba2"], rng, max_sequences=4)
    pool = world.pool
    seqs = pool.alloc(4)
    assert pool.cursors.resolve(seqs).tolist() == [0, 1, 2, 3]
    pool.free(seqs[2])
    (again,) = pool.alloc()
    assert pool.cursors.resolve(again).tolist() == [2]
    assert again != seqs[2]


def test_use_is_counted_by_pool(rng):
    world = World(SPECS["mamba2"], rng, capacity=8, page_rows=4)
    pool = world.pool
    empty = {"checkpoint pages": 0, "input pages": 0, "sequence slots": 0}
    assert pool.pages_in_use() == empty
    a, b = world.alloc(2)
    assert pool.pages_in_use() == {**empty, "checkpoint pages": 2, "sequence slots": 2}
    world.grow(a, 5)
    world.grow(b, 4)
    assert pool.pages_in_use()["input pages"] == 3
    assert pool.input_ids.peak == 3
    world.free([a, b])
    assert pool.pages_in_use() == empty
    assert pool.input_ids.peak == 3


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2", None])
def test_bad_counts_are_refused(count, rng):
    pool = World(SPECS["mamba2"], rng).pool
    with pytest.raises(ValueError, match=r"count: got .+; allowed an integer >= 1; "):
        pool.alloc(count)
    (seq,) = pool.alloc()
    with pytest.raises(ValueError, match=r"count: got .+; allowed an integer >= 1; "):
        pool.fork(seq, count)
    check_books(pool)
