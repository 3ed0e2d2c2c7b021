"""Pools that grow and shrink between steps: handles and bits stay, pages move."""

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, InputError, PlanError, StaleHandleError, StatePool
from replayinfer.pools.conv import ConvPool

from ..pools.kit import Unchanged, books, check_books, poison_pool
from ..transfer.rig import CASES, SPECS, Rig, assert_equal_outputs, assert_same

BIG = {"max_sequences": 9, "checkpoint_pages": 20, "input_pages": 50}


def scattered(spec, rng, **options):
    """Sequences whose pages lie at the far end, one of them a fork that shares; and their twins."""
    options = {"sequences": 5, "checkpoint_pages": 10, "input_pages": 30, "layers": (4,)} | options
    rig = Rig(spec, rng, **options)
    twin = Rig(spec, rng, like=rig, **options)
    before = rig.draw(9)
    pairs = []
    for r in (rig, twin):
        fill = r.pool.checkpoint_ids.take(6), r.pool.input_ids.take(21)
        a, b, gone = r.pool.alloc(3)
        r.step({a: before[:3], gone: before[:2]})
        r.decode(a, before[3:], window=2)
        (child,) = r.pool.fork(a)
        r.step({b: before[:3], child: before[:1]})
        r.pool.free(gone)
        r.pool.checkpoint_ids.release(fill[0])
        r.pool.input_ids.release(fill[1])
        pairs.append([a, b, child])
    assert rig.pool.cursors.checkpoint.max() >= 6
    assert rig.pool.cursors.table.max() >= 21
    assert (rig.pool.input_ids.refs > 1).any()
    assert (rig.pool.checkpoint_ids.refs > 1).any()
    return rig, twin, *pairs


def go_on(rig, twin, here, there, rng):
    stream = rig.draw(7)
    for a, b in zip(here, there, strict=True):
        assert_same(rig, a, twin, b)
    for t in (0, 2, 4):
        got = rig.step(dict.fromkeys(here, stream[t : t + 2]))
        want = twin.step(dict.fromkeys(there, stream[t : t + 2]))
        for a, b in zip(here, there, strict=True):
            assert_equal_outputs(got[a], want[b])
    for a, b in zip(here, there, strict=True):
        assert_same(rig, a, twin, b)
    check_books(rig.pool)


def check_bytes(pool):
    """What is reported is what a new pool of those sizes would hold, and what this one does."""
    s = pool.sizes
    fresh = StatePool(
        pool.spec, pool.layers, s.max_sequences, capacity=pool.capacity, dtype=pool.dtype,
        max_window=pool.max_window, format=pool.format, restore=pool.restore,
        checkpoint_pages=s.checkpoint_pages, input_pages=s.input_pages, page_rows=s.page_rows,
    )  # fmt: skip
    storages = [t.untyped_storage() for g in pool.guarded() for t in (g.whole,)]
    held = sum(storage.nbytes() for storage in storages)
    held += sum(w.untyped_storage().nbytes() for w in pool.weights.values())
    assert held == pool.nbytes == pool.capacity_report().total_bytes == fresh.nbytes
    assert str(pool.capacity_report()) == str(fresh.capacity_report())
    for ids, count in (
        (pool.slot_ids, s.max_sequences),
        (pool.checkpoint_ids, s.checkpoint_pages),
        (pool.input_ids, s.input_pages),
    ):
        assert ids.count == count == ids.used + ids.free


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_shrink_to_what_is_held_and_grow_again(spec, format, rng):
    """All pages but the held ones go, so every far page moves, the shared ones for both sharers."""
    rig, twin, here, there = scattered(spec, rng, format=format)
    pool = rig.pool
    used = pool.pages_in_use()
    shared = [np.sort(ids.refs)[::-1].tolist() for ids in (pool.checkpoint_ids, pool.input_ids)]
    tight = {
        "max_sequences": 4,  # the third slot was freed, the fork has the fourth
        "checkpoint_pages": used["checkpoint pages"],
        "input_pages": used["input pages"],
    }
    pool.resize(**tight)
    check_books(pool)
    check_bytes(pool)
    assert pool.checkpoint_ids.free == pool.input_ids.free == 0
    for ids, refs in zip((pool.checkpoint_ids, pool.input_ids), shared, strict=True):
        assert np.sort(ids.refs)[::-1].tolist() == refs[: ids.count]
    for a, b in zip(here, there, strict=True):
        assert_same(rig, a, twin, b)
    pool.resize(**BIG)
    check_bytes(pool)
    go_on(rig, twin, here, there, rng)
    sequences = pool.alloc(6)  # the slots that came
    assert len(set(sequences) | set(here)) == 9
    go_on(rig, twin, [sequences[-1]], twin.pool.alloc(), rng)
    pool.free([*sequences, *here])
    assert not any(pool.pages_in_use().values())


