"""The calls that SGLang makes in place of its own decode kernels, in its layouts."""

from __future__ import annotations

import pytest
import torch

from replayinfer.integrations.sglang.backends import _DeltaKernel, _StateUpdate
from replayinfer.testing import peak_error

from .stand_ins import LAYERS, Server


@pytest.mark.parametrize("name", ["gdn", "kda", "kda-bounded"])
def test_packed_decode(name, rng):
    """``q | k | v`` in a row that is part of a wider one, gates flat, output ``[1, batch, ...]``"""
    server = Server(name, rng, capacity=4)
    server.clear(2, 5)
    server.extend([2, 5], 3)
    kernel = _DeltaKernel(server.replay)
    for _ in range(6):
        slots = [5, 0, 2]
        server.replay.begin(torch.tensor(slots, dtype=torch.int32))
        for index, layer in enumerate(LAYERS):
            each = [server.inputs(1) for _ in slots]
            flat = [torch.cat([one[n].flatten() for n in "qkv"]) for one in each]
            packed = torch.cat([torch.stack(flat), torch.full((3, 4), torch.nan)], 1)[:, :-4]
            a = torch.stack([one["a"].flatten() for one in each])
            b = torch.stack([one["b"].flatten() for one in each])
            kernel.layer = layer
            if name != "gdn":
                a, b = a[:, None], b[None]  # as SGLang's KDA hands them over
            y = kernel.packed_decode(packed, a, b, scale=1.0)
            assert y.shape == (1, 3, server.spec.heads, server.spec.dim)
            assert not y[0, 1].any()
            for i in (0, 2):
                want = server.advance(slots[i], index, each[i])
                assert peak_error(y[0, i], want[0, 0]) < 2e-5
        server.replay.finish()


def test_state_update(rng):
    """The selective state update of Mamba-2, ours in planned steps and SGLang's own elsewhere."""
    server = Server("mamba2", rng, capacity=4)
    server.clear(1, 3)
    server.extend([1, 3], 3)
    calls = []
    update = _StateUpdate(lambda *args, **kwargs: calls.append(kwargs), server.replay)
    spec = server.spec
    for _ in range(6):
        slots = [3, 1]
        server.replay.begin(torch.tensor(slots, dtype=torch.int32))
        for index, layer in enumerate(LAYERS):
            each = [server.inputs(1) for _ in slots]
            x, dt, b, c = (torch.cat([one[n][:, 0] for one in each]) for n in ("x", "dt", "B", "C"))
            out = torch.full((2, spec.heads, spec.dim), torch.nan)
            update.layer = layer
            update(
                server.states[index], x, dt[:, :, None].expand(-1, -1, spec.dim), None, b, c,
                dt_bias=None, dt_softplus=True, state_batch_indices=None, out=out,
            )  # fmt: skip
            update.layer = None
            for i, slot in enumerate(slots):
                want = server.advance(slot, index, each[i])
                assert peak_error(out[i], want[0, 0]) < 2e-5
        server.replay.finish()
    assert calls == []
    update(server.states[0], x, dt, None, b, c, out=out)
    assert list(calls[0]) == ["D", "z", "out"]
