"""Readouts that convolve their own inputs: Triton's kernels against the torch backend, and both
against a float64 convolution before the float64 recurrence.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer import ops
from replayinfer.kernels.conv.shift import ShiftedWindows
from replayinfer.testing import assert_bitwise_equal, causal_conv, recurrence, relative_error

from .convolved_pair import LAYOUTS, ConvolvedCase, ConvolvedPair, place
from .delta_pair import launching
from .vary import vary

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
WORDS = ConvolvedCase(heads=2, key_heads=1, batch=2, pads=1, capacity=2, steps=4)
VALUES = WORDS.but(dtype=torch.float32, format="fp32")


@pytest.mark.parametrize(
    "case",
    [
        WORDS.but(bias=False, state=24, dim=20),
        WORDS.but(silu=False, layout="slices", heads=3, dim=20),
        WORDS.but(key_heads=2, heads=2, dim=10, layout="slices", layers=2, steps=3),
        WORDS.but(rows=8, warps=2, key_heads=2, heads=4, steps=3),
        VALUES.but(width=3, layout="slices", state=24),
        VALUES.but(width=2, bias=False, heads=1, rows=4, warps=4),
        VALUES.but(dtype=torch.float16, silu=False, heads=3, layout="odd address"),
        WORDS.but(width=3, layout="odd slots", rows=8, warps=1),
        WORDS.but(layout="odd address", state=24, format="fp32"),
        WORDS.but(layout="odd rows", bias=False, dim=20, steps=3),
        WORDS.but(layout="odd slots", steps=3),
        WORDS.but(weight_dtype=torch.float32, gate="log", norm="none"),
        WORDS.but(projected="by head", heads=4, key_heads=2, layout="slices", steps=3),
        WORDS.but(projected="by head", heads=3, state=24, dim=20, layout="odd address"),
        WORDS.but(projected="whole", heads=4, key_heads=2, rows=8, warps=2, steps=3),
        VALUES.but(projected="by head", width=3, heads=4, key_heads=2, gate="log", steps=3),
        VALUES.but(projected="whole", heads=3, dim=10, layout="slices"),
    ],
    ids=str,
)
def test_decode(case, rng):
    """Folds, empty windows, pads, slots that do not exist; see `ConvolvedPair`."""
    pair = ConvolvedPair(case, rng)
    conv = pair.conv(1, 0, torch.zeros(3, pair.spec.conv_channels, dtype=case.dtype), pair.slots)
    assert windows_of(conv).packed == case.packed
    pair.decode().check()
    assert pair.worlds[1][2].counters.folds


def windows_of(conv: ops.ShiftedConvolution) -> ShiftedWindows:
    return ShiftedWindows(conv.x, conv.states, conv.slots, conv.weight, conv.bias, True)


@pytest.mark.parametrize("world", [0, 1], ids=["torch", "triton"])
@pytest.mark.parametrize(
    "case",
    [
        VALUES.but(capacity=3, steps=7),
        VALUES.but(width=2, bias=False, silu=False, heads=3, steps=5),
        WORDS.but(format="fp32", capacity=3, steps=7),
    ],
    ids=str,
)
def test_against_the_recurrence(case, world, rng):
    """Outputs, states and windows after streams that begin at the windows' first contents."""
    pair = ConvolvedPair(case.but(pads=0), rng)
    spec, (pool, sequences, wrapper) = pair.spec, pair.worlds[world]
    states, _ = pair.windows[world][0]
    history = states[pair.slots].mT.clone()
    start = torch.stack([wrapper.materialize(s)[0] for s in sequences])
    streams, outputs = [], []
    for _ in range(case.steps):
        ((x, gates),), slots = pair.draw(np.ones(case.batch, dtype=bool))
        streams.append({"x": x[:, None], **gates})
        with launching(case):
            plan = wrapper.plan(sequences)
            wrapper.fold()
            conv = pair.conv(world, 0, x, slots)
            y = ops.convolved_readout(pool, plan, 2, conv, backend=wrapper.backend, **gates)
            wrapper.commit()
        outputs.append(y)
    stream = {name: torch.cat([s[name] for s in streams], 1) for name in streams[0]}
    x = stream.pop("x")
    activation = "silu" if case.silu else None
    line = causal_conv(x, *pair.weights[0], activation, history=history)
    q, k, v = line.split([spec.key_heads * spec.state] * 2 + [spec.heads * spec.dim], -1)
    stream |= {name: t.unflatten(-1, (spec.key_heads, -1)) for name, t in (("q", q), ("k", k))}
    stream["v"] = v.unflatten(-1, (spec.heads, -1))
    weights = {name: pool.weights[name][0] for name in ("A_log", "dt_bias")}
    want, final = recurrence(spec, start, stream, weights)
    # The line is rounded to the type of `x`: sums of a bf16's rounding, of 2 ** -9 each.
    epsilon = 1e-2 if case.dtype == torch.bfloat16 else 3e-6
    assert relative_error(torch.cat(outputs, 1), want) < epsilon
    got = torch.stack([wrapper.materialize(s)[0] for s in sequences])
    assert relative_error(got, final) < epsilon
    last = torch.cat([history, x], 1)[:, 1 - case.width :].mT
    assert_bitwise_equal(states[pair.slots], last.contiguous(), "windows")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", [WORDS, *vary([WORDS], layout=["odd address"])], ids=str)
