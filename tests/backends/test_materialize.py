"""The state after any number of committed rows, built and not written."""

import numpy as np
import pytest
import torch

from replayinfer import InputError, StaleHandleError, materialize
from replayinfer.testing import assert_untouched, assert_within_budget, snapshot

from .test_traces import tensors
from .world import BASES, World, vary


@pytest.mark.parametrize("case", vary(BASES, format=["fp32", "fp32_split", "bf16"]), ids=str)
@pytest.mark.parametrize("gates", ["near_one", "extreme"])
def test_after_every_row(case, gates, rng):
    world = World(case.but(tokens=27, batch=2, capacity=7, max_window=2, gates=gates), rng)
    traces = []
    for options in ({"dtype": torch.float64}, {"dtype": torch.float32}):
        if options["dtype"] == torch.float32 and not world.pool.format.lossless:
            options["state_rounding"] = world.pool.format.plane_dtype
        traces.append([world.start])
        world.oracle(**options, trace=traces[-1])
    exact, plain = (torch.stack([s.double() for s in trace], dim=1) for trace in traces)
    seen = set()
    while (world.done < case.tokens).any() and world.done.max() < 27:
        world.random_step()
        before = snapshot(tensors(world.pool))
        for i, seq in enumerate(world.sequences):
            history = world.pool.history(seq)
            first = world.done[i] - history
            for rows in range(history + 1):
                got = materialize(world.pool, seq, rows)
                assert_within_budget(
                    got[0], exact=exact[i, first + rows], rounded=plain[i, first + rows]
                )
                seen.add(rows)
        assert_untouched(before, tensors(world.pool))
    assert seen == set(range(8))


@pytest.mark.parametrize("case", BASES, ids=str)
def test_while_a_plan_holds_the_sequence(case, rng):
    """Before and after the fold it is the same state; the fold has made fewer rows of it."""
    world = World(case, rng)
    for _ in range(3):
        world.step([2] * 3, [2] * 3)
    seq = world.sequences[0]
    want = world.wrapper.materialize(seq)
    world.wrapper.plan(world.sequences, 1, force_fold=True)
    assert torch.equal(world.wrapper.materialize(seq), want)
    world.wrapper.fold()
    assert world.pool.history(seq) == 0
    assert torch.equal(world.wrapper.materialize(seq), want)
    world.wrapper.abort()
    assert torch.equal(world.wrapper.materialize(seq, 0), want)


def test_refusals(rng):
    world = World(BASES[0], rng)
    world.step([2] * 3, [2] * 3)
    seq = world.sequences[0]
    for rows in (-1, 3, True, 1.0, "2", np.array([1])):
        with pytest.raises(InputError, match=r"rows: got .*; allowed 0\.\.2"):
            world.wrapper.materialize(seq, rows)
    world.pool.free(seq)
    with pytest.raises(StaleHandleError, match="was freed"):
        world.wrapper.materialize(seq)
