"""What kernels read: every entry of the padded bucket, at addresses that never move."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from replayinfer.planner import HostPlanner
from replayinfer.planner.plan import PlanArrays

from ..pools.kit import SPECS, World

NAMES = [f.name for f in dataclasses.fields(PlanArrays)]
PADS = {
    "slot": -1, "page": -1, "history": 0, "window": 0, "conv_place": 0, "table": -1,
    "fold_source": -1, "fold_target": -1, "fold_rows": 0, "fold_table": -1, "ancestors": 0,
}  # fmt: skip


def read(plan):
    return {name: getattr(plan.arrays, name).clone() for name in NAMES}


@pytest.fixture
def world(rng):
    """Histories 4, 4, 3, 2 and 0; the first two share everything, two tables have a spare page."""
    world = World(
        SPECS["gdn"], rng, capacity=4, page_rows=2, max_window=2, max_sequences=8, layers=[0]
    )
    a, c, d, e = world.alloc(4)
    world.grow(c, 5)
    world.grow(c, 2)
    world.grow(d, 6)
    world.grow(a, 4)
    (b,) = world.fork(a)
    assert [world.pool.history(s) for s in (a, b, c, d, e)] == [4, 4, 3, 2, 0]
    world.seqs = [a, b, c, d, e]
    return world


def test_every_entry_by_hand(world):
    pool, cur = world.pool, world.pool.cursors
    slots = cur.resolve(world.seqs)
    tables, pages = cur.table[slots].copy(), cur.checkpoint[slots].copy()
    tokens = [pool.tokens(s) for s in world.seqs]
    plan = world.wrapper.planner.plan(world.seqs, [2, 1, 2, 0, 1], bucket=7)
    got = read(plan)

    assert got["slot"].tolist() == [*slots, -1, -1]
    assert got["history"].tolist() == [0, 0, 0, 2, 0, 0, 0]
    assert got["window"].tolist() == [2, 1, 2, 0, 1, 0, 0]
    assert got["conv_place"].tolist() == [*(t % (3 + 2) for t in tokens), 0, 0]
    # a and b fold away from what they share, c in place, d and e do not fold.
    assert got["fold_count"].tolist() == [3]
    assert got["fold_source"].tolist() == [*pages[:3], -1, -1, -1, -1]
    assert got["fold_rows"].tolist() == [4, 4, 3, 0, 0, 0, 0]
    assert got["fold_table"].tolist() == [*tables[:3].tolist(), *[[-1, -1]] * 4]
    targets = got["fold_target"].tolist()
    assert targets[2:] == [pages[2], -1, -1, -1, -1]
    assert len({*targets[:2], *pages.tolist()}) == 6
    assert got["page"].tolist() == [*targets[:3], *pages[3:], -1, -1]
    table = got["table"].tolist()
    fresh = [table[0][0], table[1][0], table[4][0]]
    assert len({*fresh, *tables.flatten().tolist()}) == 3 + len(set(tables.flatten().tolist()))
    assert table == [
        [fresh[0], -1], [fresh[1], -1], tables[2].tolist(), tables[3].tolist(), [fresh[2], -1],
        [-1, -1], [-1, -1],
    ]  # fmt: skip


def test_types_and_shapes(world):
    plan = world.wrapper.planner.plan(world.seqs, bucket=6)
    for name in NAMES:
        array = getattr(plan.arrays, name)
        assert array.dtype == torch.int32
        assert array.is_contiguous()
        paged = name in ("table", "fold_table", "ancestors")  # two pages, and windows of two
        assert array.shape == ((1,) if name == "fold_count" else (6, 2) if paged else (6,)), name


def test_a_smaller_batch_leaves_nothing_of_a_larger_one(world):
    """The whole padded bucket is rewritten, the fold list too."""
    planner = world.wrapper.planner
    first = planner.plan(world.seqs, [2, 2, 2, 2, 1], bucket=8, force_fold=True)
    assert first.fold_count == 4
    planner.abort(first)
    for name in NAMES:
        getattr(first.arrays, name).fill_(12345)  # as a kernel that scribbles would
    plan = planner.plan(world.seqs[3:], [1, 1], bucket=8)
    got = read(plan)
    assert got["fold_count"].tolist() == [0]
    for name, pad in PADS.items():
        start = 0 if name.startswith("fold") else 2
        assert (got[name][start:] == pad).all(), name
    planner.abort(plan)
    empty = planner.plan([], bucket=8)
    for name, pad in PADS.items():
        assert (getattr(empty.arrays, name) == pad).all(), name


def test_a_plan_depends_on_nothing_before_it(world):
    """The same sequences give the same arrays in a fresh planner and in a much used one."""
    used, fresh = world.wrapper.planner, HostPlanner(world.pool)
    for n in (5, 3, 1, 4):
        used.abort(used.plan(world.seqs[:n], bucket=8))
    plan = used.plan(world.seqs, bucket=8)
    got = read(plan)
    used.abort(plan)
    want = read(fresh.plan(world.seqs, bucket=8))
    moved = {"page", "fold_target", "table"}  # fresh pages may be others
    for name in set(NAMES) - moved:
        assert torch.equal(got[name], want[name]), name
    for name in moved:
        assert torch.equal(got[name] < 0, want[name] < 0), name


def test_addresses_are_fixed_by_bucket(world):
    planner = world.wrapper.planner
    addresses = {}
    for bucket in (8, 5, 8, 6, 5, 8, 6):
        plan = planner.plan(world.seqs, bucket=bucket)
        now = {name: getattr(plan.arrays, name).data_ptr() for name in NAMES}
        assert addresses.setdefault(bucket, now) == now
        planner.folded(plan)
        planner.commit(plan)
    spans = []
    for bucket in (5, 6, 8):
        for name in NAMES:
            rows = (1 if name == "fold_count" else bucket) * (
                2 if "table" in name or name == "ancestors" else 1
            )
            spans.append((addresses[bucket][name], addresses[bucket][name] + 4 * rows))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_arrays_of_a_bucket_are_aligned(world):
    """In every bucket alike, or a kernel would be compiled again for another one."""
    for bucket in range(1, 10):
        plan = world.wrapper.planner.plan(world.seqs[:1], bucket=bucket)
        base = plan.arrays.fold_count.data_ptr()
        assert all((getattr(plan.arrays, n).data_ptr() - base) % 16 == 0 for n in NAMES), bucket
        world.wrapper.planner.abort(plan)


def test_buckets_are_chosen_from_the_list(world):
    planner = HostPlanner(world.pool, buckets=[4, 1, 8, 4])
    assert planner.buckets == (1, 4, 8)
    for n, bucket in ((0, 1), (1, 1), (2, 4), (4, 4), (5, 8)):
        plan = planner.plan(world.seqs[:n])
        assert (plan.batch, plan.bucket) == (n, bucket)
        planner.abort(plan)
    for n in (1, 3, 5):
        plan = HostPlanner(world.pool).plan(world.seqs[:n])
        assert plan.bucket == n
        world.pool.cursors.busy[:] = False


def test_the_hosts_record_says_the_same_as_the_arrays(world):
    plan = world.wrapper.planner.plan(world.seqs, [2, 0, 1, 2, 2], bucket=6)
    got = read(plan)
    n, k = plan.batch, plan.fold_count
    for name, record in (
        ("slot", plan.slots), ("page", plan.pages), ("history", plan.starts),
        ("window", plan.windows), ("table", plan.table),
    ):  # fmt: skip
        assert got[name][:n].tolist() == record.tolist(), name
    assert plan.fold_index.tolist() == np.flatnonzero(plan.fold).tolist()
    assert got["fold_rows"][:k].tolist() == plan.fold_rows[plan.fold].tolist()
    assert got["fold_target"][:k].tolist() == plan.pages[plan.fold].tolist()
    assert plan.handles.tolist() == world.seqs
