"""The presets against figures known from elsewhere, and against transformers' own classes."""

import dataclasses

import pytest
import torch

from replayinfer.spec.hf import LatentAttentionSpec, read_config
from replayinfer.spec.presets import PRESETS, find_preset

# heads, dim, state, shared heads; recurrent, attention and all layers; KV bytes a token, bfloat16
KNOWN = {
    "nemotron-3-nano-4b": ((96, 80, 128, 8), (21, 4, 42), 16 * 1024),
    "nemotron-3-nano-30b": ((64, 64, 128, 8), (23, 6, 52), 6 * 1024),
    "nemotron-3-super": ((128, 64, 128, 8), (40, 8, 88), 8 * 1024),
    "nemotron-3-ultra": ((256, 64, 128, 8), (48, 12, 108), 12 * 1024),
    "qwen3-next": ((32, 128, 128, 16), (36, 12, 48), 24 * 1024),
    "qwen3.5-4b": ((32, 128, 128, 16), (24, 8, 32), 32 * 1024),
    "qwen3.5-27b": ((48, 128, 128, 16), (48, 16, 64), 64 * 1024),
    "qwen3.5-122b": ((64, 128, 128, 16), (36, 12, 48), 24 * 1024),
    "kimi-linear": ((32, 128, 128, 32), (20, 7, 27), 8064),
}


def test_every_preset_is_here():
    assert set(PRESETS) == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_shapes(name):
    shape, (recurrent, attending, layers), kv = KNOWN[name]
    model = PRESETS[name].read()
    assert (*model.spec.state_shape, model.spec.shared_heads[1]) == shape
    assert (len(model.ssm), len(model.attention), model.layers) == (recurrent, attending, layers)
    assert not model.ssm.keys() & model.attention.keys()
    assert model.kv_bytes_per_token(torch.bfloat16) == kv
    assert model.dtype is torch.bfloat16
    assert model.spec.conv_width == 4
    assert PRESETS[name].source


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_reads_the_same(name, peer_of):
    preset = PRESETS[name]
    fields = {k: v for k, v in preset.config.items() if k != "model_type"}
    theirs = peer_of(preset.config["model_type"]).config(**fields)
    assert read_config(theirs) == preset.read()


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tensor_parallel_sizes(name, size):
    model = PRESETS[name].read()
    parts = [model.shard(rank, size) for rank in range(size)]
    assert all(part == parts[0] for part in parts)
    assert parts[0].spec.heads * size == model.spec.heads
    for whole, part in zip(model.attention.values(), parts[0].attention.values(), strict=True):
        assert part.heads * size == whole.heads
        if not isinstance(whole, LatentAttentionSpec):
            assert part.kv_heads == max(whole.kv_heads // size, 1)


def test_only_three_presets_assume_anything():
    assert {n for n, p in PRESETS.items() if p.assumed} == {
        "nemotron-3-nano-4b",
        "qwen3.5-4b",
        "kimi-linear",
    }
    for preset in PRESETS.values():
        for figure in preset.assumed:
            names, _, why = figure.partition(": ")
            assert why
            assert all(field in preset.config for field in names.split(", "))


def test_kimi_attends_last():
    """Unlike the class's own default, which ends on a recurrence and attends one layer later."""
    assert PRESETS["kimi-linear"].read().layer_map == "KKK*" * 6 + "KK*"


def test_finding():
    assert find_preset("nemotron-3-super") is PRESETS["nemotron-3-super"]
    assert find_preset("Qwen3.5-27B") is PRESETS["qwen3.5-27b"]
    assert find_preset("moonshotai/Kimi-Linear-48B-A3B-Instruct") is PRESETS["kimi-linear"]
    assert find_preset("nemotron-3") is None


def test_presets_cannot_be_written():
    preset = PRESETS["qwen3-next"]
    with pytest.raises(TypeError):
        preset.config["hidden_size"] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.name = "other"
