"""Wrapping module functions: idempotent, removable, and invisible to everyone else."""

from __future__ import annotations

import types

import pytest
import torch

from replayinfer import UnsupportedError
from replayinfer.integrations.transformers import (
    FAMILIES,
    ReplayCache,
    describe,
    install,
    uninstall,
)
from replayinfer.integrations.transformers.dispatch import ROUTES, StateHandle

from .helpers import generate


@pytest.fixture
def binding(model):
    found = describe(model)
    uninstall(found.family, found.module)
    yield found
    uninstall(found.family, found.module)


def functions(binding):
    return [getattr(binding.module, name) for name in binding.family.kind.routes]


def test_install_twice_is_install_once(binding):
    before = functions(binding)
    install(binding.family, binding.module)
    wrapped = functions(binding)
    assert all(w is not b for w, b in zip(wrapped, before, strict=True))
    install(binding.family, binding.module)
    assert functions(binding) == wrapped
    uninstall(binding.family, binding.module)
    assert functions(binding) == before
    uninstall(binding.family, binding.module)
    assert functions(binding) == before


def test_a_model_with_its_own_cache_sees_no_change(binding, prompts):
    before = generate(binding.model, prompts[:1], tokens=6)
    install(binding.family, binding.module)
    after = generate(binding.model, prompts[:1], tokens=6)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(x, y) for x, y in zip(before.logits, after.logits, strict=True))


def test_making_a_cache_installs(binding):
    before = functions(binding)
    ReplayCache.from_model(binding.model)
    assert functions(binding) != before


def test_a_state_that_reaches_the_peers_function_says_so(binding, prompts):
    cache = ReplayCache.from_model(binding.model)
    uninstall(binding.family, binding.module)
    with pytest.raises(UnsupportedError, match="state: got a replayed state in "):
        generate(binding.model, prompts[:1], tokens=2, past_key_values=cache)


def module_with(**functions):
    module = types.ModuleType("some_modeling_module")
    vars(module).update(functions)
    return module


def conv(hidden_states, conv_state, weight, bias=None, activation=None): ...


def test_a_module_without_the_function_is_refused_whole():
    module = module_with(causal_conv1d_update=conv, causal_conv1d_fn=conv)
    with pytest.raises(UnsupportedError, match="got no function mamba2_selective_state_update"):
        install(FAMILIES["nemotron_h"], module)
    assert module.causal_conv1d_update is conv


def test_a_function_with_other_parameters_is_refused_whole():
    def step(cache, x): ...

    module = module_with(
        causal_conv1d_update=conv, causal_conv1d_fn=conv, mamba2_selective_state_update=step,
        mamba2_chunk_scan=step,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="step: got parameters cache, x"):
        install(FAMILIES["nemotron_h"], module)
    assert module.causal_conv1d_update is conv


@pytest.mark.parametrize("repeated", [True, False])
def test_key_heads_arrive_repeated_or_not(rng, repeated):
    """One version of the peer repeats key heads for its function, another leaves that to it."""
    key = torch.randn((1, 1, 2, 3), generator=rng)
    given = key.repeat_interleave(2, dim=2) if repeated else key
    value, gate = torch.randn((1, 1, 4, 5), generator=rng), torch.zeros(1, 1, 4)
    seen = {}

    class Driver:
        spec = types.SimpleNamespace(key_heads=2)

        def run(self, layer, **inputs):
            seen.update(inputs)
            return value

    handle = StateHandle(Driver(), 0)
    step = ROUTES["delta_step"].stand_in
    output, state = step(None, given, given, value, g=gate, beta=gate, initial_state=handle)
    assert output is value
    assert state is handle
    assert torch.equal(seen["q"], key)
    assert torch.equal(seen["k"], key)
