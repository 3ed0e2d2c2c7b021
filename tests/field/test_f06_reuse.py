"""Field reports 6, 8 and 9: what a slot was before does not matter, and handles say so."""

import numpy as np
import pytest
import torch

from replayinfer import InputError, StaleHandleError
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import FORMATS, SPECS, Unchanged, World, poison_pool


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", SPECS)
def test_report_6_allocation_resets_the_whole_package(family, fmt, rng):
    """State, rows, convolution window and cursors: the bits of a pool that was never used."""
    options = {"capacity": 3, "page_rows": 2, "layers": [0], "format": fmt, "max_window": 2}
    fresh = World(SPECS[family], rng, **options)
    used = World(SPECS[family], rng, **options)
    fresh.pool.bind(0, **{name: w[0].clone() for name, w in used.pool.weights.items()})
    seqs = used.pool.alloc(6)
    for t in range(5):
        plan = used.wrapper.plan(seqs, 2)
        used.wrapper.fold()
        used.run(plan, used.draw(plan))
        used.wrapper.commit(np.full(6, t % 3))
    used.pool.free(seqs)
    poison_pool(used.pool)
    used.pool.cursors.base[:], used.pool.cursors.undo[:] = 10**9, 77
    used.pool.cursors.history[:] = 3

    (old,), (new,) = fresh.pool.alloc(), used.pool.alloc()
    for _ in range(9):
        drawn = None
        outputs = []
        for world, seq in ((fresh, old), (used, new)):
            plan = world.wrapper.plan([seq])
            world.wrapper.fold()
            drawn = drawn or world.draw(plan)
            outputs.append(world.run(plan, drawn)[0])
            world.wrapper.commit()
        for want, got in zip(*outputs, strict=True):
            assert_bitwise_equal(got, want)
        assert fresh.pool.history(old) == used.pool.history(new)
        assert fresh.pool.tokens(old) == used.pool.tokens(new)
    assert_bitwise_equal(used.wrapper.materialize(new), fresh.wrapper.materialize(old))


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 8, 1000, 2**33])
def test_report_8_a_cursor_is_anchored_at_each_admission(tokens, rng):
    """When a sequence folds depends on its rows since then, not on how long it is."""
    world = World(SPECS["mamba2"], rng, capacity=4, page_rows=2, layers=[0], max_sequences=1)
    for resumed in (False, True):
        (a,) = world.alloc()
        if resumed:
            world.grow(a, 3)  # the slot and the sequence were elsewhere before
        world.seed(a, tokens=tokens)
        folds = [world.step([a]).fold_count for _ in range(9)]
        assert folds == [0, 0, 0, 0, 1, 0, 0, 0, 1]
        assert (world.pool.tokens(a), world.pool.history(a)) == (tokens + 9, 1)
        world.check()
        world.free(a)


def test_report_8_sequences_of_one_length_may_stand_anywhere(rng):
    """The same token count with every history: each folds by its own."""
    world = World(SPECS["gdn"], rng, capacity=4, page_rows=2, layers=[0])
    seqs = world.alloc(5)
    for history, seq in enumerate(seqs):
        world.seed(seq, tokens=100 - history)
        world.grow(seq, history)
    assert {world.pool.tokens(s) for s in seqs} == {100}
    assert world.step(seqs).fold.tolist() == [False] * 4 + [True]
    assert world.step(seqs).fold.tolist() == [False] * 3 + [True, False]
    world.check()


def test_report_9_freeing_twice_is_an_error_and_no_leak(rng):
    world = World(SPECS["mamba2"], rng, capacity=4, page_rows=2, layers=[0])
    a, b = world.alloc(2)
    world.grow(a, 3)
    (c,) = world.fork(a)
    world.free(a)
    for again in (a, [b, a], [a, a]):
        with Unchanged(world.pool), pytest.raises(StaleHandleError, match="which was freed"):
            world.pool.free(again)
    with Unchanged(world.pool), pytest.raises(InputError, match="twice"):
        world.pool.free([b, b])
    world.check()  # what a and c shared is still there for c
    world.free([b, c])
    assert set(world.pool.pages_in_use().values()) == {0}
    assert world.pool.checkpoint_ids.free == world.pool.checkpoint_ids.count


def test_report_9_an_old_handle_never_reaches_the_next_sequence(rng):
    """Through many lives of one slot."""
    world = World(SPECS["gdn"], rng, layers=[0], max_sequences=1, capacity=2)
    pool, old = world.pool, []
    for _ in range(20):
        (seq,) = world.alloc()
        world.grow(seq, 2)
        for stale in old[-3:] + old[:1]:
            calls = [pool.free, pool.fork, pool.tokens, world.wrapper.materialize]
            for call in (*calls, lambda s: world.wrapper.plan([s])):
                with pytest.raises(StaleHandleError):
                    call(stale)
        world.check()
        world.free(seq)
        old.append(seq)
    assert len(set(old)) == 20
    assert torch.equal(torch.tensor(old) & 0xFFFFF, torch.zeros(20, dtype=torch.int64))
