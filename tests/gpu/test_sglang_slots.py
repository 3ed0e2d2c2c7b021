"""Replay on lent state slots, on the device: whole steps in a CUDA graph, and pages recoded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from replayinfer import GDNSpec, StatePool, ops
from replayinfer.integrations.sglang.layers import RecurrentLayers
from replayinfer.integrations.sglang.options import Options
from replayinfer.integrations.sglang.slots import SlotReplay
from replayinfer.testing import layer_inputs, layer_weights

pytestmark = pytest.mark.gpu

SPEC = GDNSpec(heads=4, dim=128, state=128, key_heads=2, conv_width=0)
LAYERS = [0, 2]
SLOTS = 40


def replay(weights) -> tuple[SlotReplay, torch.Tensor]:
    modules = {
        layer: SimpleNamespace(**{n: torch.nn.Parameter(w.cuda().float()) for n, w in own.items()})
        for layer, own in weights.items()
    }
    states = torch.empty(len(LAYERS), SLOTS, *SPEC.state_shape, device="cuda")
    layers = RecurrentLayers("gdn", SPEC, modules)
    options = Options(capacity=4)
    return SlotReplay(layers, LAYERS, states, torch.bfloat16, options), states


@pytest.mark.parametrize("split", [True, False])
def test_pages_are_recoded_bit_for_bit(split, rng):
    plain = torch.randn(2, 5, *SPEC.state_shape, generator=rng).cuda()
    pages = plain.clone()
    pool = StatePool(SPEC, [0, 1], 4, format="fp32_split", checkpoints=pages, device="cuda")
    which = torch.tensor([4, -1, 0], dtype=torch.int32, device="cuda")
    chosen = torch.tensor([True, True, True], device="cuda")
    ops.split_pages(pool, which, chosen)
    got = pool.checkpoints.load(slice(None), which[[0, 2]].long())
    assert torch.equal(got, plain[:, [4, 0]])
    if not split:
        ops.join_pages(pool, which, chosen)
        assert torch.equal(pages, plain)


def test_a_captured_step_is_the_eager_one(rng):
    """Padded rows, tracking and changes of the batch between replays of one graph."""
    weights = {layer: layer_weights(SPEC, rng) for layer in LAYERS}
    (eager, a), (graphed, b) = replay(weights), replay(weights)
    slots = torch.full((4,), -1, dtype=torch.int32, device="cuda")
    mask = torch.zeros(4, dtype=torch.bool, device="cuda")
    targets = torch.zeros(4, dtype=torch.int64, device="cuda")
    inputs = {
        layer: {n: v.cuda() for n, v in layer_inputs(SPEC, 1, 4, torch.bfloat16, rng).items()}
        for layer in LAYERS
    }

    def step(it: SlotReplay, states: torch.Tensor) -> list[torch.Tensor]:
        it.begin(slots)
        y = [it.readout(layer, **inputs[layer]) for layer in LAYERS]
        it.finish()
        it.fold_now(slots, mask)
        states[:, torch.where(mask, targets, 0)] = states[:, torch.where(mask, slots, 0).long()]
        it.written(targets, mask, plain=False)
        return y

    step(graphed, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(graphed, b)
    for turn in range(14):
        live = [[3, 9, 7], [9, 3], [7, 11, 3, 9]][turn % 3]
        slots.fill_(-1)
        slots[: len(live)] = torch.tensor(live, dtype=torch.int32)
        mask.fill_(False)
        if turn in (6, 11):
            mask[1] = True
            targets[1] = 20 + turn
        for own in inputs.values():
            for value in own.values():
                value.copy_(torch.randn(value.shape, generator=rng))
        want = step(eager, a)
        graph.replay()
        for got, expected in zip(out, want, strict=True):
            assert torch.equal(got, expected)
            assert torch.isfinite(got).all()
    assert torch.equal(eager._history, graphed._history)
    assert torch.equal(a[:, 1:].view(torch.int32), b[:, 1:].view(torch.int32))
    assert eager.counters() == graphed.counters()
    assert eager.counters()["folds for tracking"] == 2
