"""What a sequence of a device-planned pool owns, and when its pages come back."""

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, InputError, StatePool, UnsupportedError
from replayinfer.testing import assert_untouched, snapshot

from ..pools.kit import SPECS
from .kit import check_books, device_planner, small_pool


def step(planner, seqs, windows=1, accepted=None):
    plan = planner.plan(seqs, windows)
    planner.folded(plan)
    planner.commit(plan, accepted)


def used(pool):
    return pool.checkpoint_ids.used, pool.input_ids.used


def test_alloc_takes_all_that_a_sequence_can_need():
    pool = small_pool(capacity=5, page_rows=2)
    a, b = pool.alloc(2)
    assert used(pool) == (2, 6)
    planner = device_planner(pool)
    for _ in range(12):
        step(planner, [a, b])
    assert used(pool) == (2, 6)
    check_books(pool)
    pool.free([a, b])
    assert used(pool) == (0, 0)


@pytest.mark.parametrize(("rows", "lent"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 2), (6, 3)])
def test_a_fork_leaves_a_spare_for_every_page_that_is_shared(rows, lent):
    """The copy has its three pages, the parent one for each that it lends, both a checkpoint."""
    pool = small_pool(capacity=6, page_rows=2, max_window=6)
    (a,) = pool.alloc()
    planner = device_planner(pool)
    step(planner, [a], rows)
    b, c = pool.fork(a, 2)
    assert used(pool) == (1 + 1 + 2, 3 + lent + 2 * 3)
    slots = [pool.slot(s) for s in (a, b, c)]
    tables = pool.cursors.table[slots]
    assert (tables[0] == tables[1])[:lent].all()
    assert len(set(tables.flatten().tolist())) == 9 - 2 * lent
    check_books(pool)
    # Another fork of either finds the spares there already.
    (d,) = pool.fork(a)
    (e,) = pool.fork(b)
    assert used(pool) == (6, 3 + lent + 4 * 3)
    # The fold of each goes to its own pages; what they shared is nobody's, once the host looks.
    plan = planner.plan([a, b, c, d, e], 1, force_fold=True)
    planner.folded(plan)
    planner.commit(plan)
    assert used(pool) == (6, 3 + lent + 4 * 3)
    pool.refresh()
    shared = rows > 0  # without rows nothing folds
    assert used(pool) == ((5, 15) if shared else (6, 15))
    check_books(pool)
    pool.free([a, b, c, d, e])
    assert used(pool) == (0, 0)


def test_freeing_reads_nothing(monkeypatch):
    """In any order, whether or not the sharers have folded."""
    pool = small_pool(capacity=4, page_rows=2)
    (a,) = pool.alloc()
    planner = device_planner(pool)
    step(planner, [a], 3)
    b, c = pool.fork(a, 2)
    step(planner, [b, c], 2)  # b and c fold, a still uses what it lent
    monkeypatch.setattr(pool.on_device, "pull", lambda slots: pytest.fail("the device was read"))
    pool.free(b)
    pool.free(a)
    assert used(pool) == (2, 3)  # c's own, and what it used when the host last looked
    pool.free(c)
    assert used(pool) == (0, 0)
    assert pool.on_device.records.handle.tolist() == [-1] * pool.cursors.slots


def test_alloc_looks_for_pages_that_folds_have_let_go_only_when_it_must():
    pool = small_pool(4, capacity=4, page_rows=2, checkpoint_pages=4, input_pages=12)
    planner = device_planner(pool)
    (a,) = pool.alloc()
    step(planner, [a], 3)
    (b,) = pool.fork(a)
    assert used(pool) == (3, 2 + 1 + 2)
    (c,) = pool.alloc()
    assert used(pool)[0] == 4
    with pytest.raises(CapacityError, match="checkpoint pages"):
        pool.alloc()
    step(planner, [a, b], 2)  # both fold away from what they share
    (d,) = pool.alloc()
    assert used(pool)[0] == 4
    check_books(pool)
    pool.free([a, b, c, d])


@pytest.mark.parametrize("short", ["checkpoint_pages", "input_pages", "max_sequences"])
def test_a_fork_without_room_changes_nothing(short):
    enough = {"checkpoint_pages": 3, "input_pages": 3 + 3 + 1}
    sequences = 1 if short == "max_sequences" else 2
    less = {} if short == "max_sequences" else {short: enough[short] - 1}
    pool = small_pool(sequences, capacity=6, page_rows=2, **(enough | less))
    (a,) = pool.alloc()
    step(device_planner(pool), [a], 3)
    pool.refresh()
    before = snapshot(everything(pool))
    with pytest.raises(CapacityError):
        pool.fork(a)
    assert_untouched(before, everything(pool))
    check_books(pool)


