"""Parameters of a decode step against the matrices of transformers' own models."""

from __future__ import annotations

import json

import pytest

from replayinfer import InputError, read_config
from replayinfer.cost.weights import DecodeWeights, decode_weights, raw_config
from replayinfer.spec.hf.read import MODEL_TYPES
from replayinfer.spec.presets import PRESETS

from ..spec_hf.conftest import SMALL, Peer

LEFT_OUT = ("embed", "conv1d", "A_log")


@pytest.mark.parametrize("model_type", SMALL)
def test_all_matrices_are_counted(model_type):
    """Exactly, of the ten families in small; what is shared counts where it is applied."""
    peer = Peer(model_type)
    config = peer.config(**peer.small)
    sizes = {
        name: weight.numel()
        for name, weight in peer.build(config).named_parameters()
        if weight.ndim >= 2 and not any(part in name for part in LEFT_OUT)
    }
    values = json.loads(json.dumps(config.to_dict()))
    model = read_config(values)
    found = decode_weights(raw_config(values), model)
    tied = not any(name.startswith("lm_head") for name in sizes)
    want = sum(sizes.values()) + (model.vocab_size * model.hidden_size if tied else 0)
    if model_type == "zamba2":  # one shared block, applied twice, with an adapter for each
        shared = "shared_transformer"
        want += sum(n for k, n in sizes.items() if shared in k and "adapter" not in k)
    assert found.total == want
    mine = ("mamba.", "mixer.in", "mixer.out", "linear_attn")
    if model_type != "kimi_linear":
        assert found.ssm == sum(n for k, n in sizes.items() if any(m in k for m in mine))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("nemotron-3-nano-4b", 4, 4),
        ("nemotron-3-nano-30b", 30, 3),
        ("nemotron-3-super", 120, 12),
        ("nemotron-3-ultra", 550, 55),
        ("qwen3-next", 80, 3),
        ("qwen3.5-27b", 27, 27),
        ("qwen3.5-122b", 122, 10),
        ("kimi-linear", 48, 3),
    ],
)
def test_published_models_have_the_sizes_in_their_names(name, total, active):
    """Within what a name rounds, and what it counts or leaves out: embeddings, a vision tower."""
    preset = PRESETS[name]
    found = decode_weights(raw_config(preset), preset.read())
    assert found.total == pytest.approx(total * 1e9, rel=0.13)
    assert found.active == pytest.approx(active * 1e9, rel=0.25)


def test_every_model_that_is_read_has_a_rule():
    from replayinfer.cost.weights import _FEED_FORWARDS

    assert set(_FEED_FORWARDS) == set(MODEL_TYPES)


def test_experts_that_a_batch_reaches():
    weights = DecodeWeights(1, 2, 3, 4, 100, 5, experts=8, experts_per_token=2)
    assert weights.experts_read(1) == pytest.approx(2)
    assert weights.experts_read(2) == pytest.approx(2 + 2 * (1 - 2 / 8))
    assert weights.experts_read(10**4) == pytest.approx(8)
    assert weights.read(1) == weights.active == 10 + 5 * 200
    assert weights.read(10**4) == weights.total == 10 + 5 * 800
    assert DecodeWeights(1, 2, 3, 4).read(7) == 10


def test_missing_fields_are_named_together():
    preset = PRESETS["qwen3.5-122b"]
    with pytest.raises(
        InputError,
        match=r"^config: got none of moe_intermediate_size, num_experts, num_experts_per_tok, "
        r"shared_expert_intermediate_size; allowed",
    ):
        decode_weights(preset.config, preset.read())


def test_a_multimodal_config_and_a_folder(tmp_path):
    inner = {"model_type": "qwen3_5_text", "intermediate_size": 7}
    outer = {"model_type": "qwen3_5", "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    for given in (outer, tmp_path, str(tmp_path / "config.json")):
        assert raw_config(given) == inner
