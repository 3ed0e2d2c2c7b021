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
    world = World(case.but(tokens=16, batch=2, capacity=7, max_window=2, gates=gates), rng)
    exact, plain = world.trace(torch.float64), world.trace(torch.float32)
    seen = set()
    for step in range(12):
        windows = [2, 1] if step % 3 == 0 else [1, 1]
        world.step(windows, windows)
        before = snapshot(tensors(world.pool))
        for i, seq in enumerate(world.sequences):
            history = world.pool.history(seq)
            for rows in range(history + 1):
                token = world.done[i] - history + rows
                assert_within_budget(
                    materialize(world.pool, seq, rows)[0],
                    exact=exact[i, token], rounded=plain[i, token],
                )  # fmt: skip
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
