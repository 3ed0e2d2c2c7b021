"""The order of calls. Every wrong one is a `PlanError`, changes nothing, and the step goes on."""

import pytest
import torch

from replayinfer import PlanError
from replayinfer.testing import assert_bitwise_equal, assert_untouched, initial_states

from .rig import LAYERS, SPECS, Rig

# At each stage of a step, what may not be called and the words that say so.
WRONG = {
    "no plan": {"fold", "conv", "run", "commit", "abort"},
    "planned": {"plan", "conv", "run", "commit", "pool"},
    "folded": {"plan", "fold", "commit", "pool"},
    "one layer run": {"plan", "fold", "commit", "pool"},
    "all layers run": {"plan", "fold", "pool"},
    "committed": {"fold", "conv", "run", "commit", "abort"},
    "aborted": {"fold", "conv", "run", "commit", "abort"},
}


def calls(rig, drawn):
    """By name, what might be called out of turn."""
    pool, wrapper, layer = rig.pool, rig.wrapper, LAYERS[0]
    first = rig.sequences[0]
    inputs = {n: t for n, t in drawn[layer].items() if n != "rows"}
    return {
        "plan": [lambda: wrapper.plan(rig.sequences), lambda: wrapper.plan([])],
        "fold": [wrapper.fold],
        "conv": [lambda: wrapper.conv(layer, drawn[layer]["rows"])],
        "run": [lambda: wrapper.run(layer, **inputs)],
        "commit": [wrapper.commit, lambda: wrapper.commit([0, 0, 0])],
        "abort": [wrapper.abort],
        "pool": [
            lambda: pool.free(first),
            lambda: pool.fork(first),
            lambda: pool.rollback(first, 0),
            lambda: pool.seed(
                first,
                {n: initial_states(rig.spec, 1, rig.rng)[0] for n in LAYERS},
                tokens=0,
                conv={n: torch.zeros(rig.spec.conv_channels, 3) for n in LAYERS},
            ),
        ],
    }


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_wrong_orders_change_nothing(spec, rng):
    rig = Rig(spec, rng)
    twin = Rig(spec, rng)
    for layer in LAYERS:
        twin.pool.bind(layer, **rig.weights[layer])
    for windows in (2, 3):  # the next window of 2 does not fit any more
        drawn = rig.draw(3, windows)
        rig.step(windows, drawn=drawn)
        twin.step(windows, drawn=drawn)
    drawn = rig.draw(3, 2)
    refused = 0

    def probe(stage):
        nonlocal refused
        for name in sorted(WRONG[stage]):
            for call in calls(rig, drawn)[name]:
                before = rig.everything()
                with pytest.raises(PlanError, match=r": got .*; allowed .*; "):
                    call()
                assert_untouched(before, rig.everything())
                refused += 1

    probe("no plan")
    plan = rig.wrapper.plan(rig.sequences, 2)
    assert plan.fold_count == 3
    probe("planned")
    rig.wrapper.fold()
    probe("folded")
    y = [rig.run(LAYERS[0], drawn)]
    probe("one layer run")
    y.append(rig.run(LAYERS[1], drawn))
    probe("all layers run")
    rig.wrapper.commit([2, 0, 1])
    probe("committed")
    assert refused > 40

    assert_bitwise_equal(torch.stack(y), twin.step(2, [2, 0, 1], drawn=drawn))
    assert_bitwise_equal(rig.states(), twin.states())
    rig.wrapper.plan(rig.sequences)
    rig.wrapper.abort()
    probe("aborted")


def test_commit_names_the_layers_that_did_not_run(rng):
    rig = Rig(SPECS[0], rng)
    plan = rig.wrapper.plan(rig.sequences)
    drawn = rig.draw(plan.bucket, plan.window)
    rig.wrapper.fold()
    with pytest.raises(PlanError, match=r"commit: got no run of layers \[1, 4\]"):
        rig.wrapper.commit()
    rig.run(4, drawn)
    with pytest.raises(PlanError, match=r"commit: got no run of layers \[1\]"):
        rig.wrapper.commit([0, 0, 0])
    rig.run(1, drawn)
    assert rig.wrapper.commit().tolist() == [1, 1, 1]


def test_a_step_of_empty_windows_needs_no_run(rng):
    """To fold before a prefix is published, say."""
    rig = Rig(SPECS[1], rng)
    rig.step(2)
    states = rig.states()
    plan = rig.wrapper.plan(rig.sequences, 0, force_fold=True)
    assert (plan.fold_count, plan.window) == (3, 1)
    rig.wrapper.fold()
    assert rig.wrapper.commit().tolist() == [0, 0, 0]
    assert [rig.pool.history(s) for s in rig.sequences] == [0, 0, 0]
    assert_bitwise_equal(rig.states(), states)


