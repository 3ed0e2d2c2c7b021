"""Tensor-parallel shards: sizes, and shards side by side compute what the whole layer computes."""

import dataclasses

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import conv_inputs, layer_inputs, layer_weights, relative_error

WHOLE = [  # heads, shared heads, size -> shared heads of a rank
    (128, 8, 1, 8), (128, 8, 2, 4), (128, 8, 8, 1), (128, 8, 16, 1), (128, 8, 32, 1),
    (128, 8, 128, 1), (96, 1, 8, 1), (48, 4, 12, 1), (32, 16, 8, 2), (64, 64, 16, 4),
    (6, 2, 6, 1), (6, 3, 3, 1), (80, 8, 4, 2), (30, 15, 5, 3),
]  # fmt: skip


def make(family, heads, shared):
    name = "groups" if family is Mamba2Spec else "key_heads"
    return family(heads=heads, dim=3, state=5, **{name: shared})


@pytest.mark.parametrize("family", [Mamba2Spec, GDNSpec, KDASpec])
@pytest.mark.parametrize(("heads", "shared", "size", "expected"), WHOLE)
def test_sizes_and_ranges(family, heads, shared, size, expected):
    spec = make(family, heads, shared)
    name = spec.shared_heads[0]
    ratio = heads // shared
    seen_heads, seen_shared = [], []
    for rank in range(size):
        shard, ranges = spec.shard(rank, size), spec.shard_ranges(rank, size)
        assert type(shard) is family
        assert shard == dataclasses.replace(spec, heads=heads // size, **{name: expected})
        assert len(ranges["heads"]) == shard.heads
        assert len(ranges[name]) == getattr(shard, name)
        # Each head finds in the shard the shared head that it had in the whole layer.
        local_ratio = shard.heads // expected
        for i, head in enumerate(ranges["heads"]):
            assert ranges[name][i // local_ratio] == head // ratio
        seen_heads += ranges["heads"]
        seen_shared += ranges[name]
    assert seen_heads == list(range(heads))
    assert seen_shared == sorted(seen_shared)
    assert set(seen_shared) == set(range(shared))


def test_every_other_attribute_is_kept():
    spec = Mamba2Spec(
        heads=8, dim=2, state=3, groups=4, dt_softplus=False, dt_limit=(0.1, 0.5), conv_width=3,
        conv_activation=None,
    )  # fmt: skip
    assert spec.shard(1, 2) == dataclasses.replace(spec, heads=4, groups=2)
    spec = GDNSpec(
        heads=8, dim=2, state=3, key_heads=4, gate="log", beta="sigmoid2", norm="none",
        norm_eps=1e-3, scale=0.5, conv_width=0,
    )  # fmt: skip
    assert spec.shard(1, 2) == dataclasses.replace(spec, heads=4, key_heads=2)
    assert spec.shard(0, 1) == spec


def channel_index(spec, ranges):
    """Channels of the whole layer's convolution that a rank holds, in its own order."""
    name, shared = spec.shared_heads
    per_head = torch.arange(spec.heads * spec.dim).view(spec.heads, spec.dim)
    per_shared = torch.arange(shared * spec.state).view(shared, spec.state)
    heads, held = list(ranges["heads"]), list(ranges[name])
    if isinstance(spec, Mamba2Spec):  # x | B | C
        parts = [per_head[heads], per_head.numel() + per_shared[held]]
        parts.append(parts[-1] + per_shared.numel())
    else:  # q | k | v
        parts = [per_shared[held], per_shared.numel() + per_shared[held]]
        parts.append(2 * per_shared.numel() + per_head[heads])
    return torch.cat([p.flatten() for p in parts])


def cut(tensor, name, spec, ranges, axis):
    """A weight, input or state of the whole layer, reduced to a rank's part on `axis`."""
    if name.startswith("conv"):
        return tensor.index_select(axis, channel_index(spec, ranges))
    shared = {"B", "C", "q", "k"}
    part = ranges[spec.shared_heads[0] if name in shared else "heads"]
    return tensor.index_select(axis, torch.tensor(part)).contiguous()


class Layer:
    """A pool of one layer, two sequences seeded in it, and the steps of the test."""

    def __init__(self, spec, fmt, weights, states, tails):
        self.pool = StatePool(spec, [3], 2, capacity=4, max_window=2, page_rows=2, format=fmt)
        self.pool.bind(3, **weights)
        self.wrapper = ReplayDecodeWrapper(self.pool, backend="torch")
        self.seqs = self.pool.alloc(2)
        for seq, state, tail in zip(self.seqs, states, tails, strict=True):
            self.pool.seed(seq, {3: state}, conv={3: tail}, tokens=7)

    def step(self, rows, inputs, accepted):
        self.wrapper.plan(self.seqs, 2)
        self.wrapper.fold()
        outputs = self.wrapper.conv(3, rows), self.wrapper.run(3, **inputs)
        self.wrapper.commit(accepted)
        return outputs

    def states(self):
        return torch.stack([self.wrapper.materialize(seq)[0] for seq in self.seqs])


@pytest.mark.parametrize("fmt", ["fp32", "fp32_split"])
@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (Mamba2Spec(heads=8, dim=3, state=5, groups=4), 2),
        (Mamba2Spec(heads=8, dim=3, state=5, groups=2), 4),  # groups on two ranks each
        (Mamba2Spec(heads=6, dim=3, state=5, groups=1), 6),
        (GDNSpec(heads=8, dim=3, state=5, key_heads=4), 4),
        (GDNSpec(heads=8, dim=3, state=5, key_heads=2, beta="sigmoid2"), 8),  # replicated
        (GDNSpec(heads=12, dim=3, state=5, key_heads=4), 2),
    ],
    ids=str,
)
def test_shards_compute_what_the_whole_layer_computes(spec, size, fmt, rng):
    weights = layer_weights(spec, rng)
    states = torch.randn(2, *spec.state_shape, generator=rng)
    tails = torch.randn(2, spec.conv_channels, 3, generator=rng)
    whole = Layer(spec, fmt, weights, states, tails)
    ranges = [spec.shard_ranges(rank, size) for rank in range(size)]
    parts = [
        Layer(
            spec.shard(rank, size),
            fmt,
            {name: cut(w, name, spec, held, 0) for name, w in weights.items()},
            cut(states, "state", spec, held, 1),
            cut(tails, "conv", spec, held, 1),
        )
        for rank, held in enumerate(ranges)
    ]
    for accepted in ([2, 1], [0, 2], [2, 2], [1, 2], [2, 0]):  # through a fold or two
        inputs = layer_inputs(spec, 2, 2, torch.float32, rng)
        rows = conv_inputs(spec, 2, 2, torch.float32, rng)
        conv, y = whole.step(rows, inputs, accepted)
        outputs = [
            part.step(
                cut(rows, "conv", spec, held, 2),
                {name: cut(x, name, spec, held, 2) for name, x in inputs.items()},
                accepted,
            )
            for part, held in zip(parts, ranges, strict=True)
        ]
        assert relative_error(torch.cat([y for _, y in outputs], dim=2), y, keep=[2]) < 1e-6
        for (part_conv, _), held in zip(outputs, ranges, strict=True):
            assert relative_error(part_conv, cut(conv, "conv", spec, held, 2)) < 1e-6
    assert whole.pool.history(whole.seqs[0]) < 7  # it did fold
    together = torch.cat([part.states() for part in parts], dim=1)
    assert relative_error(together, whole.states(), keep=[0, 1]) < 1e-6
