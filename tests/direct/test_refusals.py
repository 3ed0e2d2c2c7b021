"""What a direct step cannot do. Every refusal is clear, changes nothing, and the step goes on."""

import numpy as np
import pytest

from replayinfer import HostPlanner, InputError, PlanError, StaleHandleError
from replayinfer.ops import fold, readout
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import Unchanged, check_books
from ..transfer.rig import FAMILIES, LAYERS, SPECS, Rig


@pytest.fixture
def rig(rng):
    """Two sequences, the second with two rows."""
    rig = Rig(SPECS["gdn"], rng)
    a, b = rig.pool.alloc(2)
    rig.step({a: rig.draw(1)}, direct=True)
    rig.step({b: rig.draw(2)})
    return rig


@pytest.fixture
def sequences(rig):
    return rig.pool.cursors.handles(rig.pool.cursors.live)


def inputs_of(rig, part, layer, bucket=1):
    return {name: x[None].expand(bucket, *x.shape) for name, x in part.inputs[layer].items()}


WRONG = {
    "windows beyond one": ({"windows": [1, 2]}, "windows: got 2 for a direct step; allowed 0 or 1"),
    "a wider step": ({"window": 2}, "window: got 2 for a direct step; allowed 1"),
    "a tree": ({"parents": [[-1], [-1]]}, "parents: got draft trees for a direct step"),
    "a number": ({"direct": 3}, "direct: got 3; allowed a bool or a function"),
    "a word": ({"direct": "auto"}, "direct: got 'auto'; allowed a bool or a function"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_plans(rig, sequences, options, message):
    with Unchanged(rig.pool), pytest.raises(InputError, match=message) as error:
        rig.wrapper.plan(sequences, **{"direct": True} | options)
    assert str(error.value).count("; ") == 2
    check_books(rig.pool)
    rig.step({seq: rig.draw(1) for seq in sequences}, direct=True)


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_a_token_whose_layer_ran_is_not_dropped(spec, rng):
    """Neither by a count of 0 nor by abort; the commit afterwards is the plain one."""
    rig = Rig(spec, rng, format="fp32_split")
    twin = Rig(spec, rng, like=rig, format="fp32_split")
    parts = [rig.draw(1) for _ in range(3)]
    names = [r.pool.alloc(3) for r in (rig, twin)]
    outs = [
        r.start(dict(zip(seqs, [parts[0], parts[1], parts[2][:0]], strict=True)), direct=True)
        for r, seqs in zip((rig, twin), names, strict=True)
    ]
    with Unchanged(rig.pool):
        for counts in ([0, 1, 0], [1, 0, 0], np.zeros(3, dtype=np.int64)):
            with pytest.raises(InputError, match=r"accepted: got 0 for sequence [01] of a direct"):
                rig.wrapper.commit(counts)
        with pytest.raises(InputError, match=r"accepted: got 2 for sequence 0 .*allowed 0\.\.1"):
            rig.wrapper.commit([2, 1, 0])
        with pytest.raises(PlanError, match=r"abort: got a direct step of which layers \[1, 4\]"):
            rig.wrapper.abort()
    assert rig.wrapper.counters.aborted == 0
    assert rig.wrapper.commit([1, 1, 0]).tolist() == [1, 1, 0]
    twin.wrapper.commit()
    assert [rig.pool.tokens(seq) for seq in names[0]] == [1, 1, 0]
    for a, b in zip(*names, strict=True):
        assert_bitwise_equal(rig.wrapper.materialize(a), twin.wrapper.materialize(b))
        for key, out in outs[0][a].items():
            assert_bitwise_equal(out, outs[1][b][key], key)
    assert rig.wrapper.counters == twin.wrapper.counters


def test_between_two_layers(rig, sequences):
    """One layer ran: no abort, no commit, no second run of it; the other layer still runs."""
    first, second = LAYERS
    part = rig.draw(1)
    plan = rig.wrapper.plan(sequences, direct=True)
    assert not plan.moved
    rig.wrapper.fold()
    y = rig.wrapper.run(first, **inputs_of(rig, part, first, 2))
    assert plan.moved
    kept = y.clone()
    with Unchanged(rig.pool):
        with pytest.raises(PlanError, match=rf"abort: got a direct step of which layers \[{first}"):
            rig.wrapper.abort()
        with pytest.raises(PlanError, match=r"commit: got no run of layers .*abort\(free=True\)"):
            rig.wrapper.commit()
        with pytest.raises(PlanError, match=f"readout: got layer {first} a second time"):
            rig.wrapper.run(first, out=y, **inputs_of(rig, part, first, 2))
        with pytest.raises(PlanError, match=r"materialize: got sequence .*a direct step is moving"):
            rig.wrapper.materialize(sequences[0])
    assert_bitwise_equal(y, kept)
    rig.wrapper.run(second, **inputs_of(rig, part, second, 2))
    assert rig.wrapper.commit().tolist() == [1, 1]
    assert [rig.pool.tokens(seq) for seq in sequences] == [2, 3]
    assert [rig.pool.history(seq) for seq in sequences] == [0, 0]


@pytest.mark.parametrize("stage", ["planned", "folded", "convolved"])
def test_abort_before_the_first_layer(rig, sequences, stage):
    """The fold stands, the states are the same, and the next step is like any other."""
    a, b = sequences
    states = [rig.wrapper.materialize(seq) for seq in sequences]
    rig.wrapper.plan(sequences, direct=True)
    if stage != "planned":
        rig.wrapper.fold()
    if stage == "convolved":
        rig.wrapper.conv(LAYERS[0], rig.draw(2).rows[LAYERS[0]][:, None])
    rig.wrapper.abort()
    assert rig.pool.history(b) == (2 if stage == "planned" else 0)
    for seq, state in zip(sequences, states, strict=True):
        assert_bitwise_equal(rig.wrapper.materialize(seq), state)
    check_books(rig.pool)
    stream = rig.draw(2)
    rig.step({a: stream[:1], b: stream[:1]}, direct=True)
    rig.step({a: stream[1:], b: stream[1:]})
    assert [rig.pool.tokens(seq) for seq in sequences] == [3, 4]


def test_abort_with_free_ends_what_has_moved(rig, sequences):
    a, b = sequences
    part = rig.draw(1)
    state, folds = rig.wrapper.materialize(b), rig.wrapper.counters.folds
    rig.wrapper.plan(sequences, [1, 0], direct=True)
    rig.wrapper.fold()
    rig.wrapper.run(LAYERS[0], **inputs_of(rig, part, LAYERS[0], 2))
    rig.wrapper.abort(free=True)
    with pytest.raises(StaleHandleError):
        rig.pool.tokens(a)
    assert_bitwise_equal(rig.wrapper.materialize(b), state)
    check_books(rig.pool)
    assert rig.wrapper.counters.aborted == 1
    assert rig.wrapper.counters.folds == folds
    rig.step({b: part}, direct=True)  # the wrapper is free for the next step


def test_a_step_of_empty_windows_can_be_dropped(rig, sequences):
    plan = rig.wrapper.plan(sequences, 0, direct=True)
    rig.wrapper.fold()
    for layer in LAYERS:
        rig.wrapper.run(layer, **inputs_of(rig, rig.draw(1), layer, 2))
    assert plan.layers_run == set(LAYERS)
    assert not plan.moved
    rig.wrapper.abort()
    assert [rig.pool.history(seq) for seq in sequences] == [0, 2]


def test_bare_operations_refuse_the_same(rig, sequences):
    planner = HostPlanner(rig.pool)
    plan = planner.plan(sequences, direct=True)
    fold(planner, plan)
    assert plan.direct
    inputs = inputs_of(rig, rig.draw(1), LAYERS[0], 2)
    readout(rig.pool, plan, LAYERS[0], **inputs)
    with Unchanged(rig.pool):
        with pytest.raises(PlanError, match="abort: got a direct step"):
            planner.abort(plan)
        with pytest.raises(InputError, match="accepted: got 0"):
            planner.commit(plan, [1, 0])
        with pytest.raises(PlanError, match="readout: got layer"):
            readout(rig.pool, plan, LAYERS[0], **inputs)
    planner.commit(plan)


def test_a_refused_input_moves_no_state(rig, sequences):
    layer = LAYERS[0]
    plan = rig.wrapper.plan(sequences, direct=True)
    rig.wrapper.fold()
    inputs = inputs_of(rig, rig.draw(1), layer, 2)
    with Unchanged(rig.pool), pytest.raises(InputError, match="v: got"):
        rig.wrapper.run(layer, **inputs | {"v": inputs["v"][:, :, :1]})
    assert not plan.moved
    rig.wrapper.run(layer, **inputs)
    assert plan.moved


@pytest.mark.parametrize("restore", ["window", "any"])
def test_rollback_stops_at_the_token_base(restore, rng):
    rig = Rig(SPECS["mamba2"], rng, restore=restore)
    (seq,) = rig.pool.alloc()
    rig.step({seq: rig.draw(3)})
    rig.step({seq: rig.draw(1)}, direct=True)
    with (
        Unchanged(rig.pool),
        pytest.raises(InputError, match=r"rows: got 1 to drop; allowed 0\.\.0"),
    ):
        rig.pool.rollback(seq, 1)
    rig.step({seq: rig.draw(2)})
    with (
        Unchanged(rig.pool),
        pytest.raises(InputError, match=r"rows: got 3 to drop; allowed 0\.\.2"),
    ):
        rig.pool.rollback(seq, 3)
    rig.pool.rollback(seq, 2)
    assert rig.pool.tokens(seq) == 4
