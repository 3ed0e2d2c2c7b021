"""Walks at the edges of their index arguments, on both backends."""

from __future__ import annotations

import math
import os

import pytest
import torch

from replayinfer import delta_walk, mamba2_walk

HEADS, DIM, STATE, SLOTS = 2, 8, 16, 6
BACKENDS = ["torch"] + ["triton"] * (os.environ.get("TRITON_INTERPRET") == "1")


def tokens(rng, batch, window):
    def draw(*shape):
        return torch.randn(batch, window, *shape, generator=rng)

    return {
        "x": draw(HEADS, DIM), "dt": draw(HEADS).abs() / 10, "B": draw(1, STATE),
        "C": draw(1, STATE), "A": -torch.rand(HEADS, generator=rng),
    }  # fmt: skip


def recurrence(state, inputs, i):
    """Of sequence `i`, in float64: outputs ``[window, heads, dim]`` and the state after each."""
    x, dt, b, c, a = (inputs[n].double() for n in ("x", "dt", "B", "C", "A"))
    s, outs, states = state.double(), [], []
    for t in range(x.shape[1]):
        step = dt[i, t][:, None, None]
        s = torch.exp(a[:, None, None] * step) * s
        s = s + step * x[i, t][..., None] * b[i, t, 0]
        outs.append((s * c[i, t, 0]).sum(-1))
        states.append(s)
    return torch.stack(outs), torch.stack(states)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_tokens_were_accepted_than_this_step_has(backend, rng):
    """The source column follows the step before, whose window was longer."""
    state = torch.randn(SLOTS, HEADS, DIM, STATE, generator=rng)
    before, inputs = state.clone(), tokens(rng, 2, 1)
    source = torch.tensor([[0, 1, 2, 3], [4, 3, 5, 1]])
    y = mamba2_walk(
        state=state, **inputs, source=source, accepted=torch.tensor([3, 1]), write="none",
        backend=backend,
    )  # fmt: skip
    for i, slot in enumerate((2, 4)):
        want, _ = recurrence(before[slot], inputs, i)
        torch.testing.assert_close(y[i].double(), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_entry_outside_is_not_written(backend, rng):
    state = torch.randn(SLOTS, HEADS, DIM, STATE, generator=rng)
    before, inputs = state.clone(), tokens(rng, 3, 2)
    memory = torch.full((8, 2, HEADS, DIM, STATE), math.nan)
    each = memory[3:5]  # two entries inside of a larger allocation
    mamba2_walk(
        state=state, **inputs, each=each, entry=torch.tensor([-2, 1, 2]), write="none",
        backend=backend,
    )  # fmt: skip
    _, want = recurrence(before[1], inputs, 1)
    torch.testing.assert_close(each[1].double(), want, rtol=1e-4, atol=1e-5)
    assert memory[[0, 1, 2, 3, 5, 6, 7]].isnan().all()
    # Without entries a sequence's is its slot, which may lie outside as well.
    memory.fill_(math.nan)
    mamba2_walk(
        state=state, **inputs, each=each, source=torch.tensor([5, 0, 2]), write="none",
        backend=backend,
    )  # fmt: skip
    assert memory[3].isfinite().all()
    assert memory[[0, 1, 2, 4, 5, 6, 7]].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rate_beyond_float32_times_nothing_keeps_the_state(backend, rng):
    """``softplus`` of a strongly negative gate is 0, and so is the decay of any rate."""
    state = torch.randn(1, HEADS, DIM, STATE, generator=rng)
    before = state.clone()
    delta_walk(
        state=state, q=torch.ones(1, 1, HEADS, STATE), k=torch.zeros(1, 1, HEADS, STATE),
        v=torch.ones(1, 1, HEADS, DIM), a=torch.full((1, 1, HEADS), -200.0),
        b=torch.zeros(1, 1, HEADS), A_log=torch.full((HEADS,), 95.0),
        dt_bias=torch.zeros(HEADS), backend=backend,
    )  # fmt: skip
    assert torch.equal(state, before)