def test_an_empty_batch(rng):
    rig = Rig(SPECS[0], rng)
    before = rig.everything()
    plan = rig.wrapper.plan([], bucket=2)
    rig.wrapper.fold()
    y = rig.run(1, rig.draw(2, 1))
    assert (plan.batch, y.shape[0]) == (0, 2)
    assert not y.any()
    assert rig.wrapper.commit().tolist() == []
    assert_untouched(before, rig.everything(), ["counters"])


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
@pytest.mark.parametrize("stage", ["planned", "folded", "run"])
def test_abort_drops_the_window(spec, stage, rng):
    """Before the fold everything is as before; after it the same states, with fewer rows."""
    rig = Rig(spec, rng, format="fp32_split")
    rig.step(3)
    rig.step(3, [3, 1, 0])
    (child,) = rig.pool.fork(rig.sequences[0])
    before, states = rig.everything(), rig.states()
    histories = [rig.pool.history(s) for s in rig.sequences]
    plan = rig.wrapper.plan(rig.sequences, 2)
    assert plan.fold_count == 1
    if stage != "planned":
        rig.wrapper.fold()
        histories[0] = 0
    if stage == "run":
        drawn = rig.draw(3, 2)
        for layer in LAYERS:
            rig.run(layer, drawn)
    rig.wrapper.abort()
    if stage == "planned":
        assert_untouched(before, rig.everything(), ["counters"])
    assert_bitwise_equal(rig.states(), states)
    assert [rig.pool.history(s) for s in rig.sequences] == histories
    assert rig.wrapper.counters.aborted == 1
    rig.step(2)
    rig.pool.free([*rig.sequences, child])
    assert not any(rig.pool.pages_in_use().values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_an_aborted_window_leaves_no_trace(spec, rng):
    rig, twin = Rig(spec, rng), Rig(spec, rng)
    for layer in LAYERS:
        twin.pool.bind(layer, **rig.weights[layer])
    for step in range(8):
        plan = rig.wrapper.plan(rig.sequences, 3)
        rig.wrapper.fold()
        junk = rig.draw(plan.bucket, plan.window)
        for layer in LAYERS:
            rig.run(layer, junk)
        rig.wrapper.abort()
        # The twin folds where the aborted plan did, and nothing else.
        twin.wrapper.plan(twin.sequences, 0, force_fold=plan.fold)
        twin.wrapper.fold()
        twin.wrapper.commit()
        drawn = rig.draw(3, 3)
        accepted = [step % 4, (step + 1) % 4, 3]
        outs = [side.step(3, accepted, drawn=drawn) for side in (rig, twin)]
        assert_bitwise_equal(*outs)
    assert_bitwise_equal(rig.states(), twin.states())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_two_wrappers_interleave_on_one_pool(spec, rng):
    """Plans of different sequences do not disturb each other, sharers of a page included."""
    rig, twin = Rig(spec, rng), Rig(spec, rng)
    for layer in LAYERS:
        twin.pool.bind(layer, **rig.weights[layer])
    other = type(rig.wrapper)(rig.pool)
    for side in (rig, twin):
        side.pool.free(side.sequences.pop())
    for _ in range(3):
        drawn = rig.draw(2, 2)
        for side in (rig, twin):
            side.step(2, drawn=drawn)
    pairs = [(side.sequences[0], *side.pool.fork(side.sequences[0])) for side in (rig, twin)]
    drawn = [rig.draw(1, 3), rig.draw(1, 3)]

    def one(wrapper, sequence, inputs):
        wrapper.plan([sequence], 3)
        yield
        wrapper.fold()
        yield
        for layer in LAYERS:
            rows = dict(inputs[layer])
            wrapper.conv(layer, rows.pop("rows"))
            convolved = {f.name: f for f in spec.input_fields if f.name not in rows}
            x = {
                n: torch.ones(1, 3, *(getattr(spec, d) for d in f.dims))
                for n, f in convolved.items()
                if not f.optional
            }
            wrapper.run(layer, **rows, **x)
            yield
        wrapper.commit()

    interleaved = [
        one(w, s, d) for w, s, d in zip((rig.wrapper, other), pairs[0], drawn, strict=True)
    ]
    while interleaved:
        interleaved = [gen for gen in interleaved if next(gen, "done") != "done"]
    for sequence, inputs in zip(pairs[1], drawn, strict=True):
        list(one(twin.wrapper, sequence, inputs))
    for mine, theirs in zip(*pairs, strict=True):
        assert_bitwise_equal(rig.wrapper.materialize(mine), twin.wrapper.materialize(theirs))
    rig.pool.free([*rig.sequences, pairs[0][1]])
    assert not any(rig.pool.pages_in_use().values())
