"""Handles carry pool and generation: stale, foreign, doubled and invented ones are errors."""

import re

import numpy as np
import pytest
import torch

from replayinfer import InputError, StaleHandleError
from replayinfer.errors import ReplayError

from .kit import SPECS, Unchanged, World

FORM = re.compile(r"^sequences?: got .+; allowed .+; .+$", re.DOTALL)


def uses(world):
    """Every call that takes one handle."""
    pool, channels = world.pool, world.spec.conv_channels
    states = {layer: torch.zeros(world.spec.state_shape) for layer in pool.layers}
    tails = {layer: torch.zeros(channels, 3) for layer in pool.layers}
    return [
        pool.free,
        pool.fork,
        lambda seq: pool.rollback(seq, 0),
        lambda seq: pool.seed(seq, states, conv=tails, tokens=0),
        pool.tokens,
        pool.history,
        pool.conv_tail,
        world.wrapper.materialize,
        lambda seq: world.wrapper.plan([seq]),
    ]


@pytest.fixture
def world(rng):
    """Three live sequences, and one slot whose sequence was freed."""
    world = World(SPECS["mamba2"], rng, capacity=4, page_rows=2, layers=[2])
    seqs = world.alloc(4)
    world.grow(seqs[0], 3)
    world.free(seqs[3])
    world.seqs, world.stale = seqs[:3], seqs[3]
    return world


def refuse(world, handle, error=StaleHandleError):
    """Every use of the handle is refused and changes nothing; the messages."""
    messages = []
    with Unchanged(world.pool):
        for use in uses(world):
            with pytest.raises(error) as caught:
                use(handle)
            assert isinstance(caught.value, ReplayError)
            assert FORM.match(str(caught.value)), caught.value
            messages.append(str(caught.value))
    return messages


def test_a_freed_handle_is_stale(world):
    for message in refuse(world, world.stale):
        assert "(slot 3, generation 1), which was freed" in message


def test_a_handle_stays_stale_when_its_slot_lives_again(world):
    (again,) = world.pool.alloc()
    assert world.pool.cursors.resolve(again).tolist() == [3]
    refuse(world, world.stale)
    world.pool.free(again)
    refuse(world, world.stale)
    refuse(world, again)


def test_a_handle_of_another_pool_is_foreign(world, rng):
    other = World(SPECS["mamba2"], rng, capacity=4, page_rows=2, layers=[2])
    foreign = other.alloc(3)  # the same slots and generations
    for handle in foreign:
        for message in refuse(world, handle):
            assert "no handle of this pool" in message


def test_pads_and_invented_numbers_are_stale(world):
    """Among them negative numbers whose low bits name a slot, free or live."""
    live = world.seqs[0]
    numbers = [-1, 0, 1, 3, 5, live + 3, live + (1 << 20), live + (2 << 20), (1 << 63) - 1]
    numbers += [-(1 << 63), -live, *(slot - (1 << 20) for slot in range(6))]
    numbers += [world.stale - (1 << 62), live | 0xFFFFF]
    for number in numbers:
        refuse(world, number)


def test_what_is_no_handle_at_all(world):
    for handle in (None, "7", 1.0, True, [[1]], np.float64(3.0), 1 << 64, -(1 << 70), 1 << 200):
        refuse(world, handle, error=(InputError, StaleHandleError))


def test_freeing_twice_is_an_error(world):
    a, b, c = world.seqs
    world.pool.free(a)
    refuse(world, a)
    with Unchanged(world.pool), pytest.raises(StaleHandleError, match="which was freed"):
        world.pool.free([b, a, c])
    with Unchanged(world.pool), pytest.raises(InputError, match=r"got sequence \d+ .+ twice; "):
        world.pool.free([b, c, b])
    world.pool.free([c, b])
    assert set(world.pool.pages_in_use().values()) == {0}


@pytest.mark.parametrize(
    "handles",
    [lambda s: np.arange(3, dtype=np.int32), lambda s: np.array(s, dtype=np.float64),
     lambda s: np.array([s]), lambda s: [float(x) for x in s], lambda s: [*s, None],
     lambda s: [s, s[:1]], lambda s: {1: 2}, lambda s: "abc"],
    ids=["int32", "float64", "nested", "floats", "none", "ragged", "mapping", "text"],
)  # fmt: skip
def test_lists_that_hold_no_handles(world, handles):
    given = handles(world.seqs)
    for call in (world.pool.free, world.wrapper.plan):
        with Unchanged(world.pool), pytest.raises(InputError) as error:
            call(given)
        assert FORM.match(str(error.value)), error.value


def test_handles_come_in_several_shapes(world):
    pool, (a, b, c) = world.pool, world.seqs
    for given in ([a, b], (a, b), np.array([a, b]), torch.tensor([a, b])):
        assert pool.cursors.resolve(given).tolist() == [0, 1]
    assert pool.tokens(np.int64(a)) == pool.tokens(a) == 3
    pool.free([])
    pool.free(np.array([c]))
    pool.free(np.int64(b))
    pool.free(a)
    assert set(pool.pages_in_use().values()) == {0}


def test_a_generation_moves_at_alloc_and_free_only(rng):
    world = World(SPECS["gdn"], rng, capacity=4, max_window=2, page_rows=2)
    generation = world.pool.cursors.generation
    a, b = world.alloc(2)
    assert generation.tolist() == [1, 1, 0, 0, 0, 0]
    for _ in range(4):
        world.step({a: 2, b: 1})
    world.rollback(a, 1)
    (c,) = world.fork(a)
    assert generation.tolist() == [1, 1, 1, 0, 0, 0]  # a's own did not move
    world.seed(a, tokens=3)
    world.step([a, b, c], force=[b])
    world.wrapper.plan([a, c])
    world.wrapper.abort()
    assert generation.tolist() == [1, 1, 1, 0, 0, 0]
    world.free([b, c])
    assert generation.tolist() == [1, 2, 2, 0, 0, 0]
    (d,) = world.alloc()
    assert sorted(generation[1:3].tolist()) == [2, 3]
    assert d not in (a, b, c)
    world.check()


def test_generations_wrap_without_touching_other_fields(world):
    pool = world.pool
    slot = 3
    pool.cursors.generation[slot] = (1 << 32) - 2
    (last,) = pool.alloc()
    assert pool.cursors.generation[slot] == (1 << 32) - 1
    assert pool.cursors.resolve(last).tolist() == [slot]
    pool.free(last)
    assert pool.cursors.generation[slot] == 0
    (first,) = pool.alloc()
    assert pool.cursors.resolve(first).tolist() == [slot]
    with pytest.raises(StaleHandleError):
        pool.tokens(last)


def test_a_slot_that_was_cut_off_comes_back_with_later_generations(world):
    """Shrinking forgets the slot, not which handles it gave out."""
    pool = world.pool
    old = [*pool.alloc(2)]  # slots 3 and 4
    pool.free(old)
    old += pool.alloc(2)
    pool.free(old[2:])
    pool.resize(max_sequences=4)
    pool.resize(max_sequences=6)
    new = pool.alloc(3)
    assert not set(new) & {*old, world.stale}
    for handle in (*old, world.stale):
        refuse(world, handle)


def test_handles_of_many_sequences_are_distinct(rng):
    pool = World(SPECS["mamba2"], rng, max_sequences=5, layers=[0]).pool
    seen = set()
    for _ in range(20):
        handles = pool.alloc(5)
        assert not seen & set(handles)
        assert all(type(h) is int and 0 <= h < 1 << 63 for h in handles)
        seen |= set(handles)
        pool.free(handles)
