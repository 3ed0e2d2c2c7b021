"""Rollback of committed rows: its limits, and what it does to pages that others hold."""

import pytest
import torch

from replayinfer import CapacityError, InputError
from replayinfer.testing import assert_bitwise_equal

from .kit import SPECS, Unchanged, World


def table(world, seq):
    return world.pool.cursors.table[world.pool.cursors.peek(seq)].tolist()


def test_window_reaches_back_over_the_last_commit(rng):
    world = World(SPECS["mamba2"], rng, capacity=12, max_window=4)
    (a,) = world.alloc()
    world.step({a: 4})
    world.step({a: 4}, {a: 3})
    for rows in (4, 5, 100):
        with Unchanged(world.pool), pytest.raises(InputError) as error:
            world.pool.rollback(a, rows)
        assert str(error.value).startswith(
            f"rows: got {rows} to drop; allowed 0..3 of 7 (rows of the last commit); "
        )
    world.rollback(a, 1)
    world.check()
    with pytest.raises(InputError, match=r"allowed 0\.\.2 "):
        world.pool.rollback(a, 3)
    world.rollback(a, 2)
    world.rollback(a, 0)
    world.check()
    with pytest.raises(InputError, match=r"allowed 0\.\.0 "):
        world.pool.rollback(a, 1)
    for _ in range(6):
        world.step({a: 3})
    world.check()


def test_a_commit_of_nothing_leaves_nothing_to_undo(rng):
    world = World(SPECS["mamba2"], rng, capacity=8, max_window=2)
    (a,) = world.alloc()
    world.step({a: 2})
    world.step({a: 2}, {a: 0})
    with pytest.raises(InputError, match=r"rows: got 1 to drop; allowed 0\.\.0 "):
        world.pool.rollback(a, 1)


@pytest.mark.parametrize("rows", range(9))
@pytest.mark.parametrize("family", SPECS)
def test_any_reaches_back_to_the_checkpoint(family, rows, rng):
    """And on the way forward again the convolution finds the rows before it."""
    world = World(SPECS[family], rng, capacity=8, max_window=2, restore="any", layers=[1])
    (a,) = world.alloc()
    world.seed(a, tokens=5)
    world.grow(a, 8)
    with Unchanged(world.pool), pytest.raises(InputError) as error:
        world.pool.rollback(a, 9)
    assert str(error.value).startswith(
        "rows: got 9 to drop; allowed 0..8 of 8 (rows after the checkpoint); "
    )
    world.rollback(a, rows)
    world.check()
    assert world.pool.tokens(a) == 13 - rows
    world.grow(a, 5)
    world.check()


def test_never_below_the_token_base(rng):
    world = World(SPECS["gdn"], rng, capacity=4, max_window=2, restore="any")
    (a,) = world.alloc()
    world.seed(a, tokens=9)
    world.step({a: 2})
    world.step({a: 2})
    world.step({a: 2})  # folds four rows first
    assert world.pool.tokens(a) == 15
    with pytest.raises(
        InputError, match=r"rows: got 3 to drop; allowed 0\.\.2 of 2 \(rows after the"
    ):
        world.pool.rollback(a, 3)
    world.rollback(a, 2)
    assert world.pool.tokens(a) == 13
    world.check()


def test_a_fold_takes_away_what_it_folded(rng):
    """In restore="window" too: the rows of the last commit may be in the checkpoint by now."""
    world = World(SPECS["mamba2"], rng, capacity=8, max_window=2)
    (a,) = world.alloc()
    world.step({a: 2})
    world.step({a: 0}, force=[a])
    with pytest.raises(InputError, match=r"allowed 0\.\.0 "):
        world.pool.rollback(a, 1)
    world.check()


def test_an_aborted_window_narrows_what_can_be_undone(rng):
    """Its rows lie in the ring where the oldest taps before the last commit were."""
    world = World(SPECS["mamba2"], rng, capacity=32, max_window=3, layers=[0])
    (a,) = world.alloc()
    world.step({a: 3})
    for aborted, left in ((0, 3), (1, 2), (2, 1), (3, 0)):
        world.step({a: 3})
        plan = world.wrapper.plan([a], aborted)
        world.wrapper.fold()
        world.run(plan, world.draw(plan))
        world.wrapper.abort()
        with pytest.raises(InputError, match=rf"rows: got 4 to drop; allowed 0\.\.{left} "):
            world.pool.rollback(a, 4)
        world.rollback(a, left)
        world.check()
        world.step({a: 2})
        world.check()


