"""Cursors move at fold and commit, abort gives back, anything out of order is refused."""

import numpy as np
import pytest
import torch

from replayinfer import InputError, PlanError, ops
from replayinfer.testing import assert_untouched, snapshot

from ..pools.kit import SPECS, Unchanged, World, books, check_books


@pytest.fixture
def world(rng):
    """a full and shared with b, c half full and private, d empty."""
    world = World(
        SPECS["gdn"], rng, capacity=4, page_rows=2, max_window=2, layers=[0], format="fp32_split"
    )
    a, c, d = world.alloc(3)
    world.grow(a, 4)
    world.grow(c, 3)
    (b,) = world.fork(a)
    world.seqs = [a, b, c, d]
    return world


WINDOWS = [1, 2, 2, 1]


def moved(before, pool):
    """Names of the books that differ."""
    now = books(pool)
    return {
        n for n, old in before.items() if not torch.equal(now[n].nan_to_num(), old.nan_to_num())
    }


def test_a_plan_moves_no_cursor_and_writes_nothing(world):
    pool = world.pool
    before = snapshot(books(pool))
    world.wrapper.plan(world.seqs, WINDOWS)
    taken = {
        f"{kind} pages.{part}" for kind in ("checkpoint", "input") for part in ("refs", "free")
    }
    # A free list that shrinks is another tensor, so the two are compared by their ids.
    now = books(pool)
    for name in taken & {n for n in before if n.endswith(".free")}:
        assert set(now[name].tolist()) < set(before[name].tolist())
    for name, old in before.items():
        if name not in taken | {"cursors.busy"}:
            assert_untouched({name: old}, {name: now[name]})
    assert pool.cursors.busy.tolist() == [True, True, True, True, False, False]


def test_a_fold_moves_base_history_and_pages(world):
    pool, cur = world.pool, world.pool.cursors
    slots = cur.resolve(world.seqs)
    base, history = cur.base[slots].copy(), cur.history[slots].copy()
    pages, undo = cur.checkpoint[slots].copy(), cur.undo[slots].copy()
    plan = world.wrapper.plan(world.seqs, WINDOWS)
    world.wrapper.fold()
    assert plan.fold.tolist() == [True, True, True, False]
    assert cur.history[slots].tolist() == [0, 0, 0, 0]
    assert cur.base[slots].tolist() == (base + history).tolist()
    assert (cur.checkpoint[slots] == pages).tolist() == [False, False, True, True]
    assert cur.undo[slots].tolist() == undo.tolist()
    assert cur.busy[slots].all()
    check_books(pool)
    assert pool.checkpoint_ids.refs[pages[0]] == 0  # both sharers left


def test_a_commit_moves_history_by_what_was_accepted(world):
    cur, slots = world.pool.cursors, world.pool.cursors.resolve(world.seqs)
    plan = world.wrapper.plan(world.seqs, WINDOWS)
    world.wrapper.fold()
    world.run(plan, world.draw(plan))
    before = snapshot(books(world.pool))
    counts = world.wrapper.commit([0, 1, 2, 1])
    assert counts.tolist() == [0, 1, 2, 1]
    assert counts.dtype == np.int32
    assert cur.history[slots].tolist() == [0, 1, 2, 1]
    assert cur.undo[slots].tolist() == [0, 1, 2, 1]
    assert moved(before, world.pool) == {"cursors.history", "cursors.undo", "cursors.busy"}
    assert not cur.busy.any()


def test_a_commit_of_everything_is_the_default(world):
    plan = world.wrapper.plan(world.seqs, WINDOWS)
    world.wrapper.fold()
    world.run(plan, world.draw(plan))
    assert world.wrapper.commit().tolist() == WINDOWS


def test_abort_before_the_fold_restores_everything(world):
    """Pages that the plan took go back; every tensor, cursor and count is as before the plan."""
    with Unchanged(world.pool):
        plan = world.wrapper.plan(world.seqs, WINDOWS, force_fold=True)
        assert plan.taken_checkpoints.size == 2
        assert plan.taken_inputs.size >= 3
        world.wrapper.abort()
    check_books(world.pool)
    world.step(dict(zip(world.seqs, WINDOWS, strict=True)))
    world.check()


def test_abort_after_the_fold_keeps_the_fold(world):
    """Same states, fewer rows, positions unmoved; the pages of the window stay for the next one."""
    pool, cur = world.pool, world.pool.cursors
    slots = cur.resolve(world.seqs)
    tokens = [pool.tokens(s) for s in world.seqs]
    states = [world.wrapper.materialize(s) for s in world.seqs]
    plan = world.wrapper.plan(world.seqs, WINDOWS)
    world.wrapper.fold()
    world.run(plan, world.draw(plan))
    after_fold = snapshot(books(pool))
    world.wrapper.abort()
    assert moved(after_fold, pool) == {"cursors.undo", "cursors.busy"}
    # The window may lie over the oldest ring rows that an undo needs: T_max - T are left of it.
    assert cur.undo[slots].tolist() == [1, 0, 0, 0]
    assert [pool.tokens(s) for s in world.seqs] == tokens
    assert cur.history[slots].tolist() == [0, 0, 0, 0]
    for seq, state in zip(world.seqs, states, strict=True):
        assert torch.allclose(world.wrapper.materialize(seq), state, rtol=1e-5, atol=1e-6)
    check_books(pool)
    world.check()
    for _ in range(4):
        world.step(dict(zip(world.seqs, WINDOWS, strict=True)))
    world.check()


