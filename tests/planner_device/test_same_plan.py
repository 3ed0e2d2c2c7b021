"""The device makes the host's plan, bit for bit: over random walks, pads, windows and policies."""

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, HostPlanner
from replayinfer.planner import Deadline, fold_budget

from ..trees.forest import matrix, path_to
from .kit import assert_same_plan, check_books, device_planner, host_plan, read, small_pool


def entries_of(seqs, generator, bucket, stale):
    """Where each sequence lies in a bucket, in order, and its name there: a handle or a slot."""
    rows = np.sort(generator.permutation(bucket)[: len(seqs)])
    given = generator.choice([-1, -7, *stale], size=bucket)
    for row, seq in zip(rows, seqs, strict=True):
        given[row] = seq if generator.random() < 0.7 else seq & 0xFFFFF
    return rows, torch.from_numpy(given)


def draw_trees(generator, windows):
    """A tree of every window, and an accepted path of it."""
    trees = [[int(generator.integers(-1, t)) for t in range(n)] for n in windows]
    return trees, [path_to(p, int(generator.integers(-1, len(p)))) for p in trees]


def on_device(generator, values, rows, bucket, dtype):
    """`values` in the rows of a bucket; any numbers in the others."""
    full = generator.integers(-5, 20, size=(bucket, values.shape[1]))
    full[rows] = values
    return torch.from_numpy(full).to(dtype)


def walk(pool, generator, steps, policy, twin=None):
    """Random plans on the device, each next to the host's; and the host's whole steps on `twin`."""
    planner = device_planner(pool, policy=policy)
    other = HostPlanner(twin, policy=policy) if twin else None
    pools = [pool] + [twin] * (twin is not None)
    names = [[], []]  # handles by pool
    stale = [123 << 21]
    for _ in range(steps):
        for action in generator.choice(["alloc", "fork", "free", "rollback", "none"], size=2):
            at = int(generator.integers(max(len(names[0]), 1)))
            seq = names[0][at] if names[0] else None
            try:
                if action == "alloc" and len(names[0]) < pool.cursors.slots:
                    for p, mine in zip(pools, names, strict=False):
                        mine += p.alloc(1)
                elif action == "fork" and seq is not None:
                    for p, mine in zip(pools, names, strict=False):
                        mine += p.fork(mine[at])
                elif action == "free" and seq is not None:
                    stale.append(seq)
                    for p, mine in zip(pools, names, strict=False):
                        p.free(mine.pop(at))
                elif action == "rollback" and seq is not None:
                    slot = pool.slot(seq)
                    pool.refresh(slot)
                    most = min(pool.cursors.undo[slot], pool.cursors.history[slot])
                    rows = int(generator.integers(most + 1))
                    for p, mine in zip(pools, names, strict=False):
                        p.rollback(mine[at], rows)
            except CapacityError:
                pass  # of both alike: the books are compared below
        count = int(generator.integers(len(names[0]) + 1))
        chosen = generator.permutation(len(names[0]))[:count]
        seqs = [names[0][i] for i in chosen]
        windows = generator.integers(0, pool.max_window + 1, size=count)
        force = generator.random(count) < 0.2
        bucket = count + int(generator.integers(3)) or 1
        trees, width, options = None, pool.max_window, {}
        if generator.random() < 0.4:
            trees, paths = draw_trees(generator, windows)
            options = {"parents": matrix(trees, width), "window": width}
        pool.refresh()
        want = host_plan(pool, seqs, windows, policy=policy, force=force, **options)

        rows, given = entries_of(seqs, generator, bucket, stale)
        spread_out = torch.full((bucket,), 77, dtype=torch.int64)  # windows of pads do not matter
        spread_out[rows] = torch.from_numpy(windows)
        forced = torch.ones(bucket, dtype=torch.bool)
        forced[rows] = torch.from_numpy(force)
        for array in vars(planner._step(bucket).arrays).values():
            array.fill_(123456)  # as a kernel that scribbles would
        lines = None
        if trees is not None:  # 99 beyond a window
            dtype = (torch.int32, torch.int64)[int(generator.integers(2))]
            lines = on_device(generator, matrix(trees, width), rows, bucket, dtype)
        plan = planner.plan(given, spread_out, force_fold=forced, parents=lines)
        assert_same_plan(read(plan), want, rows, bucket)

        fate = generator.choice(["commit", "abort early", "abort", "commit"])
        accepted = torch.from_numpy(generator.integers(0, windows + 1))
        counts = torch.full((bucket,), -5, dtype=torch.int64)
        if trees is not None:
            accepted = torch.tensor([len(path) for path in paths], dtype=torch.long)
            padded = np.full((count, width), -1)
            for row, path in enumerate(paths):
                padded[row, : len(path)] = path
        counts[rows] = accepted
        if fate != "abort early":
            planner.folded(plan)
        if fate == "commit":
            if trees is not None:
                ways = on_device(generator, padded, rows, bucket, dtype)
                counts, nodes = planner.accept(plan, ways)
                full = torch.full((bucket, width), -1, dtype=torch.int32)
                full[rows] = torch.from_numpy(padded).int()
                assert torch.equal(nodes, full)
            got = planner.commit(plan, counts)
            assert got[rows].tolist() == accepted.tolist()
            assert int(got.sum()) == int(accepted.sum())
        else:
            planner.abort(plan)
        pool.refresh()
        if other is not None:
            mine = [names[1][i] for i in chosen]
            theirs = other.plan(mine, windows, force_fold=force, **options)
            for name, value in read(theirs).items():
                assert torch.equal(value, want[name]), name
            if fate != "abort early":
                other.folded(theirs)
            if fate == "commit":
                if trees is not None:
                    assert other.accept(theirs, paths)[0].tolist() == accepted.tolist()
                other.commit(theirs, accepted)
            else:
                other.abort(theirs)
            for name in ("base", "history", "undo", "checkpoint", "table"):
                a, b = (getattr(p.cursors, name) for p in pools)
                assert np.array_equal(a, b), name
            check_books(twin)
        check_books(pool)