@pytest.mark.parametrize("restore", ["window", "any"])
def test_every_size_alone(restore, rng):
    rig, twin, here, there = scattered(SPECS["gdn"], rng, restore=restore, layers=(1, 4))
    for change in (
        {"max_sequences": 7}, {"checkpoint_pages": 5}, {"input_pages": 12}, {},
        {"max_sequences": 4}, {"checkpoint_pages": 11}, {"input_pages": 31},
    ):  # fmt: skip
        before = rig.pool.sizes
        rig.pool.resize(**change)
        for name in BIG:
            assert getattr(rig.pool.sizes, name) == change.get(name, getattr(before, name))
        check_bytes(rig.pool)
        check_books(rig.pool)
    go_on(rig, twin, here, there, rng)


def test_pages_that_came_hold_nothing_that_is_read(rng):
    """New sequences start at zero in memory that was someone's before the resize."""
    rig = Rig(SPECS["mamba2"], rng, sequences=2)
    (seq,) = rig.pool.alloc()
    rig.decode(seq, rig.draw(5))
    rig.pool.free(seq)
    poison_pool(rig.pool)
    rig.pool.resize(**BIG)
    poison_pool(rig.pool)
    rig.pool.resize(max_sequences=1, checkpoint_pages=1, input_pages=3)
    poison_pool(rig.pool)
    (seq,) = rig.pool.alloc()
    stream = rig.draw(8)
    outputs = rig.decode(seq, stream, window=2)
    decoded = {seq: torch.ones(8, dtype=torch.bool)}
    rig.check({seq: stream}, {seq: outputs}, decoded=decoded)


@pytest.mark.parametrize(
    ("change", "pool_name"),
    [
        ({"max_sequences": 3}, "sequence slots: got a need of 4; allowed 3"),
        ({"checkpoint_pages": 1}, "checkpoint pages: got a need of"),
        ({"input_pages": 3}, "input pages: got a need of"),
        (BIG | {"input_pages": 1}, "input pages"),
    ],
)
def test_too_small_for_what_is_held(change, pool_name, rng):
    rig, twin, here, there = scattered(SPECS["gdn"], rng)
    sizes = rig.pool.sizes
    with Unchanged(rig.pool), pytest.raises(CapacityError, match=pool_name):
        rig.pool.resize(**change)
    assert rig.pool.sizes == sizes
    go_on(rig, twin, here, there, rng)


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4"])
def test_sizes_that_are_none(name, value, rng):
    pool = Rig(SPECS["kda"], rng).pool
    with Unchanged(pool), pytest.raises(InputError, match=f"{name}: got .*; allowed an integer >="):
        pool.resize(**{name: value})


def test_more_slots_than_a_handle_can_name(rng):
    pool = StatePool(SPECS["kda"], [0], 1)
    with Unchanged(pool), pytest.raises(InputError, match=r"max_sequences: .* and <= 1048576"):
        pool.resize(max_sequences=2**20 + 1)


def test_busy_or_asleep(rng):
    rig, _, (a, *_), _ = scattered(SPECS["mamba2"], rng)
    rig.start({a: rig.draw(1)})
    with Unchanged(rig.pool), pytest.raises(PlanError, match="resize: got a pool with a plan in"):
        rig.pool.resize(**BIG)
    rig.wrapper.abort()
    rig.pool.sleep()
    with pytest.raises(PlanError, match=r"resize: got a pool that is asleep; .* call wake first"):
        rig.pool.resize(**BIG)
    rig.pool.wake()
    rig.pool.resize(**BIG)


def test_memory_that_is_not_there(rng, monkeypatch):
    """The states stay where they are, and the pool as it was."""
    rig, twin, here, there = scattered(SPECS["gdn"], rng)
    sizes = rig.pool.sizes

    def fails(*args):
        raise MemoryError("none left")

    before = books(rig.pool)
    with Unchanged(rig.pool):
        monkeypatch.setattr(ConvPool, "__init__", fails)  # the last of the three
        with pytest.raises(MemoryError):
            rig.pool.resize(**BIG)
        monkeypatch.undo()
    assert all(books(rig.pool)[name] is before[name] for name in ("checkpoints", "conv", "rows.k"))
    assert rig.pool.sizes == sizes
    check_bytes(rig.pool)
    go_on(rig, twin, here, there, rng)


def test_a_slot_that_comes_back_does_not_repeat_a_handle(rng):
    pool = StatePool(SPECS["gdn"], [0], 4)
    handles = set()
    for _ in range(3):
        for _ in range(2):
            seqs = pool.alloc(4)
            assert not handles & set(seqs)
            handles |= set(seqs)
            pool.free(seqs)
        pool.resize(max_sequences=1)
        pool.resize(max_sequences=4)
    for handle in handles:
        with pytest.raises(StaleHandleError):
            pool.tokens(handle)


def test_a_handle_of_a_slot_that_went(rng):
    pool = StatePool(SPECS["gdn"], [0], 4)
    seqs = pool.alloc(4)
    pool.free(seqs[2:])
    pool.resize(max_sequences=2)
    with pytest.raises(StaleHandleError):
        pool.tokens(seqs[3])
    assert pool.tokens(seqs[1]) == 0
    pool.resize(max_sequences=4)
    pool.alloc(2)
    with pytest.raises(StaleHandleError):
        pool.free(seqs[3])