@pytest.mark.parametrize("rows", range(9))
@pytest.mark.parametrize("side", ["parent", "child"])
def test_a_shared_partial_page_is_copied_and_later_shared_pages_are_let_go(side, rows, rng):
    """Pages of 4 rows, both full and shared; the other side must not notice."""
    world = World(SPECS["gdn"], rng, capacity=8, page_rows=4, restore="any", layers=[3])
    pool = world.pool
    (a,) = world.alloc()
    world.grow(a, 8)
    (b,) = world.fork(a)
    mine, other = (a, b) if side == "parent" else (b, a)
    shared = table(world, a)
    assert table(world, b) == shared
    fields = {n: f[:, shared].clone() for n, f in pool.inputs.fields.items()}

    world.rollback(mine, rows)
    left = 8 - rows
    page, offset = divmod(left, 4)
    now = table(world, mine)
    assert now[:page] == shared[:page]
    if page < 2:
        if offset:
            assert now[page] not in (-1, *shared)
        else:
            assert now[page] == -1
        assert now[page + 1 :] == [-1] * (1 - page)
    assert pool.pages_in_use()["input pages"] == 2 + bool(offset)
    assert table(world, other) == shared
    world.check()
    world.grow(mine, 3)
    world.grow(other, 1)
    world.grow(mine, 9)
    world.check()
    if not world.pool.cursors.base[pool.cursors.peek(other)]:
        for name, field in pool.inputs.fields.items():
            assert_bitwise_equal(field[:, shared], fields[name], name)


def test_private_pages_after_the_cut_are_kept(rng):
    world = World(SPECS["mamba2"], rng, capacity=8, page_rows=2, restore="any")
    (a,) = world.alloc()
    world.grow(a, 8)
    before = table(world, a)
    world.rollback(a, 5)
    assert table(world, a) == before
    world.grow(a, 4)
    assert table(world, a) == before
    world.check()


def test_shared_and_private_pages_mixed(rng):
    """A cut through the first of two shared pages, private pages after them."""
    world = World(SPECS["mamba2"], rng, capacity=8, page_rows=2, restore="any", layers=[0])
    (a,) = world.alloc()
    world.grow(a, 4)
    (b,) = world.fork(a)
    world.grow(a, 4)
    before = table(world, a)
    world.rollback(a, 7)
    now = table(world, a)
    assert now[0] not in before
    assert now[1:] == [-1, *before[2:]]
    world.check()
    (c,) = world.fork(a)  # of a table with a hole
    world.grow(a, 5)
    world.grow(c, 6)
    world.grow(b, 5)
    world.check()
    world.grow(a, 9)
    world.check()


def test_no_page_for_the_copy(rng):
    world = World(SPECS["mamba2"], rng, capacity=8, page_rows=4, restore="any", input_pages=2)
    (a,) = world.alloc()
    world.grow(a, 8)
    world.fork(a)
    with Unchanged(world.pool), pytest.raises(CapacityError) as error:
        world.pool.rollback(a, 1)
    assert (error.value.pool, error.value.needed, error.value.free) == ("input pages", 1, 0)
    world.rollback(a, 4)  # at a page boundary nothing is copied
    world.check()


def test_a_rollback_reaches_the_same_undo_through_a_fork(rng):
    world = World(SPECS["gdn"], rng, capacity=8, max_window=3, page_rows=2)
    (a,) = world.alloc()
    world.step({a: 3})
    (b,) = world.fork(a)
    world.rollback(b, 2)
    world.check()
    world.step({a: 1, b: 3})
    world.rollback(a, 1)
    with pytest.raises(InputError, match=r"allowed 0\.\.0 "):
        world.pool.rollback(a, 1)  # the undo was that of the last commit alone
    world.check()


@pytest.mark.parametrize("rows", [-1, True, 1.0, None, "1"])
def test_bad_counts(rows, rng):
    world = World(SPECS["mamba2"], rng, capacity=4)
    (a,) = world.alloc()
    world.step([a])
    with Unchanged(world.pool), pytest.raises(InputError, match=r"^rows: got .+; allowed .+; .+"):
        world.pool.rollback(a, rows)


def test_random_walks(rng):
    """Windows, rejections, rollbacks and forks in any order, in restore="any"."""
    world = World(SPECS["mamba2"], rng, capacity=7, page_rows=2, max_window=3, restore="any",
                  layers=[0])  # fmt: skip
    world.alloc(2)
    for _ in range(60):
        live = world.model.live()
        kind, i, n = torch.randint(0, 1000, (3,), generator=rng).tolist()
        seq = live[i % len(live)]
        if kind < 350:
            world.rollback(seq, n % (world.pool.history(seq) + 1))
        elif kind < 450 and len(live) < 6:
            world.fork(seq)
        elif kind < 500 and len(live) > 1:
            world.free(seq)
        else:
            world.step(dict.fromkeys(live, 3), {s: (n + j) % 4 for j, s in enumerate(live)})
        world.check(*world.model.live()[:1])
    world.check()
