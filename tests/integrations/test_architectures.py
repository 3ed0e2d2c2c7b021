"""Every other served architecture, and what is peculiar to one of them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec, UnsupportedError
from replayinfer.demo.configs import DEFAULT_MODELS, MODELS
from replayinfer.demo.models import build_model
from replayinfer.integrations.transformers import (
    FAMILIES,
    ReplayCache,
    ReplayEngine,
    describe,
    unsupported_reason,
)

from .helpers import LOGITS_ATOL, assert_same, generate, own_tokens

OTHERS = [name for name in MODELS if name not in DEFAULT_MODELS]
SHAPES = {  # heads, dim, state, groups or key heads; recurrent layers
    "kimi_linear": (KDASpec, 4, 32, 32, 4, [0, 1, 3]),
    "bamba": (Mamba2Spec, 8, 24, 32, 2, [0, 1, 3, 4]),
    "mamba2": (Mamba2Spec, 12, 16, 32, 3, [0, 1, 2, 3]),
    "falcon_h1": (Mamba2Spec, 8, 32, 32, 2, [0, 1, 2, 3]),
    "granitemoehybrid": (Mamba2Spec, 8, 24, 64, 1, [0, 2, 3]),
    "zamba2": (Mamba2Spec, 8, 24, 64, 2, [0, 1, 2, 3, 4]),
    "qwen3_5": (GDNSpec, 4, 32, 64, 2, [0, 1, 2]),
    "qwen3_5_moe": (GDNSpec, 4, 32, 64, 2, [0, 1, 2]),
    "olmo_hybrid": (GDNSpec, 4, 32, 64, 2, [0, 1, 2]),
}


@pytest.fixture(params=OTHERS)
def name(request):
    return request.param


@pytest.fixture
def model(models, name):
    return models[name]


def replayed(model, prompts, cache=None, **options):
    """`generate` with a cache of ours, under the name that the model gives its cache."""
    cache = cache or ReplayCache.from_model(model, capacity=5)
    return generate(model, prompts, **{describe(model).cache_argument: cache}, **options)


def test_every_family_has_a_demo_model(models):
    assert {describe(models[name]).family.model_type for name in MODELS} == set(FAMILIES)


def test_shapes(model, name):
    kind, *sizes, layers = SHAPES[name]
    binding = describe(model)
    spec = binding.spec
    assert type(spec) is kind
    assert [*spec.state_shape, spec.shared_heads[1]] == sizes
    assert binding.layers == layers
    assert spec.conv_channels == next(iter(binding.mixers.values())).conv1d.weight.shape[0]


def test_generate_a_padded_batch(model, prompts):
    # Lengths 55, 24 and 3, the last one shorter than the convolution.
    assert_same(replayed(model, prompts[:3], tokens=16), generate(model, prompts[:3], tokens=16))


def test_more_tokens_onto_a_live_state(model, prompts):
    """By the model's own chunked function, from a state that replay has carried over two folds."""
    engine = ReplayEngine(model, max_sequences=1, capacity=3)
    text = prompts[0]
    (seq, _), taken = engine.prefill(text[:20]), 27
    for token in text[20:taken]:
        engine.step([seq], [token])
    logits = engine.extend(seq, text[taken:])
    with torch.no_grad():
        whole = model(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(logits, whole, rtol=0, atol=LOGITS_ATOL)
    token = int(logits.argmax())
    follow = int(engine.step([seq], [token])[0].argmax())
    assert [token, follow] == own_tokens(model, text, 2)


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "kimi_linear"])
def test_beams_fork_and_free(model, name, prompts):
    """In a layer that recurs and attends, without any attention, and with a latent cache."""
    options = {"num_beams": 3, "tokens": 8}
    own = generate(model, prompts[:2], **options)
    assert torch.equal(replayed(model, prompts[:2], **options).sequences, own.sequences)


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_reset_empties_layers_that_recur_and_attend(model, name, prompts):
    cache = ReplayCache.from_model(model)
    replayed(model, prompts[:1], cache, tokens=4)
    assert cache.get_seq_length() == len(prompts[0]) + 3
    cache.reset()
    assert cache.get_seq_length() == 0
    own = generate(model, prompts[1:2], tokens=4)
    assert_same(replayed(model, prompts[1:2], cache, tokens=4), own)