@pytest.mark.parametrize("policy", ["full", "spread", "deadline:1", "deadline:3"])
@pytest.mark.parametrize("shape", [(6, 3, 2), (5, 1, 8), (9, 4, 4)], ids=str)
def test_walks(shape, policy, seed):
    capacity, window, rows = shape
    pool = small_pool(9, capacity=capacity, max_window=window, page_rows=rows)
    walk(pool, np.random.default_rng(seed), 40, policy)


@pytest.mark.parametrize("policy", ["full", "spread", "deadline:2"])
def test_a_pool_of_its_own_for_the_host_goes_the_same_way(policy, seed):
    """Page for page: the host's whole steps use the same spares."""
    pool, twin = small_pool(7), small_pool(7)
    walk(pool, np.random.default_rng(seed), 40, policy, twin)


def test_pages_that_run_out_do_so_alike(seed):
    """So few that forks are often refused, and `alloc` looks for what folds have let go."""
    sizes = {"checkpoint_pages": 9, "input_pages": 27}
    pool, twin = small_pool(7, **sizes), small_pool(7, **sizes)
    walk(pool, np.random.default_rng(seed), 60, "full", twin)


@pytest.mark.parametrize(
    "policy", ["full", "spread", "deadline:1", "deadline:200", "deadline:1000000000"]
)
def test_a_large_batch_that_started_together(policy, seed):
    """Hundreds of equal deadlines: the early folds are the first of the batch.

    The fair share is 150; a budget below it is raised to it, and one above all folds none early.
    """
    generator = np.random.default_rng(seed)
    pool = small_pool(600, capacity=8, max_window=2, page_rows=4)
    seqs = pool.alloc(600)
    planner = device_planner(pool, policy=policy)
    folds, early = [], 0
    for _ in range(12):
        order = generator.permutation(seqs)
        windows = generator.integers(1, 3, size=600)
        want = host_plan(pool, order, windows, policy=policy)
        must = int(host_plan(pool, order, windows)["fold_count"])
        plan = planner.plan(torch.from_numpy(order), torch.from_numpy(windows).int())
        assert_same_plan(read(plan), want, np.arange(600), 600)
        folds.append(int(want["fold_count"]))
        early += folds[-1] - must
        planner.folded(plan)
        planner.commit(plan)
        pool.refresh()
    assert sum(folds) > 0
    assert (early > 0) == (policy in ("spread", "deadline:1", "deadline:200"))
    if early:
        assert max(folds) < 600


def test_a_budget_as_an_object_and_in_bytes(seed):
    pool = small_pool(3)
    one = fold_budget(pool, 10**9)
    for policy in (Deadline(2), Deadline(one), f"deadline:{one}"):
        walk(pool, np.random.default_rng(seed), 4, policy)


def test_what_a_fold_counts_when_no_page_is_shared(seed):
    """Then a device plan is that of a host-planned pool too, but for page ids."""
    generator = np.random.default_rng(seed)
    pool, host = small_pool(5), small_pool(5, planner="host")
    ours, theirs = pool.alloc(5), host.alloc(5)
    planner, other = device_planner(pool), HostPlanner(host)
    for _ in range(20):
        windows = generator.integers(0, 4, size=5)
        accepted = generator.integers(0, windows + 1)
        a, b = planner.plan(ours, windows), other.plan(theirs, windows)
        have, want = read(a), read(b)
        for name in set(have) - {"table", "fold_table"}:  # there only as long as they need be
            assert torch.equal(have[name], want[name]), name
        for p, plan in ((planner, a), (other, b)):
            p.folded(plan)
            p.commit(plan, accepted)
