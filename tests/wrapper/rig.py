"""A pool of two layers under a wrapper, and a snapshot of all that a call could change."""

from __future__ import annotations

import numpy as np
import torch

from replayinfer import GDNSpec, Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import conv_inputs, layer_inputs, layer_weights, split_channels

SPECS = [
    Mamba2Spec(heads=4, dim=8, state=16, groups=2),
    GDNSpec(heads=4, dim=8, state=16, key_heads=2),
]
LAYERS = [1, 4]


class Rig:
    """Sequences of `spec` that take fresh random tokens through the convolution and the layer."""

    def __init__(self, spec, rng, *, sequences=3, layers=LAYERS, wrapper=None, **options) -> None:
        self.spec, self.rng = spec, rng
        options = {"capacity": 6, "max_window": 3, "page_rows": 2} | options
        self.pool = StatePool(spec, layers, sequences + 1, **options)
        self.weights = {layer: layer_weights(spec, rng) for layer in layers}
        for layer, weights in self.weights.items():
            self.pool.bind(layer, **weights)
        self.wrapper = ReplayDecodeWrapper(self.pool, **(wrapper or {}))
        self.sequences = self.pool.alloc(sequences)

    def draw(self, bucket: int, window: int) -> dict[int, dict[str, torch.Tensor]]:
        """By layer: pre-convolution ``rows``, and the gates of a readout."""
        drawn = {}
        for layer in self.pool.layers:
            inputs = layer_inputs(self.spec, window, bucket, self.pool.dtype, self.rng)
            convolved = split_channels(self.spec, torch.empty(0, self.spec.conv_channels))
            drawn[layer] = {name: t for name, t in inputs.items() if name not in convolved}
            rows = conv_inputs(self.spec, window, bucket, self.pool.dtype, self.rng)
            drawn[layer]["rows"] = rows
        return drawn

    def run(self, layer: int, drawn: dict[int, dict[str, torch.Tensor]]) -> torch.Tensor:
        """One layer: the convolution, then the readout of what it gives."""
        inputs = dict(drawn[layer])
        convolved = self.wrapper.conv(layer, inputs.pop("rows"))
        return self.wrapper.run(layer, **inputs, **split_channels(self.spec, convolved))

    def step(self, windows=1, accepted=None, *, drawn=None, **options) -> torch.Tensor:
        """A whole step of all sequences; returns the outputs of all layers."""
        plan = self.wrapper.plan(self.sequences, windows, **options)
        drawn = drawn or self.draw(plan.bucket, plan.window)
        self.wrapper.fold()
        y = torch.stack([self.run(layer, drawn) for layer in self.pool.layers])
        self.wrapper.commit(accepted)
        return y

    def states(self) -> torch.Tensor:
        return torch.stack([self.wrapper.materialize(s) for s in self.sequences])

    def everything(self) -> dict[str, torch.Tensor]:
        """All tensors, cursors, counts and plan arrays; peaks of use apart."""
        pool, cur = self.pool, self.pool.cursors
        named = {"checkpoints": pool.checkpoints.storage, "conv": pool.conv.rows}
        named |= {f"row {name}": field for name, field in pool.inputs.fields.items()}
        named |= {f"weight {name}": w for name, w in pool.weights.items()}
        for name in ("base", "history", "undo", "checkpoint", "table", "generation", "busy"):
            named[f"cursor {name}"] = torch.from_numpy(getattr(cur, name))
        for ids in (pool.slot_ids, pool.checkpoint_ids, pool.input_ids):
            named[f"{ids.name} refs"] = torch.from_numpy(ids.refs)
            named[f"{ids.name} free"] = torch.tensor(ids.free)
        if plan := self.wrapper._plan:
            for name, array in vars(plan.arrays).items():
                named[f"plan {name}"] = array
            named["plan state"] = torch.tensor(hash(plan.state))
            named["layers run"] = torch.tensor(sorted(plan.layers_run))
        counters = self.wrapper.counters.as_dict().values()
        named["counters"] = torch.from_numpy(np.array(list(counters), dtype=np.int64))
        return {name: t.clone() for name, t in named.items()}
