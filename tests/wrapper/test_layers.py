"""Several layers in one pool: same pages, own weights, own states."""

import doctest
import importlib

import pytest
import torch

from replayinfer import ReplayDecodeWrapper, StatePool
from replayinfer.testing import assert_bitwise_equal, split_channels

from .rig import SPECS, Rig


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_each_layer_is_as_if_alone(spec, format, rng):
    layers = [3, 0, 7]
    rig = Rig(spec, rng, layers=layers, format=format)
    alone = {}
    for layer in layers:
        pool = StatePool(spec, [layer], 3, capacity=6, max_window=3, page_rows=2, format=format)
        pool.bind(layer, **rig.weights[layer])
        alone[layer] = (ReplayDecodeWrapper(pool), pool.alloc(3))
    for step in range(7):
        windows, accepted = [3, 1, 2], [step % 4, step % 2, 2]
        drawn = rig.draw(3, 3)
        rig.wrapper.plan(rig.sequences, windows)
        rig.wrapper.fold()
        order = layers if step % 2 else layers[::-1]  # the order of layers is the caller's
        got = {layer: rig.run(layer, drawn) for layer in order}
        rig.wrapper.commit(accepted)
        for layer, (wrapper, sequences) in alone.items():
            wrapper.plan(sequences, windows)
            wrapper.fold()
            inputs = dict(drawn[layer])
            convolved = wrapper.conv(layer, inputs.pop("rows"))
            y = wrapper.run(layer, **inputs, **split_channels(spec, convolved))
            wrapper.commit(accepted)
            assert_bitwise_equal(got[layer], y)
    for i, seq in enumerate(rig.sequences):
        states, tails = rig.wrapper.materialize(seq), rig.pool.conv_tail(seq)
        assert not torch.equal(states[0], states[1])
        for position, layer in enumerate(layers):
            wrapper, sequences = alone[layer]
            assert_bitwise_equal(states[position], wrapper.materialize(sequences[i])[0])
            assert_bitwise_equal(tails[position], wrapper.pool.conv_tail(sequences[i])[0])


def test_weights_bound_again_are_used_at_once(rng):
    rig, twin = Rig(SPECS[0], rng), Rig(SPECS[0], rng)
    drawn = rig.draw(3, 2)
    before = [side.step(2, drawn=drawn) for side in (rig, twin)]
    assert not torch.equal(*before)
    for layer, weights in twin.weights.items():
        rig.pool.bind(layer, **weights)
    # The next fold and readout use them, the rows as they are: both start from zero states.
    drawn = rig.draw(3, 1)
    for side in (rig, twin):
        side.pool.free(side.sequences)
        side.sequences = side.pool.alloc(3)
    assert_bitwise_equal(*(side.step(1, drawn=drawn) for side in (rig, twin)))


def test_buckets_are_chosen_and_change_no_bits(rng):
    rig = Rig(SPECS[1], rng, wrapper={"buckets": [8, 4]})
    plain = Rig(SPECS[1], rng)
    for layer, weights in rig.weights.items():
        plain.pool.bind(layer, **weights)
    for _ in range(9):
        drawn = rig.draw(4, 3)
        y = rig.step([3, 2, 1], drawn=drawn)
        unpadded = {n: {k: t[:3] for k, t in d.items()} for n, d in drawn.items()}
        assert_bitwise_equal(y[:, :3], plain.step([3, 2, 1], drawn=unpadded))
        assert not y[:, 3].any()
    assert_bitwise_equal(rig.states(), plain.states())


@pytest.mark.parametrize("name", ["wrapper", "ops", "metrics"])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"replayinfer.{name}")).failed == 0
