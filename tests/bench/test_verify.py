"""A peer's kernel is timed only if it computes the layer."""

from __future__ import annotations

import functools

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.bench.peers import Variant
from replayinfer.bench.verify import verify_peer

from .fakes import SCOPES, bind

SPECS = {
    "mamba2": Mamba2Spec(heads=4, dim=8, state=16, groups=2),
    "gdn": GDNSpec(heads=4, dim=8, state=16, key_heads=2),
    "kda": KDASpec(heads=2, dim=8, state=16, key_heads=2, gate="bounded"),
}


def verify(family, scope="ssm", spoil=None, **options):
    variant = Variant("fake", functools.partial(bind, scope=scope, spoil=spoil))
    return verify_peer(variant, SPECS[family], scope=scope, batch=3, **options)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", SPECS)
def test_the_recurrence_itself_passes(family, scope, state_dtype):
    assert verify(family, scope, state_dtype=state_dtype) is None


def test_a_gate_after_the_step_passes():
    assert verify("mamba2", gated=True) is None


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        ("gates", "first output"),
        ("one head", "first output"),
        ("nan", "first output"),
        ("still", "second output"),
        ("layout", "second output"),
    ],
)
def test_what_computes_something_else_is_named(family, spoil, where):
    assert f"wrong: the {where} is off by " in verify(family, spoil=spoil)


def test_a_state_that_stays_behind_at_the_end_is_seen():
    def forgetful(work):
        bound, calls = bind(work), []

        def step(layer):
            calls.append(layer)
            before = work.states[layer].clone()
            y = bound.step(layer)
            if len(calls) == 2:
                work.states[layer].copy_(before)
            return y

        return type(bound)(step, bound.state)

    said = verify_peer(Variant("fake", forgetful), SPECS["mamba2"], batch=3)
    assert said.startswith("wrong: the state is off by ")


def test_a_window_that_does_not_move_is_seen():
    def stuck(work):
        bound, before = bind(work, "mixer"), work.windows[0].clone()

        def step(layer):
            work.windows[0].copy_(before)
            return bound.step(layer)

        return type(bound)(step, bound.state)

    said = verify_peer(Variant("fake", stuck), SPECS["mamba2"], scope="mixer", batch=3)
    assert said.startswith("wrong: the second output is off by ")


def test_states_of_the_kernels_own_are_read():
    """As a kernel that returns new states: the work's own are not touched by it."""

    def elsewhere(work):
        bound, after = bind(work), {}

        def step(layer):
            before = work.states[layer].clone()
            y = bound.step(layer)
            after[layer] = work.states[layer].clone()
            work.states[layer].copy_(before)
            return y

        return type(bound)(step, after.__getitem__)

    assert verify_peer(Variant("fake", elsewhere), SPECS["mamba2"], batch=3) is None


def test_an_exception_is_the_reason():
    def raising(work):
        raise TypeError("update() got an unexpected keyword argument 'out'\nand more")

    said = verify_peer(Variant("fake", raising), SPECS["mamba2"], batch=2)
    assert said == "TypeError: update() got an unexpected keyword argument 'out'"


def test_too_little_memory_is_not_a_verdict():
    def raising(work):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        verify_peer(Variant("fake", raising), SPECS["mamba2"], batch=2)
