"""A fork shares pages, copies at most the partial one, and nothing shared is ever written."""

import numpy as np
import pytest
import torch

from replayinfer.testing import assert_bitwise_equal

from .kit import SPECS, World, check_books, memory


def grown(rng, rows, family="mamba2", **options):
    """A world with capacity 8 in pages of 4 rows, and one sequence with that many rows."""
    options = {"capacity": 8, "page_rows": 4, "layers": (1, 4), **options}
    world = World(SPECS[family], rng, **options)
    (seq,) = world.alloc()
    world.grow(seq, rows)
    assert world.pool.history(seq) == rows
    return world, seq


def table(world, seq):
    """Its input pages, without the entries that hold none."""
    row = world.pool.cursors.table[world.pool.cursors.peek(seq)]
    return row[row >= 0].tolist()


def page(world, seq):
    return int(world.pool.cursors.checkpoint[world.pool.cursors.peek(seq)])


def rows_of(world, seq):
    """The committed rows of a sequence, every field and layer."""
    pool, history = world.pool, world.pool.history(seq)
    pages = torch.tensor(table(world, seq), dtype=torch.int64)
    return {
        n: f[:, pages].flatten(1, 2)[:, :history].clone() for n, f in pool.inputs.fields.items()
    }


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows", range(9))
def test_what_is_shared_and_what_is_copied(rows, count, rng):
    world, parent = grown(rng, rows)
    pool = world.pool
    used, before = pool.pages_in_use(), table(world, parent)
    memory_before = {name: t.clone() for name, t in memory(pool).items()}
    children = world.fork(parent, count)

    full, partial = divmod(rows, 4)
    assert table(world, parent) == before
    copied = count if partial else 0
    assert pool.pages_in_use() == {
        "checkpoint pages": used["checkpoint pages"],
        "input pages": used["input pages"] + copied,
        "sequence slots": used["sequence slots"] + count,
    }
    assert pool.checkpoint_ids.refs[page(world, parent)] == 1 + count
    for child in children:
        assert page(world, child) == page(world, parent)
        assert table(world, child)[:full] == before[:full]
        assert len(table(world, child)) == full + bool(partial)
        assert pool.history(child) == rows
        for name, mine in rows_of(world, child).items():
            assert_bitwise_equal(mine, rows_of(world, parent)[name], name)
    own = [p for child in children for p in table(world, child)[full:]]
    assert len(set(own)) == copied
    assert not set(own) & set(before)

    # No memory changed apart from the copied rows and the children's rings.
    slots = pool.cursors.resolve(children)
    for name, tensor in memory(pool).items():
        may = torch.zeros(tensor.shape[:3], dtype=torch.bool)
        if name == "conv":
            may[:, slots] = True
        elif name.startswith("rows."):
            may[:, own, :partial] = True
        now, old = tensor[~may], memory_before[name][~may]
        assert (now.eq(old) | now.isnan() & old.isnan()).all(), name
    world.check()


