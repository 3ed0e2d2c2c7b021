"""Peers without a GPU: the float64 recurrence in a peer's clothes, right or wrong on purpose."""

from __future__ import annotations

import dataclasses
import functools

import torch

from replayinfer.bench.peers import Bound, Peer, Variant
from replayinfer.bench.peers.base import last_state
from replayinfer.testing import causal_conv, recurrence, split_channels

SCOPES = ("ssm", "mixer")


def bind(work, scope="ssm", *, spoil=None):
    """The layer by the oracle; `spoil` may change its inputs, its outputs or its new states."""

    def step(layer):
        tokens, weights = work.tokens[layer], work.weights[layer]
        inputs = dict(work.inputs(layer))
        if scope == "mixer":
            window = work.windows[layer].transpose(1, 2)
            rows = causal_conv(
                tokens.rows[:, None], weights["conv_weight"], weights["conv_bias"],
                work.spec.conv_activation, window,
            )  # fmt: skip
            inputs |= split_channels(work.spec, rows[:, 0].to(work.dtype))
            moved = torch.cat([window[:, 1:], tokens.rows[:, None]], 1)
            work.windows[layer].copy_(moved.transpose(1, 2))
        if spoil == "gates":
            gate = "dt" if "dt" in inputs else "a"
            inputs[gate] = inputs[gate] + 1
        many = work.window > 1
        tokens_axis = inputs if many else {name: x[:, None] for name, x in inputs.items()}
        y, state = recurrence(work.spec, work.states[layer], tokens_axis, weights)
        if spoil == "layout":
            state = state.flatten(2).roll(1, -1).view_as(state)
        if spoil == "nan":
            y[0, 0, 0] = float("nan")
        if spoil == "one head":
            y[:, :, 1] = y[:, :, 1] * 1.1
        if spoil == "last token":
            y[:, -1] = y[:, 0]
        if spoil != "still":
            last_state(work, layer).copy_(state)
        return (y if many else y[:, 0]).to(work.dtype)

    return Bound(step, functools.partial(last_state, work))


def peer(name, *binders, refuses=lambda *_: None):
    """A peer with a configuration per binder; the first has the peer's own name."""

    def variants(spec):
        for i, binder in enumerate(binders):
            yield Variant(name if i == 0 else f"{name} ({i})", binder)

    return Peer(name, name, refuses, variants)


def missing(name, error):
    def variants(spec):
        raise error
        yield

    return dataclasses.replace(peer(name), variants=variants)
