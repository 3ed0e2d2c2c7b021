"""`materialize` at any row, and forks that start at one: a sequence that stopped there."""

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, InputError, materialize
from replayinfer.testing import assert_bitwise_equal, assert_within_budget

from ..pools.kit import Unchanged, check_books
from .rig import CASES, FAMILIES, FLOOR, SPECS, Rig, assert_equal_outputs, assert_same

L = 6


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_the_state_after_every_row(spec, format, rng):
    """In every layer, against the float64 recurrence, before and after a fold."""
    rig = Rig(spec, rng, format=format)
    (seq,) = rig.pool.alloc()
    stream = rig.draw(L + 3)
    exact, plain = rig.reference(stream), rig.reference(stream, torch.float32)
    got, want, near, seen = [], [], [], set()
    for at, end in ((0, L), (L, L + 3)):
        rig.decode(seq, stream[at:end], window=3)
        for rows in range(rig.pool.history(seq) + 1):
            states = materialize(rig.pool, seq, rows)
            assert states.shape == (2, *spec.state_shape)
            for state, layer in zip(states, rig.layers, strict=True):
                got.append(state)
                want.append(exact[f"state {layer}"][at + rows])
                near.append(plain[f"state {layer}"][at + rows])
            seen.add((at, rows))
    assert seen == {(0, k) for k in range(L + 1)} | {(L, k) for k in range(4)}
    got, want, near = (torch.stack(x) for x in (got, want, near))
    assert_within_budget(got, exact=want, rounded=near.float(), floor=FLOOR)
    assert_bitwise_equal(materialize(rig.pool, seq), materialize(rig.pool, seq, 3), "all rows")


@pytest.mark.parametrize("page_rows", [1, 2, 8])
@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_a_fork_at_a_row_is_a_sequence_that_stopped_there(spec, page_rows, rng):
    """Bit for bit, and both go on with the same tokens through several folds."""
    options = {"page_rows": page_rows, "restore": "any", "sequences": L + 3, "layers": (4,)}
    options["format"] = "fp32" if page_rows == 2 else "fp32_split"
    rig = Rig(spec, rng, **options)
    twin = Rig(spec, rng, like=rig, **options)
    (parent,) = rig.pool.alloc()
    before, rows, after = rig.draw(2), rig.draw(L), rig.draw(9)
    force = np.array([True])
    rig.step({parent: before})
    rig.step({parent: before[:0]}, force_fold=force)  # history 0 at token 2
    rig.decode(parent, rows)
    stopped = twin.pool.alloc(L + 1)
    twin.step(dict.fromkeys(stopped, before))
    twin.step(dict.fromkeys(stopped, before[:0]), force_fold=np.ones(L + 1, dtype=bool))
    for t in range(L):
        twin.step(dict.fromkeys(stopped[t + 1 :], rows[t : t + 1]))
    children = [child for k in range(L + 1) for child in rig.pool.fork(parent, rows=k)]
    check_books(rig.pool)
    for k, (child, lone) in enumerate(zip(children, stopped, strict=True)):
        assert rig.pool.tokens(child) == 2 + k
        assert_same(rig, child, twin, lone)
    for t in range(0, 9, 3):
        got = rig.step(dict.fromkeys(children, after[t : t + 3]))
        want = twin.step(dict.fromkeys(stopped, after[t : t + 3]))
        for child, lone in zip(children, stopped, strict=True):
            assert_equal_outputs(got[child], want[lone])
    for child, lone in zip(children, stopped, strict=True):
        assert_same(rig, child, twin, lone)
    assert rig.pool.tokens(parent) == 2 + L  # which went nowhere
    assert_same(rig, parent, rig, rig.pool.fork(parent)[0])
    rig.pool.free(rig.pool.cursors.handles(rig.pool.cursors.live))
    assert not any(rig.pool.pages_in_use().values())


def test_many_children_share_full_pages_and_copy_one(rng):
    rig = Rig(SPECS["mamba2"], rng, sequences=6, restore="any")
    (parent,) = rig.pool.alloc()
    rig.decode(parent, rig.draw(6))
    before = rig.pool.pages_in_use()["input pages"]
    children = rig.pool.fork(parent, 3, rows=3)  # one full page of two rows, and one row
    assert rig.pool.pages_in_use()["input pages"] == before + 3
    check_books(rig.pool)
    for child in children:
        assert_bitwise_equal(materialize(rig.pool, child), materialize(rig.pool, parent, 3))
    rig.pool.fork(parent, 2, rows=2)
    assert rig.pool.pages_in_use()["input pages"] == before + 3
    check_books(rig.pool)


def test_the_limits_are_those_of_a_rollback(rng):
    """``restore="window"`` reaches back over the last commit, whose convolution rows are there."""
    spec = SPECS["gdn"]
    rig, twin = Rig(spec, rng), None
    twin = Rig(spec, rng, like=rig)
    (seq,) = rig.pool.alloc()
    stream, after = rig.draw(5), rig.draw(4)
    rig.step({seq: stream[:3]})
    rig.step({seq: stream[3:5]})
    with Unchanged(rig.pool):
        for rows in (0, 2, 6, 99):
            with pytest.raises(InputError, match=r"rows: got .* to drop; allowed 0\.\.2 of 5"):
                rig.pool.fork(seq, rows=rows)
        for rows in (-1, True, 1.0, "3"):
            with pytest.raises(InputError, match=r"rows: got .*; allowed an integer >= 0"):
                rig.pool.fork(seq, rows=rows)
    for rows in (5, 4, 3):
        (child,) = rig.pool.fork(seq, rows=rows)
        (lone,) = twin.pool.alloc()
        twin.step({lone: stream[:3]})
        twin.step({lone: stream[3:rows]})
        assert_equal_outputs(rig.decode(child, after), twin.decode(lone, after))
        assert_same(rig, child, twin, lone)
        twin.pool.free(lone)
        if rows == 3:  # what the window allowed is used up
            (again,) = rig.pool.fork(seq, rows=3)
            with pytest.raises(InputError, match=r"got 1 to drop; allowed 0\.\.0 of 3"):
                rig.pool.fork(again, rows=2)
        rig.pool.free(child)


def test_exhaustion(rng):
    """No page for the partial copy, no slot: refused, and nothing is taken."""
    rig = Rig(SPECS["kda"], rng, sequences=3, input_pages=4, restore="any")
    (seq,) = rig.pool.alloc()
    rig.decode(seq, rig.draw(6))
    with Unchanged(rig.pool):
        with pytest.raises(CapacityError, match=r"input pages: got a need of 2; allowed 1"):
            rig.pool.fork(seq, 2, rows=3)
        with pytest.raises(CapacityError, match=r"sequence slots: got a need of 3; allowed 2"):
            rig.pool.fork(seq, 3, rows=4)
    rig.pool.fork(seq, 2, rows=4)  # whole pages need none
