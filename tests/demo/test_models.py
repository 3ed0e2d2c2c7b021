"""The models: seeded, and such that a wrong state shows."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError, StatePool
from replayinfer.demo.configs import DEFAULT_MODELS, MODELS
from replayinfer.demo.models import build_model
from replayinfer.demo.prompts import load_prompts


def weights(model):
    return torch.cat([w.detach().flatten() for w in model.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_decides_the_weights(build, name):
    model = build(name, 0)
    assert model.config.model_type.removesuffix("_text") == name
    assert model.dtype is torch.float32
    before = torch.get_rng_state()
    again, other = build_model(name, 0), build_model(name, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights(model), weights(again))
    assert not torch.equal(weights(model), weights(other))


def test_an_unknown_model_is_refused():
    with pytest.raises(InputError, match="model: got 'gpt'; allowed nemotron_h, qwen3_next"):
        build_model("gpt")


@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_text_does_not_loop(build, name):
    for tokens in decode(build(name, 0), load_prompts(3), 64):
        assert len(set(tokens)) >= 16


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_one_percent_of_the_state_turns_tokens(build, monkeypatch, name, seed):
    """The demo's check bites: a small error after the prefill, once, is seen in most prompts."""
    assert turned_prompts(monkeypatch, build(name, seed), seed, prompts=8, tokens=96) >= 5


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DEFAULT_MODELS])
def test_it_turns_some_in_every_model(build, monkeypatch, name):
    """The same, smaller; over 96 tokens it is five to eight of eight prompts."""
    assert turned_prompts(monkeypatch, build(name, 0), 0, prompts=6, tokens=40) >= 1


@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_far_from_turning_tokens(build, name):
    """The other side: float32 rounding, here by another batch size, stays four orders below."""
    tokens = 32 if name in DEFAULT_MODELS else 12
    model, prompts = build(name, 0), load_prompts(2)
    alone = [decode(model, [p], tokens, keep_logits=True)[0] for p in prompts]
    together = decode(model, prompts, tokens, keep_logits=True)
    for a, b in zip(alone, together, strict=True):
        assert float((a - b).abs().max()) < 1e-4
        assert 1 < float(a.std()) < 3


def turned_prompts(monkeypatch, model, seed, *, prompts, tokens):
    """How many prompts end otherwise if the state after the prefill is 1% off."""
    texts = load_prompts(prompts)
    rng = torch.Generator().manual_seed(seed)
    seed_right, seeded = StatePool.seed, []

    def seed_second_half_wrong(pool, sequence, states, **options):
        seeded.append(sequence)
        error = 0.01 if len(seeded) > prompts else 0.0
        states = {
            layer: state * (1 + error * torch.randn(state.shape, generator=rng))
            for layer, state in states.items()
        }
        seed_right(pool, sequence, states, **options)

    monkeypatch.setattr(StatePool, "seed", seed_second_half_wrong)
    decoded = decode(model, texts * 2, tokens)
    right, wrong = decoded[:prompts], decoded[prompts:]
    return sum(a != b for a, b in zip(right, wrong, strict=True))


def decode(model, prompts, tokens, *, keep_logits=False):
    """Greedy tokens (or all logits) of every prompt, decoded in one batch."""
    from replayinfer.integrations.transformers import ReplayEngine

    engine = ReplayEngine(model, max_sequences=len(prompts))
    started = [engine.prefill(p) for p in prompts]
    sequences = [seq for seq, _ in started]
    logits = torch.stack([row for _, row in started])
    kept, chosen = [logits], [logits.argmax(-1)]
    for _ in range(tokens - 1):
        logits = engine.step(sequences, chosen[-1])
        kept.append(logits)
        chosen.append(logits.argmax(-1))
    if keep_logits:
        return list(torch.stack(kept, 1))
    return torch.stack(chosen, 1).tolist()