@pytest.mark.parametrize("rows", range(8))
def test_a_fork_at_an_earlier_row(rows, rng):
    """As a fork of what a rollback would leave, and the parent does not notice."""
    world, parent = grown(rng, 7, restore="any")
    before, held = table(world, parent), world.pool.pages_in_use()["input pages"]
    (child,) = world.pool.fork(parent, rows=rows)
    world.model.fork(parent, child)
    world.model.rollback(child, 7 - rows)
    assert table(world, parent) == before
    assert table(world, child)[: rows // 4] == before[: rows // 4]
    assert world.pool.pages_in_use()["input pages"] == held + bool(rows % 4)
    world.check()
    world.grow(child, 6)
    world.grow(parent, 3)
    world.grow(child, 6)
    world.check()


def test_a_fork_of_a_fork_with_the_parents_freed_first(rng):
    world, a = grown(rng, 6, family="gdn", format="fp32_split")
    (b,) = world.fork(a)
    world.grow(a, 1)
    world.free(a)
    world.grow(b, 1)
    (c,) = world.fork(b)
    (d,) = world.fork(c)
    world.free(b)
    for seq, rows in ((c, 5), (d, 3)):
        world.grow(seq, rows)
        world.check()
    world.free(c)
    world.grow(d, 12)
    world.check()
    world.free(d)
    assert set(world.pool.pages_in_use().values()) == {0}


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("fmt", ["fp32", "fp32_split"])
def test_sharers_that_fold_in_one_launch(family, fmt, rng):
    """All of them move, even the last: sharing is judged by the counts when the launch starts."""
    world, a = grown(rng, 8, family=family, format=fmt)
    b, c = world.fork(a, 2)
    pool, shared = world.pool, page(world, a)
    before = pool.checkpoints.storage[:, shared].clone()
    rows = rows_of(world, a)
    pages = table(world, a)
    plan = world.step([a, b, c])
    targets = plan.arrays.fold_target[:3].tolist()
    assert plan.arrays.fold_source[:3].tolist() == [shared] * 3
    assert len({*targets, shared}) == 4
    # What was shared is as it was, though nobody holds it any more.
    assert torch.equal(pool.checkpoints.storage[:, shared], before)
    for name, field in pool.inputs.fields.items():
        assert_bitwise_equal(field[:, pages].flatten(1, 2), rows[name], name)
    assert pool.checkpoint_ids.refs[shared] == 0
    assert (pool.input_ids.refs[pages] == 0).all()
    assert pool.pages_in_use()["input pages"] == 3
    world.check()
    for _ in range(9):
        world.step([c, a, b])
    world.check()


def test_a_sharer_that_folds_alone_leaves_the_others_alone(rng):
    world, a = grown(rng, 7, family="gdn")
    b, c = world.fork(a, 2)
    pool, shared = world.pool, page(world, a)
    world.step([a, b, c], force=[b])
    assert page(world, a) == page(world, c) == shared != page(world, b)
    assert pool.checkpoint_ids.refs[shared] == 2
    world.check()
    world.step([a], force=[a])
    assert page(world, a) != shared
    world.step([c], force=[c])
    assert page(world, c) == shared  # alone by now: in place
    world.check()


def test_a_fold_drops_shared_pages_and_keeps_private_ones(rng):
    """Pages of 2 rows: two shared, one copied at the fork, one private and full."""
    world, a = grown(rng, 5, page_rows=2)
    (b,) = world.fork(a)
    world.grow(b, 2)
    shared, private = table(world, b)[:2], table(world, b)[2:]
    assert len(private) == 2
    assert shared == table(world, a)[:2]
    taken = world.pool.pages_in_use()["input pages"]
    world.step([b], force=[b])
    assert table(world, b) == private  # moved to the front; the new row went into the first
    assert world.pool.history(b) == 1
    assert world.pool.pages_in_use()["input pages"] == taken  # a still holds the shared ones
    world.check()
    before = table(world, a)
    world.step([a], force=[a])
    assert table(world, a) == before  # all private now: none is given back
    world.grow(b, 12)
    world.check()


def test_a_fold_with_nothing_private_takes_pages(rng):
    world, a = grown(rng, 8)
    (b,) = world.fork(a)
    assert table(world, b) == table(world, a)
    world.step([b])
    assert len(table(world, b)) == 1
    assert not set(table(world, b)) & set(table(world, a))
    world.check()


def test_children_of_many_parents_in_random_order(rng):
    """Forks, frees, steps and forced folds in any order; the books are checked every time."""
    spec = SPECS["mamba2"]
    world = World(spec, rng, capacity=6, page_rows=2, layers=[0], max_sequences=6, max_window=2)
    world.alloc(2)
    for _ in range(60):
        live = world.model.live()
        draw = torch.randint(0, 100, (4,), generator=rng).tolist()
        pick = live[draw[1] % len(live)]
        if draw[0] < 25 and len(live) < 6:
            world.fork(pick, 1 + draw[2] % (6 - len(live)))
        elif draw[0] < 35 and len(live) > 1:
            world.free(pick)
        else:
            order = torch.randperm(len(live), generator=rng).tolist()
            some = [live[i] for i in order[: 1 + draw[1] % len(live)]]
            windows = {seq: (draw[2] + i) % 3 for i, seq in enumerate(some)}
            accepted = {
                seq: min(w, (draw[3] + i) % 3) for i, (seq, w) in enumerate(windows.items())
            }
            world.step(windows, accepted, force=[pick] if draw[3] % 4 == 0 else ())
        check_books(world.pool)
    world.check()
    world.free(np.array(world.model.live()).tolist())
    assert set(world.pool.pages_in_use().values()) == {0}
