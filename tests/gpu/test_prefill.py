"""Prefill with installed peers on a GPU, against the reference and in pieces.

A peer's kernels multiply in 16 bits and keep their states between chunks in 16 bits, where the
reference keeps float32: `BOUND` is what that may cost, as a relative error of outputs and states.
"""

from __future__ import annotations

import pytest
import torch

from replayinfer import (
    GDNSpec,
    KDASpec,
    Mamba2Spec,
    ReplayDecodeWrapper,
    ReplayPrefillWrapper,
    StatePool,
    materialize,
)
from replayinfer.testing import layer_inputs, layer_weights, relative_error

pytestmark = pytest.mark.gpu

BOUND = 2**-6  # 4 times the half unit of bf16 that a key, a weight or a state is rounded by
SPECS = {
    "fla-gdn": GDNSpec(heads=8, dim=128, state=128, key_heads=4),
    "fla-kda": KDASpec(heads=4, dim=128, state=128, key_heads=4),
    "mamba_ssm-mamba2": Mamba2Spec(heads=8, dim=64, state=128, groups=2),
}


def peer_or_skip(name):
    """The pool's maker, or a skip that says why the peer is not there."""
    peer, spec = name.partition("-")[0], SPECS[name]
    pool = make_pool(spec)
    chosen = ReplayPrefillWrapper(pool).backend.name
    if chosen != peer:
        from replayinfer.backends.registry import _PREFILL

        pytest.skip(f"{peer}: {_PREFILL[peer](pool).supports(pool)}")
    return peer, spec


def make_pool(spec, weights=None):
    pool = StatePool(
        spec, [0], max_sequences=5, checkpoint_pages=10, capacity=8, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    weights = weights or layer_weights(spec, torch.Generator().manual_seed(0))
    pool.bind(0, **{name: value.cuda() for name, value in weights.items()})
    return pool


def draw(spec, tokens, rng):
    inputs = layer_inputs(spec, tokens, 1, torch.bfloat16, rng)
    rows = torch.randn(tokens, spec.conv_channels, generator=rng).to("cuda", torch.bfloat16)
    return {name: value[0].cuda() for name, value in inputs.items()}, rows


def prefill(wrapper, sequences, cu, inputs, rows):
    wrapper.plan(sequences, cu)
    wrapper.conv(0, rows)
    y = wrapper.run(0, **inputs)
    wrapper.commit()
    return y


@pytest.mark.parametrize("name", SPECS)
def test_prompts_decode_and_prompts_again(name, rng):
    peer, spec = peer_or_skip(name)
    pools = [make_pool(spec), make_pool(spec)]
    wrappers = [
        ReplayPrefillWrapper(p, backend=b) for p, b in zip(pools, (peer, "torch"), strict=True)
    ]
    sequences = [pool.alloc(5) for pool in pools]
    for lengths in ([150, 0, 64, 7, 150], [33, 5, 70, 128, 1]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        inputs, rows = draw(spec, int(cu[-1]), rng)
        got, exact = (
            prefill(w, s, cu, inputs, rows) for w, s in zip(wrappers, sequences, strict=True)
        )
        assert relative_error(got, exact) <= BOUND
        for a, b in zip(*sequences, strict=True):
            states = [materialize(p, s) for p, s in zip(pools, (a, b), strict=True)]
            if states[1].any():
                assert relative_error(*states) <= BOUND
            else:
                assert not states[0].any()
        step, rows = draw(spec, 5, rng)  # a token of decode, whose row the next prompt starts from
        for pool, own in zip(pools, sequences, strict=True):
            decode = ReplayDecodeWrapper(pool, backend="torch", direct="never")
            decode.plan(own)
            decode.fold()
            decode.conv(0, rows[:, None])
            decode.run(0, **{name: value[:, None] for name, value in step.items()})
            decode.commit()


@pytest.mark.parametrize("name", SPECS)
def test_pieces_give_what_the_whole_gives(name, rng):
    peer, spec = peer_or_skip(name)
    tokens = 200
    inputs, rows = draw(spec, tokens, rng)
    ends = []
    for pieces in ([200], [64, 1, 100, 35]):
        pool = make_pool(spec)
        wrapper, sequence = ReplayPrefillWrapper(pool, backend=peer), pool.alloc(1)
        outputs, at = [], 0
        for piece in pieces:
            part = slice(at, at + piece)
            own = {name: value[part] for name, value in inputs.items()}
            outputs.append(prefill(wrapper, sequence, [0, piece], own, rows[part]))
            at += piece
        ends.append((torch.cat(outputs), materialize(pool, sequence[0])))
    for got, exact in zip(*ends, strict=True):
        assert relative_error(got, exact) <= BOUND


def test_auto_keeps_float32_with_the_reference():
    spec = SPECS["fla-gdn"]
    pool = StatePool(spec, [0], max_sequences=1, dtype=torch.float32, device="cuda")
    assert ReplayPrefillWrapper(pool).backend.name == "torch"