def test_abort_without_a_run(world):
    world.wrapper.plan(world.seqs, WINDOWS)
    world.wrapper.fold()
    world.wrapper.abort()
    world.check()


@pytest.mark.parametrize("folded", [False, True])
def test_sequences_of_a_plan_refuse_everything_but_reading(world, folded):
    """From plan to commit or abort; others of the pool are free."""
    pool, spec = world.pool, world.spec
    a, _, _, d = world.seqs
    world.wrapper.plan(world.seqs[:3], WINDOWS[:3])
    if folded:
        world.wrapper.fold()
    state, tail = torch.zeros(spec.state_shape), torch.zeros(spec.conv_channels, 3)
    calls = [
        lambda s: pool.fork(s),
        lambda s: pool.free(s),
        lambda s: pool.free([d, s]),
        lambda s: pool.rollback(s, 0),
        lambda s: pool.seed(s, {0: state}, conv={0: tail}, tokens=0),
        lambda s: world.wrapper.planner.plan([s], bucket=17),
        lambda s: world.wrapper.planner.plan([d, s], bucket=18),
    ]
    with Unchanged(pool):
        for seq in world.seqs[:3]:
            for call in calls:
                with pytest.raises(
                    PlanError, match=r"^sequences: got .+, which a plan holds; allo"
                ):
                    call(seq)
        for seq in world.seqs:
            assert pool.tokens(seq) == world.model.tokens(seq)
            pool.conv_tail(seq)
            pool.history(seq)
            world.wrapper.materialize(seq)
    (e,) = world.fork(d)
    world.seed(e, tokens=4)
    world.free(e)
    world.alloc()
    world.wrapper.abort()
    world.rollback(a, 0)
    world.check()


def test_calls_out_of_order(world):
    wrapper, planner, pool = world.wrapper, world.wrapper.planner, world.pool
    for call in (wrapper.fold, wrapper.commit, wrapper.abort, lambda: wrapper.run(0)):
        with pytest.raises(PlanError, match=r"^\w+: got no plan; allowed between plan and commit"):
            call()
    plan = wrapper.plan(world.seqs, WINDOWS)
    drawn = world.draw(plan)
    with Unchanged(pool):
        for call in (
            wrapper.commit,
            lambda: world.run(plan, drawn),
            lambda: wrapper.run(0, **drawn[0][0]),
            lambda: planner.commit(plan),
        ):
            with pytest.raises(PlanError, match=r"^\w+: got a plan that is planned; allowed "):
                call()
        with pytest.raises(PlanError, match=r"^plan: got a second plan while one is planned; "):
            wrapper.plan(world.seqs)
    wrapper.fold()
    with Unchanged(pool):
        for call in (wrapper.fold, lambda: planner.folded(plan), lambda: ops.fold(planner, plan)):
            with pytest.raises(PlanError, match=r"^fold: got a plan that is folded; allowed "):
                call()
        with pytest.raises(PlanError, match=r"^commit: got no run of layers \[0\] in this step; "):
            wrapper.commit()
    world.run(plan, drawn)
    wrapper.commit()
    with Unchanged(pool):
        for call in (planner.commit, planner.abort, planner.folded):
            with pytest.raises(PlanError, match=r"^\w+: got a plan that is committed; allowed "):
                call(plan)
    aborted = planner.plan(world.seqs)
    planner.abort(aborted)
    for call in (planner.commit, planner.abort, planner.folded):
        with pytest.raises(PlanError, match=r"^\w+: got a plan that is aborted; allowed "):
            call(aborted)
    check_books(pool)


@pytest.mark.parametrize(
    "accepted",
    [[1, 2, 2, 2], [-1, 0, 0, 0], [2, 0, 0, 0], [1, 1, 1], [1, 1, 1, 1, 0], [[1, 1, 1, 1]], 1,
     [1.0, 1, 1, 1], [True, True, True, True], "1111", [None] * 4, [1 << 40, 0, 0, 0],
     [[1], [1, 1]]],
    ids=repr,
)  # fmt: skip
def test_accepted_counts_are_refused_whole(world, accepted):
    plan = world.wrapper.plan(world.seqs, WINDOWS)
    world.wrapper.fold()
    world.run(plan, world.draw(plan))
    with Unchanged(world.pool), pytest.raises(InputError) as error:
        world.wrapper.commit(accepted)
    message = str(error.value)
    assert message.startswith("accepted: got "), message
    assert "; allowed " in message
    assert plan.state == "folded"
    assert world.wrapper.commit(np.array([1, 2, 0, 1], dtype=np.uint8)).tolist() == [1, 2, 0, 1]
