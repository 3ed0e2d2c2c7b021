"""The convolution over windows, with rollback, against the oracle; its window bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from replayinfer import ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    assert_bitwise_equal,
    assert_no_poison,
    assert_within_budget,
    causal_conv,
    conv_inputs,
    initial_states,
    layer_inputs,
    layer_weights,
)

from .world import BASES, LAYER, poison_dead, vary

CASES = vary(
    BASES,
    conv_width=[2, 3, 4],
    conv_activation=[None],
    dtype=[torch.bfloat16, torch.float16],
    max_window=[1, 5],
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("restore", "seeded"), [("window", True), ("any", False)])
def test_against_the_oracle(case, restore, seeded, rng):
    spec, n, tokens = case.spec, case.batch, 24
    spec = dataclasses.replace(spec, conv_width=spec.conv_width or 4)
    taps = spec.conv_width - 1
    pool = StatePool(
        spec, [LAYER], n, capacity=case.capacity, max_window=case.max_window, dtype=case.dtype,
        restore=restore, page_rows=4,
    )  # fmt: skip
    poison_dead(pool)
    weights = layer_weights(spec, rng)
    pool.bind(LAYER, **weights)
    wrapper = ReplayDecodeWrapper(pool)
    rows = conv_inputs(spec, taps + tokens, n, case.dtype, rng)
    if not seeded:
        rows[:, :taps] = 0  # a sequence starts with an empty window
    sequences = pool.alloc(n)
    if seeded:
        states = initial_states(spec, n, rng)
        for seq, state, tail in zip(sequences, states, rows[:, :taps].mT, strict=True):
            pool.seed(seq, {LAYER: state}, tokens=11, conv={LAYER: tail.contiguous()})
    got = torch.full((n, tokens, spec.conv_channels), np.nan)
    done, bucket = np.zeros(n, dtype=np.int64), n + case.pads
    while (done < tokens).any():
        draw = torch.randint(0, case.max_window + 1, (3, n), generator=rng).numpy()
        windows = np.maximum(draw[0], draw[1])
        accepted = np.minimum(np.minimum(windows, np.maximum(draw[2], draw[1])), tokens - done)
        width = wrapper.plan(sequences, windows, bucket=bucket).window
        wrapper.fold()
        x = torch.full((bucket, width, spec.conv_channels), np.nan, dtype=case.dtype)
        for i in range(n):
            x[i, : windows[i]] = 7.0  # junk drafts
            x[i, : accepted[i]] = rows[i, taps + done[i] :][: accepted[i]]
        out = torch.full(x.shape, np.nan)
        y = wrapper.conv(LAYER, x, out=out)
        assert y is out
        assert_no_poison(y)
        again = torch.full(x.shape, np.nan)
        assert_bitwise_equal(wrapper.conv(LAYER, x, out=again), y, "run a second time")
        for i in range(n):
            got[i, done[i] : done[i] + accepted[i]] = y[i, : accepted[i]]
            assert not y[i, windows[i] :].any()
        assert not y[n:].any()
        wrapper.run(LAYER, **layer_inputs(spec, width, bucket, case.dtype, rng))
        wrapper.commit(accepted)
        done += accepted
        poison_dead(pool)
        for i, seq in enumerate(sequences):
            assert_bitwise_equal(pool.conv_tail(seq)[0].mT, rows[i, done[i] : done[i] + taps])
        # Take some of it back now and then: those tokens come again.
        i = int(draw[0, 0]) % n
        limit = pool.history(sequences[i])
        if restore == "window":
            limit = min(int(accepted[i]), limit)
        if draw[1, 0] == 0 and limit:
            back = 1 + int(draw[2, 1]) % limit
            pool.rollback(sequences[i], back)
            done[i] -= back
            assert_bitwise_equal(pool.conv_tail(sequences[i])[0].mT, rows[i, done[i] :][:taps])
            poison_dead(pool)
    names = ("conv_weight", "conv_bias")
    results = [
        causal_conv(
            rows[:, taps:], *(weights[k] for k in names), spec.conv_activation,
            history=rows[:, :taps], dtype=dtype,
        )
        for dtype in (torch.float64, torch.float32)
    ]  # fmt: skip
    assert_within_budget(got, exact=results[0], rounded=results[1])


@pytest.mark.parametrize("case", BASES, ids=str)
def test_output_of_the_pool_type_is_rounded_once(case, rng):
    spec = dataclasses.replace(case.spec, conv_width=4)
    pool = StatePool(spec, [LAYER], 2, max_window=3, dtype=torch.bfloat16)
    pool.bind(LAYER, **layer_weights(spec, rng))
    wrapper = ReplayDecodeWrapper(pool)
    wrapper.plan(pool.alloc(2), 3)
    wrapper.fold()
    x = conv_inputs(spec, 3, 2, torch.bfloat16, rng)
    y = wrapper.conv(LAYER, x)
    wide = wrapper.conv(LAYER, x, out=torch.empty(x.shape))
    assert_bitwise_equal(y, wide.to(torch.bfloat16))
    assert not torch.equal(wide, y.float())