def test_windows_move_bit_for_bit(case, rng):
    """Whatever the bits: payloads of NaN, denormals, negative zeros."""
    pair = ConvolvedPair(case.but(pads=0, layers=1), rng)
    pool, sequences, wrapper = pair.worlds[1]
    states, memory = pair.windows[1][0]

    def any_bits(*shape):
        bits = torch.randint(-(2**15), 2**15, shape, generator=rng, dtype=torch.int16)
        return bits.view(torch.bfloat16)

    states.copy_(any_bits(*states.shape))
    ((_, gates),), slots = pair.draw(np.ones(case.batch, dtype=bool))
    want = memory.clone()
    x = any_bits(case.batch, pair.spec.conv_channels)
    moved = torch.cat([states[pair.slots], x[:, :, None]], 2)[:, :, 1:]
    want.view(torch.int16)[pair.slots] = place(moved, LAYOUTS[case.layout][1])[1].view(torch.int16)
    with launching(case):
        plan = wrapper.plan(sequences)
        wrapper.fold()
        conv = pair.conv(1, 0, x, slots)
        ops.convolved_readout(pool, plan, 2, conv, backend=wrapper.backend, **gates)
    assert_bitwise_equal(memory, want)


def test_a_projection_that_all_key_heads_share(rng):
    """Expanded over them: a stride of 0 is a stride."""
    pair = ConvolvedPair(VALUES.but(heads=4, key_heads=2, layers=1), rng)
    spec, bucket = pair.spec, VALUES.batch
    values = spec.heads // spec.key_heads * spec.dim

    def shared(size):
        one = torch.randn(bucket, 1, size, generator=rng)
        return one.expand(bucket, spec.key_heads, size)

    x, z = shared(2 * spec.state + values), shared(values)
    gates = {name: shared(spec.heads // spec.key_heads) for name in "ab"}
    outputs = []
    for world, (pool, sequences, wrapper) in enumerate(pair.worlds):
        given = pair.conv(world, 0, torch.zeros(bucket, spec.conv_channels), pair.slots)
        z_out = torch.full((bucket, spec.heads, spec.dim), float("nan"))
        conv = dataclasses.replace(given, x=x, z=z, z_out=z_out)
        with launching(pair.case):
            plan = wrapper.plan(sequences)
            wrapper.fold()
            outputs.append(
                ops.convolved_readout(pool, plan, 2, conv, backend=wrapper.backend, **gates)
            )
        assert_bitwise_equal(z_out, z.reshape(z_out.shape))
    assert_bitwise_equal(pair.windows[1][0][1], pair.windows[0][0][1])
    assert relative_error(outputs[1], outputs[0]) <= 3e-6
