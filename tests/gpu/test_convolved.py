"""Convolved readouts on a GPU: against the torch backend there, captured, and one after another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer import ops
from replayinfer.testing import assert_bitwise_equal, delta_inputs

from ..kernels.convolved_pair import ConvolvedCase, ConvolvedPair
from ..kernels.delta_pair import launching

pytestmark = pytest.mark.gpu
WORDS = ConvolvedCase(
    heads=8, key_heads=4, dim=128, state=128, capacity=11, page_rows=4, batch=5, pads=2, steps=16,
    layers=2, warps=1, rows=32,
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        WORDS,
        WORDS.but(dim=64, state=256, layout="slices", bias=False, warps=4, capacity=3),
        WORDS.but(heads=12, dim=80, state=24, silu=False, format="bf16", capacity=3, warps=2),
        WORDS.but(layout="odd address", format="bf16", capacity=16, steps=26),
        WORDS.but(dtype=torch.float32, format="fp32", width=3, layout="slices", capacity=3),
        WORDS.but(projected="by head", warps=2, bias=False),
        WORDS.but(projected="whole", layout="slices", dim=80, heads=12, capacity=3),
    ],
    ids=str,
)
def test_decode(case, rng):
    pair = ConvolvedPair(case, rng, "cuda").decode()
    pair.check()
    assert pair.worlds[1][2].counters.folds


def test_layers_one_after_another_share_a_line(rng):
    """A prepass must not overwrite channels that the readout before it still reads."""
    case = WORDS.but(layers=6, batch=64, pads=0, steps=5)
    for _ in range(3):
        ConvolvedPair(case, rng, "cuda").decode().check()


def test_a_captured_step_is_the_same_step(rng):
    """With other tokens, other slots and other empty windows at each replay."""
    pair = ConvolvedPair(WORDS.but(pads=0), rng, "cuda")
    pool, sequences, wrapper = pair.worlds[1]
    spec, batch = pair.spec, WORDS.batch
    x = torch.zeros(batch, spec.conv_channels, dtype=WORDS.dtype, device="cuda")
    slots = torch.zeros(batch, dtype=torch.int32, device="cuda")
    gates = {
        name: torch.zeros(batch, 1, spec.heads, dtype=WORDS.dtype, device="cuda") for name in "ab"
    }
    out = torch.empty((batch, 1, spec.heads, spec.dim), dtype=WORDS.dtype, device="cuda")
    eager, replayed = ([view for view, _ in windows] for windows in pair.windows)

    def readouts(plan, states):
        for i, layer in enumerate(pair.layers):
            conv = dataclasses.replace(pair.conv(1, i, x, slots), x=x, slots=slots)
            conv = dataclasses.replace(conv, states=states[i])
            ops.convolved_readout(
                pool, plan, layer, conv, out=out, backend=wrapper.backend, **gates
            )

    graph = None
    with launching(WORDS):
        for step in range(3):
            live = np.arange(batch) % 3 != step
            tokens, given = pair.draw(live)
            x.copy_(tokens[0][0])
            slots.copy_(given)
            for name, value in gates.items():
                value.copy_(tokens[0][1][name])
            plan = wrapper.plan(sequences, live.astype(int), window=1)
            wrapper.fold()
            # The same rows are written twice; of the windows each has its own.
            readouts(plan, eager)
            want = out.clone()
            if graph is None:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    readouts(plan, replayed)
            out.fill_(np.nan)
            graph.replay()
            assert_bitwise_equal(out, want, "outputs")
            for mine, theirs in zip(replayed, eager, strict=True):
                assert_bitwise_equal(mine, theirs, "windows")
            wrapper.commit()


@pytest.mark.xdist_group("memory")
def test_slots_past_two_to_the_31_elements(rng):
    pair = ConvolvedPair(WORDS.but(pads=0, layers=1, batch=2), rng, "cuda")
    pool, sequences, wrapper = pair.worlds[1]
    ((x, _),), _ = pair.draw(np.ones(2, dtype=bool))
    gates = delta_inputs(pair.spec, 1, 2, WORDS.dtype, rng)
    gates = {name: gates[name].cuda() for name in "ab"}
    near = pair.conv(1, 0, x, torch.tensor([1, 2], dtype=torch.int32))
    near.states.copy_(torch.randn(near.states.shape, generator=rng))
    shape, stride = (3, *near.states.shape[1:]), 2**30 + 8
    memory = torch.empty(2 * stride + near.states[0].numel(), dtype=WORDS.dtype, device="cuda")
    far = memory.as_strided(shape, (stride, *near.states.stride()[1:]))
    far.copy_(near.states[:3])
    ys = []
    for conv in (near, dataclasses.replace(near, states=far)):
        plan = wrapper.plan(sequences)
        wrapper.fold()
        with launching(WORDS):
            ys.append(ops.convolved_readout(pool, plan, 2, conv, backend=wrapper.backend, **gates))
        wrapper.abort()
    assert_bitwise_equal(*ys)
    assert_bitwise_equal(far, near.states[:3])
    del memory, far
    torch.cuda.empty_cache()
