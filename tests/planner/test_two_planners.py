"""Several plans at once on one pool: disjoint sequences, shared pages, and plans kept apart."""

import pytest
import torch

from replayinfer import HostPlanner, PlanError, ReplayDecodeWrapper, StatePool, ops
from replayinfer.testing import layer_inputs

from ..pools.kit import SPECS, Unchanged, World, check_books


class Second:
    """Another wrapper over a world's pool, with the world's own way of running a step."""

    def __init__(self, world):
        self.first, self.wrapper = world.wrapper, ReplayDecodeWrapper(world.pool, backend="torch")
        self.world = world

    def __enter__(self):
        self.world.wrapper = self.wrapper
        return self.wrapper

    def __exit__(self, *_):
        self.world.wrapper = self.first


@pytest.fixture
def world(rng):
    """a full, its forks b and c; d with two rows."""
    world = World(SPECS["gdn"], rng, capacity=4, page_rows=2, layers=[0], format="fp32_split")
    a, d = world.alloc(2)
    world.grow(a, 4)
    world.grow(d, 2)
    b, c = world.fork(a, 2)
    world.seqs = [a, b, c, d]
    return world


def finish(world, plan, seqs):
    """Run and commit on the current wrapper, and follow in the model."""
    drawn = world.draw(plan)
    outputs = world.run(plan, drawn)
    world.wrapper.commit()
    for row, seq in enumerate(seqs):
        world._follow(row, seq, 1, 1, drawn, outputs)


@pytest.mark.parametrize("order", ["plan plan fold fold", "plan fold plan fold"])
def test_two_planners_fold_what_they_share(world, order):
    """Each launch leaves the pages alone that the other still holds or reads."""
    a, b, c, d = world.seqs
    second = Second(world)
    first_plan = world.wrapper.plan([a, d])
    if order.startswith("plan fold"):
        world.wrapper.fold()
    with second as wrapper:
        second_plan = wrapper.plan([b, c], bucket=4)
    targets = [first_plan.pages[0], *second_plan.pages]
    assert len(set(targets)) == 3
    if order.startswith("plan plan"):
        world.wrapper.fold()
    with second as wrapper:
        wrapper.fold()
        finish(world, second_plan, [b, c])
    finish(world, first_plan, [a, d])
    world.check()
    for _ in range(5):
        world.step([a, b])
        with second:
            world.step([d, c])
    world.check()


def test_the_last_holder_folds_in_place_once_the_others_left(world):
    a, b, c, d = world.seqs
    world.step([a, b])
    plan = world.wrapper.plan([c])
    assert plan.taken_checkpoints.size == 0
    world.wrapper.abort()
    world.step([c, d])
    world.check()


def test_a_page_is_not_reused_before_the_launch_that_reads_it(world):
    """What a planned fold reads stays taken until the fold; the fold's targets are fresh."""
    a, b, c, _ = world.seqs
    world.wrapper.plan([a, b, c])
    cur = world.pool.cursors
    shared, table = cur.checkpoint[cur.peek(a)], cur.table[cur.peek(a)]
    new = world.pool.alloc(2)
    planner = HostPlanner(world.pool)
    plan = planner.plan(new)
    assert shared not in plan.pages
    assert not set(table.tolist()) & set(plan.table[plan.table >= 0].tolist())
    planner.abort(plan)
    world.pool.free(new)
    world.wrapper.abort()
    world.check()


def test_one_planner_has_one_plan_a_bucket(world):
    a, b, c, d = world.seqs
    planner = world.wrapper.planner
    first = planner.plan([a, b], bucket=2)
    with (
        Unchanged(world.pool),
        pytest.raises(PlanError, match=r"^plan: got a second plan in bucket 2"),
    ):
        planner.plan([c, d], bucket=2)
    kept = first.arrays.slot.clone()
    second = planner.plan([c, d], bucket=3)
    assert torch.equal(first.arrays.slot, kept)
    planner.abort(first)
    third = planner.plan([a], bucket=2)
    planner.abort(second)
    planner.abort(third)
    check_books(world.pool)


def test_a_plan_of_another_planner_is_refused(world):
    """Even where both have a plan in that bucket, and after it is over."""
    a, b, _, d = world.seqs
    mine, other = world.wrapper.planner, HostPlanner(world.pool)
    plan, foreign = mine.plan([a, b]), other.plan([d], bucket=2)
    for action in (mine.folded, mine.abort, lambda p: ops.fold(mine, p)):
        with Unchanged(world.pool), pytest.raises(PlanError, match="got a plan of another planner"):
            action(foreign)
    other.folded(foreign)
    for action in (mine.commit, mine.abort, lambda p: ops.commit(mine, p)):
        with Unchanged(world.pool), pytest.raises(PlanError, match="got a plan of another planner"):
            action(foreign)
    mine.abort(plan)
    with Unchanged(world.pool), pytest.raises(PlanError, match="got a plan of another planner"):
        mine.commit(foreign)
    other.abort(foreign)
    check_books(world.pool)


def test_a_plan_of_another_pool_is_refused(world, rng):
    """The bare functions would write into pages that mean something else there."""
    spec = world.spec
    other = StatePool(spec, [0], 6, capacity=4, page_rows=2, format="fp32_split")
    plan = world.wrapper.plan(world.seqs)
    world.wrapper.fold()
    inputs = layer_inputs(spec, 1, 4, torch.float32, rng)
    rows = torch.zeros(4, 1, spec.conv_channels)
    with (
        Unchanged(other),
        pytest.raises(PlanError, match=r"^readout: got a plan of another pool; "),
    ):
        ops.readout(other, plan, 0, **inputs)
    with Unchanged(other), pytest.raises(PlanError, match=r"^conv_update: got a plan of another p"):
        ops.conv_update(other, plan, 0, rows)
    ops.readout(world.pool, plan, 0, **inputs)
