"""What runs out is named, with what was needed and what is left, and nothing is taken."""

import pytest

from replayinfer import CapacityError
from replayinfer.errors import ReplayError
from replayinfer.pools import PageAllocator

from .kit import SPECS, Unchanged, World, check_books


def refuse(world, call, pool, needed, free, advice):
    with Unchanged(world.pool), pytest.raises(CapacityError) as caught:
        call()
    error = caught.value
    assert isinstance(error, (ReplayError, RuntimeError))
    assert (error.pool, error.needed, error.free) == (pool, needed, free)
    assert str(error) == (
        f"{pool}: got a need of {needed}; allowed {free} (free now); "
        f"free sequences, or make the pool with more {advice}"
    )
    check_books(world.pool)


@pytest.fixture
def full(rng):
    """Four slots, five checkpoint pages, five input pages of two rows; capacity four."""
    return World(
        SPECS["mamba2"], rng, capacity=4, page_rows=2, max_window=2, max_sequences=4,
        checkpoint_pages=5, input_pages=5,
    )  # fmt: skip


def test_sequence_slots(full):
    full.alloc(3)
    refuse(full, lambda: full.pool.alloc(2), "sequence slots", 2, 1, "max_sequences")
    (a,) = full.alloc()
    refuse(full, lambda: full.pool.alloc(), "sequence slots", 1, 0, "max_sequences")
    refuse(full, lambda: full.pool.fork(a), "sequence slots", 1, 0, "max_sequences")
    full.free(a)
    full.alloc()


def test_checkpoint_pages_at_alloc(rng):
    world = World(SPECS["mamba2"], rng, max_sequences=4, checkpoint_pages=2)
    world.alloc(1)
    refuse(world, lambda: world.pool.alloc(2), "checkpoint pages", 2, 1, "checkpoint_pages")
    (a,) = world.alloc(1)
    refuse(world, lambda: world.pool.alloc(), "checkpoint pages", 1, 0, "checkpoint_pages")
    world.fork(a)  # takes none
    world.check()


def test_checkpoint_pages_at_a_fold_of_sharers(rng):
    world = World(SPECS["gdn"], rng, capacity=2, max_sequences=4, checkpoint_pages=3)
    a, b = world.alloc(2)
    (c,) = world.fork(a)
    for _ in range(2):
        world.step([a, b, c])
    refuse(world, lambda: world.wrapper.plan([a, b, c]), "checkpoint pages", 2, 1,
           "checkpoint_pages")  # fmt: skip
    world.step([a, b])  # a moves away, so c is alone and folds in place
    world.step([c])
    world.check()


def test_input_pages_at_a_plan(full):
    a, b, c = full.alloc(3)
    full.step({a: 2, b: 2, c: 2})
    full.step({a: 2})  # its second page
    assert full.pool.input_ids.free == 1
    refuse(full, lambda: full.wrapper.plan([b, c]), "input pages", 2, 1, "input_pages")
    full.step([b])
    refuse(full, lambda: full.wrapper.plan([c, b]), "input pages", 1, 0, "input_pages")
    full.step({c: 0, b: 1, a: 2})  # nobody needs a page
    full.check()
    full.free(b)
    full.step([c])
    full.check()


def test_input_pages_at_a_fold(full):
    """Dropped shared pages come back after the launch, so they cannot pay for the new ones."""
    (a,) = full.alloc()
    full.grow(a, 4)
    b, c, d = full.fork(a, 3)
    assert full.pool.input_ids.free == 3
    refuse(full, lambda: full.wrapper.plan([a, b, c, d]), "input pages", 4, 3, "input_pages")
    full.step([a, b])
    refuse(full, lambda: full.wrapper.plan([c, d]), "input pages", 2, 1, "input_pages")
    full.step([c])
    full.step([d])  # alone by now: it keeps the pages
    full.check()


def test_input_pages_at_a_fork(full):
    a, b = full.alloc(2)
    full.step({a: 2, b: 2})
    full.step([a, b])
    assert full.pool.input_ids.free == 1
    refuse(full, lambda: full.pool.fork(a, 2), "input pages", 2, 1, "input_pages")
    full.fork(a)
    refuse(full, lambda: full.pool.fork(b), "input pages", 1, 0, "input_pages")
    full.check()


def test_checkpoints_are_asked_for_before_inputs_are_taken(rng):
    """Both run out at once: one refusal, and the other kind keeps its pages too."""
    world = World(SPECS["mamba2"], rng, capacity=2, page_rows=2, max_sequences=2,
                  checkpoint_pages=1, input_pages=1)  # fmt: skip
    (a,) = world.alloc()
    world.grow(a, 2)
    (b,) = world.fork(a)
    refuse(world, lambda: world.wrapper.plan([b]), "checkpoint pages", 1, 0, "checkpoint_pages")
    world.free(a)
    world.step([b])
    world.check()


def test_the_default_sizes_suffice_for_sequences_that_share_nothing(rng):
    world = World(SPECS["gdn"], rng, capacity=5, page_rows=2, max_window=3, max_sequences=4,
                  checkpoint_pages=None, input_pages=None)  # fmt: skip
    seqs = world.alloc(4)
    for i in range(12):
        world.step({seq: (i + n) % 4 for n, seq in enumerate(seqs)})
    world.check()
    assert world.pool.input_ids.peak == 12


def test_a_page_allocator_hands_out_each_free_id_once():
    ids = PageAllocator("pages", 5, "free some")
    a, b = ids.take(2), ids.take(3)
    assert sorted([*a, *b]) == [0, 1, 2, 3, 4]
    assert (ids.free, ids.used, ids.peak) == (0, 5, 5)
    with pytest.raises(
        CapacityError, match=r"^pages: got a need of 1; allowed 0 \(free now\); free"
    ):
        ids.take(1)
    assert ids.take(0).size == 0
    ids.share(a[[0, 0, 1]])
    assert ids.refs[a].tolist() == [3, 2]
    ids.release(a[[0, 1, 0]])
    assert ids.refs[a].tolist() == [1, 1]
    assert ids.free == 0
    ids.release(a[[1, 0]])
    assert ids.free == 2
    ids.share(b)
    ids.release(b[[2, 0, 2, 1, 0]])  # some twice in one call
    assert ids.refs[b].tolist() == [0, 1, 0]
    assert sorted(ids.take(4)) == sorted([*a, b[0], b[2]])
    assert ids.peak == 5


def test_our_own_mistakes_do_not_pass():
    ids = PageAllocator("pages", 3, "")
    (held,) = ids.take(1)
    with pytest.raises(AssertionError, match="a free page was shared"):
        ids.share(ids.refs.argsort()[:1].astype("int32"))
    ids.release(ids.take(1))
    with pytest.raises(AssertionError, match="released more often than held"):
        ids.release([held] * 2 * ids.refs[:2])  # twice what is held once
