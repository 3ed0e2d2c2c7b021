"""A direct step never writes into a page that somebody else holds."""

import pytest

from replayinfer import CapacityError
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import FORMATS, Unchanged, check_books
from ..transfer.rig import FAMILIES, SPECS, Rig, joined


def held(rig, seq):
    """The bits of everything that continues a sequence: its page, its rows, its ring."""
    pool, slot = rig.pool, rig.pool.cursors.peek(seq)
    history, rows = int(pool.cursors.history[slot]), pool.sizes.page_rows
    parts = {"page": pool.checkpoints.storage[:, pool.cursors.checkpoint[slot]]}
    parts["ring"] = pool.conv.rows[:, slot]
    for name, field in pool.inputs.fields.items():
        for row in range(history):
            parts[f"{name} {row}"] = field[:, pool.cursors.table[slot, row // rows], row % rows]
    return {name: part.clone() for name, part in parts.items()}


def page_of(rig, seq):
    return int(rig.pool.cursors.checkpoint[rig.pool.cursors.peek(seq)])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [0, 2, 3, 5])
@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_siblings_are_left_alone_bit_for_bit(spec, rows, format, rng):
    """With and without rows before the fork, and some of them in shared pages."""
    rig = Rig(spec, rng, format=format)
    (parent,) = rig.pool.alloc()
    stream = rig.draw(4 + rows)
    rig.prefill({parent: stream[:4]})
    before = [rig.step({parent: stream[t : t + 1]})[parent] for t in range(4, 4 + rows)]
    child, other = rig.pool.fork(parent, 2)
    shared = page_of(rig, parent)
    want = {seq: held(rig, seq) for seq in (parent, other)}
    part = rig.draw(1)

    got = [rig.step({child: part}, direct=True)[child]]
    assert page_of(rig, child) != shared
    assert page_of(rig, parent) == page_of(rig, other) == shared
    check_books(rig.pool)
    for seq, parts in want.items():
        for name, bits in held(rig, seq).items():
            assert_bitwise_equal(bits, parts[name], name)
    # From here on its page is its own, so it moves in place.
    page, tail = page_of(rig, child), rig.draw(2)
    for t in range(2):
        plan_folds = rig.wrapper.counters.folds
        got.append(rig.step({child: tail[t : t + 1]}, direct=True)[child])
        assert rig.wrapper.counters.folds == plan_folds
    assert page_of(rig, child) == page

    # And the child is the sequence that it should be.
    own = Rig(spec, rng, like=rig, format=format)
    (twin,) = own.pool.alloc()
    own.prefill({twin: stream[:4]})
    for t, want_y in zip(range(4, 4 + rows), before, strict=True):
        for key, out in own.step({twin: stream[t : t + 1]})[twin].items():
            assert_bitwise_equal(out, want_y[key], key)
    steps = [part, tail[:1], tail[1:]]
    alone = joined([own.step({twin: p}, direct=True)[twin] for p in steps])
    for key, out in joined(got).items():
        assert_bitwise_equal(out, alone[key], key)
    assert_bitwise_equal(rig.wrapper.materialize(child), own.wrapper.materialize(twin))


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_sharers_in_one_step(spec, rng):
    """Those that take a token get pages of their own; one with an empty window stays."""
    rig = Rig(spec, rng)
    (a,) = rig.pool.alloc()
    rig.prefill({a: rig.draw(3)})
    b, idle = rig.pool.fork(a, 2)
    shared, state = page_of(rig, a), rig.wrapper.materialize(idle)
    part = rig.draw(1)
    got = rig.step({a: part, idle: part[:0], b: part}, direct=True)
    assert rig.wrapper.counters.folds == rig.wrapper.counters.forced_folds == 2
    assert page_of(rig, idle) == shared
    assert len({page_of(rig, seq) for seq in (a, b, idle)}) == 3
    assert_bitwise_equal(rig.wrapper.materialize(idle), state)
    for key, out in got[a].items():
        assert_bitwise_equal(out, got[b][key], key)
    assert_bitwise_equal(rig.wrapper.materialize(a), rig.wrapper.materialize(b))
    check_books(rig.pool)
    rig.pool.free([a, b, idle])
    assert not any(rig.pool.pages_in_use().values())


def test_no_page_for_a_sharer(rng):
    """The refusal names the pool and changes nothing; the last holder needs no page."""
    rig = Rig(SPECS["gdn"], rng, sequences=3, checkpoint_pages=2)
    (a,) = rig.pool.alloc()
    rig.step({a: rig.draw(1)}, direct=True)
    (b,) = rig.pool.fork(a)
    part = rig.draw(1)
    with Unchanged(rig.pool), pytest.raises(CapacityError) as error:
        rig.wrapper.plan([a, b], direct=True)
    assert (error.value.pool, error.value.needed, error.value.free) == ("checkpoint pages", 2, 1)
    check_books(rig.pool)
    rig.step({a: part}, direct=True)
    rig.step({b: part}, direct=True)  # now alone on the old page
    assert_bitwise_equal(rig.wrapper.materialize(a), rig.wrapper.materialize(b))
    check_books(rig.pool)


def test_pages_go_back_when_a_planned_step_is_dropped(rng):
    rig = Rig(SPECS["mamba2"], rng)
    (a,) = rig.pool.alloc()
    rig.step({a: rig.draw(2)})
    (b,) = rig.pool.fork(a)
    with Unchanged(rig.pool):
        plan = rig.wrapper.plan([a, b], direct=True)
        assert plan.fold_rows.tolist() == [2, 2]
        rig.wrapper.abort()
    check_books(rig.pool)
