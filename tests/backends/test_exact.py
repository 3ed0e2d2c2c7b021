"""What can be exact is compared bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from replayinfer.testing import assert_bitwise_equal

from .world import BASES, Case, World, vary

MAMBA2 = next(base for base in BASES if base.spec.family == "mamba2")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATES = ["realistic", "near_one", "strong", "extreme"]


def twins(case: Case, rng: torch.Generator, **changes) -> tuple[World, World]:
    """Two worlds with the same draws, the second with some fields of the case changed."""
    seed = int(torch.randint(2**31, (), generator=rng))
    other = dataclasses.replace(case, **changes)
    return tuple(World(c, torch.Generator().manual_seed(seed)) for c in (case, other))


@pytest.mark.parametrize("case", vary([MAMBA2], gates=GATES, dtype=DTYPES), ids=str)
def test_capacity_of_one_is_the_plain_recurrence(case, rng):
    case = case.but(capacity=1, max_window=1, page_rows=None)
    world = World(case, rng)
    A, bias = world.weights["A"], world.weights["dt_bias"]
    repeat = case.spec.heads // case.spec.groups
    S = world.start
    for t in range(case.tokens):
        world.step([1] * case.batch, [1] * case.batch)
        x, dt_raw, B = (world.stream[name][:, t].float() for name in ("x", "dt", "B"))
        raw = dt_raw + bias
        dt = raw.clamp_min(0) + torch.log1p(torch.exp(-raw.abs()))  # softplus
        B = B.repeat_interleave(repeat, dim=1)
        S = torch.exp(A * dt)[..., None, None] * S + (dt[..., None] * x)[..., None] * B[:, :, None]
        assert_bitwise_equal(world.states(), S, f"state after token {t}")
    folded = world.wrapper.counters.folds
    assert folded == case.batch * (case.tokens - 1)


@pytest.mark.parametrize("case", vary([MAMBA2], gates=GATES, dtype=DTYPES), ids=str)
def test_split_folds_are_fp32_folds(case, rng):
    plain, split = twins(case, rng, format="fp32_split")
    while (plain.done < case.tokens).any():
        for world in (plain, split):
            world.random_step()
        assert (plain.done == split.done).all()
        pages = [
            torch.from_numpy(w.pool.cursors.checkpoint[w.pool.cursors.live].astype(np.int64))
            for w in (plain, split)
        ]
        assert_bitwise_equal(
            split.pool.checkpoints.load(0, pages[1]), plain.pool.checkpoints.load(0, pages[0])
        )
    assert_bitwise_equal(split.states(), plain.states())
    assert split.wrapper.counters.folds > case.tokens // case.capacity


@pytest.mark.parametrize("case", vary(BASES, format=["fp32", "fp32_split", "bf16"]), ids=str)
@pytest.mark.parametrize(("dim", "state", "page_rows"), [(8, 16, 4), (32, 64, 8)])
def test_bits_do_not_depend_on_who_shares_the_batch(case, dim, state, page_rows, rng):
    """Policy `full`: alone, or among neighbours with any windows and in any bucket."""
    case = case.but(dim=dim, state=state, page_rows=page_rows, batch=5, max_window=4, tokens=20)
    crowd, alone = twins(case, rng)
    while (crowd.done < case.tokens).any():
        left = case.tokens - crowd.done
        draw = torch.randint(0, 5, (2, 5), generator=rng).numpy()
        windows, accepted = draw[0], np.minimum(np.minimum(draw[0], draw[1]), left)
        outs = crowd.step(windows, accepted)
        for i in range(5):
            if windows[i]:
                out = alone.step(windows[[i]], accepted[[i]], who=[i], pads=0)
                assert_bitwise_equal(out[0], outs[i, : windows[i]], f"outputs of sequence {i}")
    assert (crowd.pool.cursors.history == alone.pool.cursors.history).all()
    assert_bitwise_equal(alone.states(), crowd.states())
