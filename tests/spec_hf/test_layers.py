"""What `ModelLayers` says, adds up and splits, by hand-made numbers."""

import dataclasses
import json
import math

import pytest
import torch

from replayinfer.backends.torch.gates import step_sizes
from replayinfer.errors import InputError, UnsupportedError
from replayinfer.formats import get_format
from replayinfer.spec import GDNSpec, KDASpec, Mamba2Spec
from replayinfer.spec.hf import AttentionSpec, LatentAttentionSpec, ModelLayers, read_config

NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*-"}


def test_bytes():
    model = read_config(NEMOTRON)  # two layers of 128 heads x 64 x 128, 8 groups
    assert model.checkpoint_bytes(get_format("fp32_split")) == 2 * 128 * 64 * 128 * 4
    assert model.checkpoint_bytes(get_format("bf16")) == 2 * 128 * 64 * 128 * 2
    row = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    assert model.row_bytes(torch.bfloat16, get_format("fp32")) == 2 * row
    assert model.kv_bytes_per_token(torch.bfloat16) == 2 * 8 * 128 * 2
    kimi = read_config({"model_type": "kimi_linear"})
    assert kimi.kv_bytes_per_token(torch.bfloat16) == len(kimi.attention) * (512 + 64) * 2


def test_layer_map():
    assert read_config(NEMOTRON).layer_map == "M-M*-"
    assert read_config({"model_type": "falcon_h1", "num_hidden_layers": 3}).layer_map == "+++"
    zamba = {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2}
    assert read_config({"model_type": "zamba2"} | zamba).layer_map == "M+"
    assert read_config({"model_type": "qwen3_next", "num_hidden_layers": 5}).layer_map == "GGG*G"
    assert read_config({"model_type": "kimi_linear", "num_hidden_layers": 5}).layer_map == "KKKK*"
    olmo = {"model_type": "olmo_hybrid", "num_hidden_layers": 2}
    assert read_config(olmo).layer_map == "G*"


def test_shards():
    model = read_config(NEMOTRON).shard(3, 16)
    spec, attention = model.spec, model.attention[3]
    assert (spec.heads, spec.groups) == (8, 1)  # fewer groups than ranks: replicated
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (2, 1, 128)
    assert read_config(NEMOTRON).shard(1, 4).attention[3].kv_heads == 2
    kimi = read_config({"model_type": "kimi_linear"})
    part = kimi.shard(0, 8)
    assert part.spec.heads == part.spec.key_heads == 4
    assert part.attention[4].heads == 4
    # Every rank keeps the whole latent.
    assert part.kv_bytes_per_token(torch.bfloat16) == kimi.kv_bytes_per_token(torch.bfloat16)
    assert read_config(NEMOTRON).shard(0, 1) == read_config(NEMOTRON)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 3, "size: got 3; allowed a divisor of heads=128"),
        (0, 64, "size: got 64; allowed a divisor of the 32 attention heads"),
        (4, 4, r"rank: got 4; allowed 0\.\.3"),
        (0, 0, "size: got 0; allowed an integer >= 1"),
    ],
)
def test_shards_that_do_not_exist(rank, size, message):
    with pytest.raises(InputError, match=message):
        read_config(NEMOTRON).shard(rank, size)