def test_a_latent_is_cached_and_not_what_it_expands_to(models, prompts):
    model = models["kimi_linear"]
    engine = ReplayEngine(model, max_sequences=1)
    sequence, _ = engine.prefill(prompts[0])
    ((latent, rotary),) = engine.preempt(sequence).attention
    config, length = model.config, len(prompts[0])
    assert latent.shape == (1, length, config.kv_lora_rank)
    assert rotary.shape == (1, length, config.qk_rope_head_dim)


def test_a_multimodal_model_is_served_as_its_text_model(prompts):
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokens = dict.fromkeys(("image_token_id", "video_token_id"), 254)
    config = Qwen3_5Config(
        text_config=MODELS["qwen3_5"].config().to_dict(),
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                       "out_hidden_size": 96},
        vision_start_token_id=252, vision_end_token_id=253, **tokens,
    )  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(config).eval()
    text = [[t % 128 for t in p] for p in prompts[:1]]
    assert_same(replayed(model, text, tokens=6), generate(model, text, tokens=6))
    engine = ReplayEngine(model, max_sequences=2)
    (seq, logits), chosen = engine.prefill(text[0]), []
    for _ in range(6):
        chosen.append(int(logits.argmax()))
        logits = engine.step([seq], chosen[-1:])[0]
    assert chosen == own_tokens(model, text[0], 6)


@pytest.fixture(scope="module")
def mixing(quiet):
    """Falcon-H1 with ``mamba_rms_norm``, which squeezes its only token away before it gates."""
    with pytest.MonkeyPatch.context() as patch:
        entry = MODELS["falcon_h1"]
        values = {**entry.values, "mamba_rms_norm": True}
        patch.setitem(MODELS, "falcon_h1", dataclasses.replace(entry, values=values))
        return build_model("falcon_h1")


def test_the_peer_mixes_rows_of_a_batch(mixing, prompts):
    """Once it does not, the refusal can go."""
    texts = [p[:24] for p in prompts[:2]]
    together = generate(mixing, texts, tokens=6).logits[-1][1]
    alone = generate(mixing, texts[1:], tokens=6).logits[-1][0]
    assert float((together - alone).abs().max()) > 0.1


def test_rows_that_would_mix_are_refused(mixing, prompts):
    assert unsupported_reason(mixing) is None
    message = "sequences: got 2 for falcon_h1 with mamba_rms_norm=True; allowed 1"
    with pytest.raises(UnsupportedError, match=message):
        ReplayEngine(mixing, max_sequences=2)
    with pytest.raises(UnsupportedError, match=message):
        ReplayCache.from_model(mixing, batch=2)
    cache = ReplayCache.from_model(mixing)
    with pytest.raises(UnsupportedError, match=message):
        replayed(mixing, prompts[:2], cache, tokens=2)
    assert not any(cache.pool.pages_in_use().values())


def test_one_row_cannot_mix_and_is_served(mixing, prompts):
    own = generate(mixing, prompts[:1], tokens=12)
    assert_same(replayed(mixing, prompts[:1], tokens=12), own)


def test_a_gate_below_where_the_peers_softplus_ends(models, prompts):
    """``log(1 + e^x)`` in float32 is 0 for x under -16.6: such a channel never forgets."""
    model = copy.deepcopy(models["kimi_linear"])
    with torch.no_grad():
        for mixer in describe(model).mixers.values():
            mixer.forget_gate.dt_bias[::3] = -40.0
    assert_same(replayed(model, prompts[:2], tokens=8), generate(model, prompts[:2], tokens=8))
