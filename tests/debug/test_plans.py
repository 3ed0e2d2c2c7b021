"""A plan that would write where it may not is found before anything runs."""

import numpy as np
import pytest

from replayinfer import CheckError, StaleHandleError
from replayinfer.debug import check_plan

from ..pools.kit import Unchanged, check_books
from ..transfer.rig import SPECS, assert_equal_outputs, assert_same

BOTH = np.array([True, True])


@pytest.fixture
def rig(checked_rig, rng):
    """Three sequences of five rows, and a fourth that shares the first's pages."""
    rig = checked_rig(SPECS["gdn"], rng, sequences=5)
    stream = rig.draw(5)
    sequences = rig.pool.alloc(3)
    rig.step(dict.fromkeys(sequences, stream[:3]))
    rig.step(dict.fromkeys(sequences, stream[3:]))
    rig.pool.fork(sequences[0])
    return rig


@pytest.fixture
def sequences(rig):
    return rig.pool.cursors.handles(rig.pool.cursors.live)


def set_page(plan, value):
    """The destination of the second sequence's fold, in the record and in the arrays."""
    plan.pages[1] = value
    plan.arrays.page[1] = plan.arrays.fold_target[1] = int(value)


def set_table(plan, row, place, value):
    plan.table = plan.table.copy()
    plan.table[row, place] = value
    plan.arrays.table[row, place] = int(value)


def held(rig, name):
    return getattr(rig.pool.cursors, name)


# What is done to the plan of sequences 1 and 2, both of which fold, and what is said about it.
FAULTS = {
    "fold into a page beyond the end": (
        lambda rig, plan: set_page(plan, rig.pool.sizes.checkpoint_pages), "checkpoint page outside"
    ),
    "fold into page -1": (lambda rig, plan: set_page(plan, -1), "checkpoint page outside 0.."),
    "fold into the same page": (
        lambda rig, plan: set_page(plan, plan.pages[0]), "one checkpoint page is written for two"
    ),
    "fold into a shared page": (
        lambda rig, plan: set_page(plan, held(rig, "checkpoint")[0]),
        "checkpoint page is written that another sequence holds",
    ),
    "fold into a free page": (
        lambda rig, plan: set_page(plan, np.flatnonzero(rig.pool.checkpoint_ids.refs == 0)[0]),
        "checkpoint page is written that another",
    ),
    "rows into a page beyond the end": (
        lambda rig, plan: set_table(plan, 0, 0, rig.pool.sizes.input_pages), "input page outside -1"
    ),
    "rows into a page below -1": (
        lambda rig, plan: set_table(plan, 1, 2, -2), "input page outside -1.."
    ),
    "rows without a page": (
        lambda rig, plan: set_table(plan, 1, 0, -1), "a window row has no input page"
    ),
    "rows of two sequences into one page": (
        lambda rig, plan: set_table(plan, 1, 0, plan.table[0, 0]),
        "one input page is written for two",
    ),
    "rows twice into one page": (
        lambda rig, plan: set_table(plan, 1, 1, plan.table[1, 0]),
        "one input page is written for two",
    ),
    "rows into a shared page": (
        lambda rig, plan: set_table(plan, 1, 0, held(rig, "table")[0, 0]),
        "input page is written that another sequence holds",
    ),
    "rows into a free page": (
        lambda rig, plan: set_table(plan, 1, 0, np.flatnonzero(rig.pool.input_ids.refs == 0)[0]),
        "input page is written that another sequence holds",
    ),
    "rows into a page of a sequence that is not in the plan": (
        lambda rig, plan: set_table(plan, 1, 0, held(rig, "table")[3, 2]),
        "input page is written that is another sequence's",
    ),
    "a window beyond the capacity": (
        lambda rig, plan: plan.starts.__setitem__(0, 4), r"history \+ window outside 0..6"
    ),
    "a negative history": (
        lambda rig, plan: plan.starts.__setitem__(0, -9), r"history \+ window outside"
    ),
    "another sequence's slot": (
        lambda rig, plan: plan.slots.__setitem__(0, 0), "does not live in slot 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
def test_tampered_plans(rig, sequences, fault, message, monkeypatch, rng):
    plan_, slots = rig.wrapper.planner.plan, []
    victims = [sequences[1], sequences[2]]

    def tampering(*args, **options):
        plan = plan_(*args, **options)
        slots.append(plan.slots.copy())
        fault(rig, plan)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(rig.wrapper.planner, "plan", tampering)
        with pytest.raises(CheckError, match=f"plan: .*{message}|{message}"):
            rig.wrapper.plan(victims, 3, force_fold=BOTH)
    rig.wrapper._plan.slots[:] = slots[0]  # so that the right ones are let go
    rig.wrapper.abort()
    check_books(rig.pool)
    stream = rig.draw(3)
    got = rig.step(dict.fromkeys(victims, stream))
    assert_equal_outputs(got[victims[0]], got[victims[1]])


ARRAYS = ("slot", "page", "history", "window", "conv_place", "table", "fold_count", "fold_source",
          "fold_target", "fold_rows", "fold_table", "ancestors")  # fmt: skip


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("name", ARRAYS)
def test_device_arrays_that_are_not_the_plan(rig, sequences, name, place):
    """Kernels read the arrays: a leftover in a pad, or an entry that differs from the record."""
    plan = rig.wrapper.plan(sequences[1:3], [1, 2], force_fold=BOTH, bucket=4)
    array = getattr(plan.arrays, name)
    kept = array.clone()
    check_plan(rig.pool, plan)
    row = array.view(array.shape[0], -1)
    row[0 if name == "fold_count" else place, -1] += 1
    with Unchanged(rig.pool), pytest.raises(CheckError, match=f"plan: its array {name} "):
        check_plan(rig.pool, plan)
    array.copy_(kept)
    check_plan(rig.pool, plan)
    rig.wrapper.abort()


def test_a_committed_row_without_a_page(rig, sequences):
    plan = rig.wrapper.plan(sequences[1:3], 1)  # no fold: five rows before it
    check_plan(rig.pool, plan)
    set_table(plan, 1, 0, -1)
    with pytest.raises(CheckError, match="plan: a committed row has no input page"):
        check_plan(rig.pool, plan)


def test_a_sequence_that_was_freed_meanwhile(rig, sequences):
    plan = rig.wrapper.plan(sequences[1:3], 1)
    rig.pool.cursors.busy[:] = False  # a fault of its own
    rig.pool.free(sequences[2])
    with pytest.raises(StaleHandleError, match="was freed"):
        check_plan(rig.pool, plan)
    rig.pool.alloc()  # the same slot again, in another generation
    with pytest.raises(StaleHandleError, match="was freed"):
        check_plan(rig.pool, plan)


def test_a_right_plan_passes_with_shared_pages(rig, sequences, rng):
    """Sharers that fold together, in place or into fresh pages, with windows over page ends."""
    twin = sequences[3]
    part = rig.draw(3)
    got = rig.step(dict.fromkeys((sequences[0], twin, sequences[1]), part))
    assert_equal_outputs(got[twin], got[sequences[0]])
    assert_same(rig, twin, rig, sequences[1])
