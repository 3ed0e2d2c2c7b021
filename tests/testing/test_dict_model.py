"""The dictionary model is a model: every operation is checked against one run of the oracle."""

import doctest
import importlib

import pytest
import torch

from replayinfer.errors import InputError, StaleHandleError
from replayinfer.spec import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.testing import (
    DictModel,
    causal_conv,
    conv_inputs,
    initial_states,
    layer_inputs,
    layer_weights,
    recurrence,
    relative_error,
)

SPECS = [
    Mamba2Spec(heads=2, dim=3, state=4),
    GDNSpec(heads=2, key_heads=1, dim=3, state=4),
    KDASpec(heads=2, key_heads=1, dim=3, state=4, gate="bounded"),
]
LAYERS = [1, 4]


class Session:
    """A model with bound layers, and 20 tokens of inputs for each of them."""

    def __init__(self, spec, rng):
        self.spec = spec
        self.model = DictModel(spec, LAYERS)
        self.weights = {layer: layer_weights(spec, rng) for layer in LAYERS}
        self.inputs = {layer: layer_inputs(spec, 20, 1, torch.float32, rng) for layer in LAYERS}
        self.rows = {layer: conv_inputs(spec, 20, 1, torch.float32, rng)[0] for layer in LAYERS}
        self.start = {layer: initial_states(spec, 1, rng)[0] for layer in LAYERS}
        for layer in LAYERS:
            self.model.bind(layer, **self.weights[layer])

    def window(self, tokens):
        """Return the step arguments that hold the tokens of these indices."""
        inputs = {
            layer: {name: t[0][tokens] for name, t in self.inputs[layer].items()}
            for layer in LAYERS
        }
        return inputs, {layer: self.rows[layer][tokens] for layer in LAYERS}

    def step(self, seq, tokens, accepted=None):
        inputs, rows = self.window(tokens)
        return self.model.step(seq, inputs, accepted, conv=rows)

    def check(self, seq, tokens, *, start=None, base=0):
        """The sequence is where one straight run over these tokens ends."""
        inputs, rows = self.window(tokens)
        for layer in LAYERS:
            S0 = torch.zeros(self.spec.state_shape) if start is None else start[layer]
            _, want = recurrence(self.spec, S0, inputs[layer], self.weights[layer])
            got = self.model.state(seq, layer)
            assert relative_error(got, want) < 1e-13
            window = torch.cat([torch.zeros(3, self.spec.conv_channels), rows[layer]])[-3:]
            assert torch.equal(self.model.conv_window(seq, layer), window)
        assert self.model.tokens(seq) == base + len(tokens)
        assert self.model.committed(seq) == len(tokens)


@pytest.fixture(params=SPECS, ids=["mamba2", "gdn", "kda"])
def session(request, rng):
    return Session(request.param, rng)


def test_alloc_step_and_accepted_counts(session):
    session.model.alloc("a")
    session.check("a", [])
    session.step("a", [0])
    session.step("a", [1, 2, 18, 19], accepted=2)  # two drafts rejected: no trace
    session.step("a", [17], accepted=0)
    session.check("a", [0, 1, 2])
    session.step("a", [3, 4])
    session.check("a", [0, 1, 2, 3, 4])


def test_step_returns_every_output_of_the_window(session):
    session.model.alloc(0)
    session.step(0, [0, 1])
    got = session.step(0, [2, 3, 4], accepted=1)
    inputs, _ = session.window([0, 1, 2, 3, 4])
    for layer in LAYERS:
        zero = torch.zeros(session.spec.state_shape)
        y, _ = recurrence(session.spec, zero, inputs[layer], session.weights[layer])
        assert relative_error(got[layer], y[2:]) < 1e-13


def test_conv_reads_the_committed_history(session):
    session.model.alloc(0)
    session.step(0, [0, 1, 19], accepted=2)
    for layer in LAYERS:
        weights, rows = session.weights[layer], session.rows[layer]
        got = session.model.conv(0, layer, rows[2:5])
        want = causal_conv(rows[:5], weights["conv_weight"], weights["conv_bias"])[2:]
        assert torch.equal(got, want)


def test_fork_of_a_fork_with_the_parent_freed(session):
    session.model.alloc("a")
    session.step("a", [0, 1, 2])
    session.model.fork("a", "b")
    session.step("a", [3])
    session.step("b", [10])
    session.model.fork("b", "c")
    session.model.free("b")
    session.step("c", [11])
    session.check("a", [0, 1, 2, 3])
    session.check("c", [0, 1, 2, 10, 11])
    assert session.model.live() == ["a", "c"]


def test_rollback_forgets_state_and_rows(session):
    session.model.alloc(0)
    session.step(0, [0, 1, 2])
    session.model.fork(0, 1)
    session.model.rollback(0, 2)
    session.check(0, [0])
    session.step(0, [5, 6])
    session.check(0, [0, 5, 6])
    session.model.rollback(0, 3)
    session.check(0, [])
    session.check(1, [0, 1, 2])


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_seed_takes_states_and_the_convolution_tail(session, layout):
    model = session.model
    model.alloc(0)
    session.step(0, [7, 8])
    states = {n: s.mT if layout == "kv" else s for n, s in session.start.items()}
    tail = {layer: session.rows[layer][:2].mT for layer in LAYERS}  # [channels, 2], of 3 taps
    model.seed(0, states, conv=tail, tokens=100, layout=layout)
    assert model.tokens(0) == 100
    for layer in LAYERS:
        window = model.conv_window(0, layer)
        assert torch.equal(window[0], torch.zeros(session.spec.conv_channels))
        assert torch.equal(window[1:], session.rows[layer][:2])
    session.step(0, [2, 3, 4])
    session.check(0, [2, 3, 4], start=session.start, base=100)
    with pytest.raises(InputError, match=r"rows: got 4; allowed 0\.\.3"):
        model.rollback(0, 4)  # not below what was seeded
    model.rollback(0, 3)
    assert torch.equal(model.conv_window(0, 1)[1:], session.rows[1][:2])
    assert model.materialize(0).shape == (2, *session.spec.state_shape)


def test_refusals_change_nothing(session):
    model = session.model
    model.alloc("a")
    session.step("a", [0, 1])
    inputs, _ = session.window([2, 3])
    for accepted in (-1, 3):
        with pytest.raises(InputError, match="accepted: got"):
            model.step("a", inputs, accepted)
    with pytest.raises(InputError, match="inputs: got layers"):
        model.step("a", {1: inputs[1]})
    with pytest.raises(InputError, match="which is live"):
        model.alloc("a")
    with pytest.raises(InputError, match="which is live"):
        model.fork("a", "a")
    with pytest.raises(InputError, match="rows: got -1"):
        model.rollback("a", -1)
    for call in (model.free, model.tokens, lambda seq: model.fork(seq, "c")):
        with pytest.raises(StaleHandleError, match="seq: got 'b'"):
            call("b")
    session.check("a", [0, 1])
    model.free("a")
    with pytest.raises(StaleHandleError):
        model.free("a")


@pytest.mark.parametrize("name", ["dict_model", "poison"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"replayinfer.testing.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