def everything(pool):
    state = {"records": pool.on_device.records.words, "conv": pool.conv.rows}
    state |= pool.inputs.fields
    for name in ("own_checkpoint", "own_table"):
        state[name] = torch.from_numpy(getattr(pool.on_device, name))
    for name in ("base", "history", "undo", "checkpoint", "table", "generation", "busy"):
        state[f"cursor {name}"] = torch.from_numpy(getattr(pool.cursors, name))
    for ids in (pool.slot_ids, pool.checkpoint_ids, pool.input_ids):
        state[f"{ids.name} refs"] = torch.from_numpy(ids.refs)
        state[f"{ids.name} free"] = torch.tensor(ids.free)
    return state


def test_rollback_into_a_lent_page_copies_its_rows():
    pool = small_pool(capacity=8, page_rows=4, max_window=8, restore="any")
    (a,) = pool.alloc()
    planner = device_planner(pool)
    step(planner, [a], 6)
    (b,) = pool.fork(a)
    slots = [pool.slot(a), pool.slot(b)]
    shared = int(pool.cursors.table[slots[0], 0])
    assert shared == pool.cursors.table[slots[1], 0]
    for field in pool.inputs.fields.values():
        field[:, shared] = torch.arange(4).view(4, *[1] * (field.dim() - 3)).to(field.dtype)
    before = used(pool)
    pool.rollback(a, 3)
    assert used(pool) == before  # b still holds it
    mine = int(pool.cursors.table[slots[0], 0])
    assert mine != shared
    for field in pool.inputs.fields.values():
        assert torch.equal(field[:, mine, :3], field[:, shared, :3])
    check_books(pool)
    pool.rollback(b, 4)
    assert pool.input_ids.used == before[1] - 1
    check_books(pool)


def test_the_host_counts_tokens_from_the_device():
    pool = small_pool(capacity=4, max_window=3)
    (a,) = pool.alloc()
    planner = device_planner(pool)
    step(planner, [a], 3, torch.tensor([2]))
    step(planner, [a], 3, torch.tensor([1]))  # folds the two
    assert (pool.tokens(a), pool.history(a)) == (3, 1)
    assert pool.slot(a) == a & 0xFFFFF
    (b,) = pool.fork(a)
    assert (pool.tokens(b), pool.history(b)) == (3, 1)


def test_sizes():
    spec = SPECS["gdn"]
    host, device = (StatePool(spec, [0], 5, planner=p) for p in ("host", "device"))
    assert host.on_device is None
    assert host.nbytes == host.capacity_report().total_bytes
    assert device.nbytes == device.capacity_report().total_bytes
    words = device.on_device.records.words
    assert device.nbytes - host.nbytes == words.nbytes == 5 * 4 * 16
    assert "device cursors    5 x 64 B = 320 B" in str(device.capacity_report())
    assert "device cursors" not in str(host.capacity_report())
    budget = device.nbytes
    again = StatePool.from_memory_budget(spec, [0], budget, planner="device")
    assert again.sizes.max_sequences == 5
    again.alloc(5)
    with pytest.raises(UnsupportedError, match=r"^planner: got 'gpu'; allowed 'host' or 'device'"):
        StatePool(spec, [0], 5, planner="gpu")
    with pytest.raises(InputError):
        device.alloc(0)


def test_handles_on_the_device_are_never_slots():
    """An entry below 2^20 is a slot; the first handle of any pool lies above."""
    for _ in range(3):
        pool = small_pool(2)
        assert min(pool.alloc(2)) >= 1 << 20
        assert (pool.on_device.records.handle >= 1 << 20).all()


def test_a_seed_needs_no_page(rng):
    """It goes to the page that the sequence owns, and leaves what others use."""
    pool = small_pool(2, capacity=4, page_rows=2, checkpoint_pages=3, input_pages=6)
    (a,) = pool.alloc()
    step(device_planner(pool), [a], 3)
    (b,) = pool.fork(a)
    free = pool.checkpoint_ids.free
    assert free == 0
    shared = pool.checkpoints.storage[:, pool.cursors.checkpoint[pool.slot(b)]].clone()
    state = {0: torch.randn(pool.spec.state_shape, generator=rng)}
    tail = {0: torch.zeros(pool.spec.conv_channels, 3)}
    pool.seed(a, state, tokens=7, conv=tail)
    assert (pool.tokens(a), pool.history(a)) == (7, 0)
    page = pool.cursors.checkpoint[[pool.slot(a), pool.slot(b)]]
    assert page[0] != page[1]
    assert torch.equal(pool.checkpoints.storage[:, page[1]], shared)
    assert np.array_equal(pool.checkpoints.read(0, torch.tensor([page[0]]))[0], state[0])
    check_books(pool)