def test_attention_alone_refuses_bad_shards():
    latent = LatentAttentionSpec(32, kv_lora_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    for spec in (AttentionSpec(32, 8, 128), latent):
        with pytest.raises(InputError, match="rank: got 2"):
            spec.shard(2, 2)
        with pytest.raises(InputError, match="size: got 5"):
            spec.shard(0, 5)
    with pytest.raises(
        InputError, match="size: got 4; allowed a divisor or a multiple of kv_heads"
    ):
        AttentionSpec(24, 6, 64).shard(0, 4)


def test_mappings_cannot_be_written():
    model = read_config(NEMOTRON)
    with pytest.raises(TypeError):
        model.ssm[1] = model.spec


def test_one_specification():
    model = read_config(NEMOTRON)
    other = dataclasses.replace(model.spec, dim=32)
    with pytest.raises(UnsupportedError, match="got recurrent layers of 2 shapes"):
        _ = dataclasses.replace(model, ssm={0: model.spec, 2: other}).spec
    attending = {"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [0, 1]}
    with pytest.raises(UnsupportedError, match="layers: got 2 without a recurrence"):
        _ = read_config(attending).spec


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, (0.0, math.inf)),
        ([0.0, 1e308], (0.0, math.inf)),  # as Nemotron 3 Ultra has it
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),  # as transformers 5 saves it
        ([0.01, 0.5], (0.01, 0.5)),
        ((0, 2), (0.0, 2.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["nemotron_h", "mamba2", "bamba"])
def test_limits_of_dt(model_type, limit, expected):
    spec = read_config({"model_type": model_type, "time_step_limit": limit}).spec
    assert spec.dt_limit == expected
    steps = step_sizes(spec, torch.tensor([[[-9.0, 9.0]]]), torch.zeros(2))  # float32 can hold it
    assert steps.isfinite().all()
    assert steps.min() >= expected[0]
    assert steps.max() <= expected[1]


@pytest.mark.parametrize("name", ["text_config", "llm_config"])
def test_nested_text_models(name):
    outer = {"model_type": "some_vl", "torch_dtype": "float16", name: NEMOTRON}
    assert read_config(outer) == dataclasses.replace(read_config(NEMOTRON), dtype=torch.float16)
    inner = NEMOTRON | {"torch_dtype": "torch.bfloat16"}
    assert read_config(outer | {name: inner}).dtype is torch.bfloat16


def test_kimi_gates():
    assert read_config({"model_type": "kimi_linear"}).spec.gate == "softplus"
    bounded = {"linear_attn_config": {"gate_lower_bound": -4.0}}
    spec = read_config({"model_type": "kimi_linear"} | bounded).spec
    assert isinstance(spec, KDASpec)
    assert (spec.gate, spec.lower_bound) == ("bounded", -4.0)


def test_notes():
    def notes(model_type, **fields):
        return read_config({"model_type": model_type, **fields}).notes

    assert notes("qwen3_next") == notes("mamba2") == notes("kimi_linear") == ()
    assert "time_step_min=0.001 in its prefill" in notes("zamba2")[0]
    assert notes("nemotron_h", time_step_min=0.0) == ()
    assert "time_step_min=0.01 in its prefill" in notes("nemotron_h", mamba_dt_min=0.01)[0]
    assert "time_step_limit=(0.01, 0.5)" in notes("bamba", time_step_limit=[0.01, 0.5])[0]
    assert notes("falcon_h1", ssm_multipliers=[1.0] * 5, ssm_in_multiplier=1.0) == ()
    assert notes("falcon_h1", ssm_multipliers=(1, 1, 1, 1, 1)) == ()
    assert "scaled before" in notes("falcon_h1", ssm_multipliers=[1.0, 1.0, 0.5, 1.0, 1.0])[0]
    assert "scaled before" in notes("falcon_h1", ssm_in_multiplier=0.5)[0]
    window = {"sliding_window": 4096}
    assert "sliding_window=4096: not used" in notes("qwen3_next", **window)[0]
    assert notes("qwen3_next", **window, use_sliding_window=False) == ()
    assert notes("qwen3_next", sliding_window=0) == ()


def test_sizes_worked_out_by_hand():
    pure = read_config({"model_type": "mamba2"})
    assert pure.spec == Mamba2Spec(heads=128, dim=64, state=128, groups=8)
    assert pure.attention == {}
    bamba = read_config({"model_type": "bamba", "mamba_d_state": 128, "attn_layer_indices": [9]})
    assert bamba.spec == Mamba2Spec(heads=128, dim=64, state=128, groups=1)
    assert bamba.attention == {9: AttentionSpec(32, 8, 128)}
    zamba = read_config(
        {"model_type": "zamba2", "hidden_size": 3584, "n_mamba_heads": 112, "mamba_ngroups": 2}
    )
    assert zamba.spec == Mamba2Spec(heads=112, dim=64, state=64, groups=2)
    assert zamba.attention[6] == AttentionSpec(32, 32, 224)
    assert 6 in zamba.ssm
    olmo = read_config({"model_type": "olmo_hybrid"})
    assert olmo.spec == GDNSpec(heads=30, key_heads=30, dim=192, state=96, beta="sigmoid2")
    assert olmo.attention[3] == AttentionSpec(30, 30, 128)


def test_a_config_that_went_through_json(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(NEMOTRON | {"time_step_limit": [0.0, math.inf]}))
    model = read_config(file)
    assert isinstance(model, ModelLayers)
    assert model == read_config(NEMOTRON)
