"""What a config may not say, and the field that the refusal names."""

import json

import pytest

from replayinfer.errors import InputError, UnsupportedError
from replayinfer.spec.hf import MODEL_TYPES, read_config


def config(model_type, **fields):
    return {"model_type": model_type, **fields}


KIMI_LISTS = {"kda_layers": [1, 2], "full_attn_layers": [3]}

WRONG = [
    (config("nemotron_h", mamba_num_heads=0), "mamba_num_heads: got 0; allowed an integer >= 1"),
    (config("nemotron_h", mamba_num_heads=True), "mamba_num_heads: got True"),
    (config("nemotron_h", mamba_num_heads=96.0), "mamba_num_heads: got 96.0"),
    (config("nemotron_h", ssm_state_size=None), "ssm_state_size: got None"),
    (config("nemotron_h", n_groups=3), "n_groups: got 3; allowed a divisor of mamba_num_heads=128"),
    (config("nemotron_h", conv_kernel=1), "conv_kernel: got 1; allowed an integer >= 2"),
    (config("nemotron_h", mamba_d_conv=1), "mamba_d_conv: got 1; allowed an integer >= 2"),
    (config("nemotron_h", n_groups=8, mamba_n_groups=4), "mamba_n_groups: got 4 beside n_groups=8"),
    (config("nemotron_h", use_conv_bias="yes"), "use_conv_bias: got 'yes'; allowed true or false"),
    (config("nemotron_h", num_key_value_heads=5), "num_key_value_heads: got 5; allowed a divisor"),
    (config("nemotron_h", head_dim=128, attention_head_dim=64), "attention_head_dim: got 64"),
    (config("nemotron_h", hybrid_override_pattern="M-X"), "hybrid_override_pattern: got 'X'"),
    (config("nemotron_h", hybrid_override_pattern=["M"]), "hybrid_override_pattern: got ['M']"),
    (
        config("nemotron_h", hybrid_override_pattern="M-M*", layers_block_type=["mamba"]),
        "hybrid_override_pattern: got 4 layers that differ from the 1 of layers_block_type",
    ),
    (
        config("nemotron_h", hybrid_override_pattern="M-M*", num_hidden_layers=52),
        "num_hidden_layers: got 52 beside a list of 4 layers",
    ),
    (config("nemotron_h", num_hidden_layers=52), "num_hidden_layers: got 52 beside a list of 4"),
    (
        config("nemotron_h", layers_block_type=["mamba", "hybrid"]),
        "layers_block_type: got 'hybrid' for layer 1; allowed linear_attention, mamba",
    ),
    (config("nemotron_h", layers_block_type="MM"), "layers_block_type: got 'MM'; allowed a list"),
    (
        config("nemotron_h", layers_block_type=[]),
        "layers_block_type: got []; allowed a list of one",
    ),
    (config("nemotron_h", hybrid_override_pattern=""), "hybrid_override_pattern: got ''; allowed"),
    (config("nemotron_h", time_step_limit=[1e308, 1e309]), "time_step_limit: got [1e+308, inf]"),
    (config("mamba2", expand=10**400), "expand: got 1000"),
    (config("nemotron_h", time_step_limit=[1.0, 0.5]), "time_step_limit: got [1.0, 0.5]"),
    (
        config("nemotron_h", time_step_limit=[0.0]),
        "time_step_limit: got [0.0]; allowed [low, high]",
    ),
    (config("nemotron_h", time_step_limit=0.1), "time_step_limit: got 0.1"),
    (config("nemotron_h", mamba_ssm_cache_dtype="float17"), "mamba_ssm_cache_dtype: got 'float17'"),
    (config("nemotron_h", dtype="int8"), "dtype: got 'int8'; allowed the name of a floating dtype"),
    (config("nemotron_h", dtype="bfloat16", torch_dtype="float16"), "torch_dtype: got 'float16'"),
    (config("bamba", attn_layer_indices=[3, 40]), "attn_layer_indices: got 40; allowed 0..31"),
    (config("bamba", attn_layer_indices=[-1]), "attn_layer_indices: got [-1]"),
    (
        config("bamba", mamba_d_head=60),
        "mamba_n_heads: got 128 with mamba_d_head=60, 7680 channels",
    ),
    (config("bamba", mamba_d_head="full"), "mamba_d_head: got 'full'"),
    (config("bamba", mamba_n_heads=100), "mamba_n_heads: got 100 with mamba_d_head=81"),
    (
        config("bamba", num_attention_heads=24),
        "num_attention_heads: got 24; allowed a divisor of hid",
    ),
    (config("mamba2", num_heads=64), "num_heads: got 64 with head_dim=64, 4096 channels"),
    (config("mamba2", expand=0), "expand: got 0; allowed a number > 0"),
    (config("falcon_h1", mamba_d_ssm=1000), "mamba_n_heads: got 128 with mamba_d_head=7"),
    (
        config("granitemoehybrid", layer_types=["moe"], num_hidden_layers=1),
        "layer_types: got 'moe' for layer 0; allowed linear_attention, mamba, full_attention",
    ),
    (config("zamba2", num_hidden_layers=38), "num_hidden_layers: got 38 beside a list of 54"),
    (
        config("zamba2", mamba_headdim=64),
        "n_mamba_heads: got 8 with mamba_headdim=64, 512 channels",
    ),
    (config("qwen3_next", full_attention_interval=0), "full_attention_interval: got 0"),
    (
        config("qwen3_next", layer_types=["linear_attention", "sliding_attention"]),
        "layer_types: got 'sliding_attention' for layer 1",
    ),
    (
        config("qwen3_5_text", linear_num_key_heads=12),
        "linear_num_key_heads: got 12; allowed a divisor of linear_num_value_heads=32",
    ),
    (
        config("olmo_hybrid", layer_types=["linear_attention"] * 32),
        "layer_types: got 32 layers of one type",
    ),
    (
        config("kimi_linear", num_hidden_layers=3, linear_attn_config={"kda_layers": [0, 1]}),
        "linear_attn_config.kda_layers: got 2 layers beside 0 full_attn_layers; allowed each",
    ),
    (
        config("kimi_linear", num_hidden_layers=4, linear_attn_config=KIMI_LISTS),
        "linear_attn_config.kda_layers: got 2 layers beside 1 full_attn_layers; allowed each",
    ),
    (
        config(
            "kimi_linear",
            num_hidden_layers=3,
            linear_attn_config=KIMI_LISTS,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
        ),
        "layer_types: got other layers than linear_attn_config.kda_layers, which counts from 1",
    ),
    (
        config("kimi_linear", linear_num_heads=32, linear_attn_config={"num_heads": 16}),
        "linear_num_heads: got 32 beside linear_attn_config.num_heads=16",
    ),
    (
        config("kimi_linear", linear_attn_config={"short_conv_kernel_size": 1}),
        "linear_attn_config.short_conv_kernel_size: got 1; allowed an integer >= 2",
    ),
    (
        config("kimi_linear", linear_attn_config={"gate_lower_bound": 5.0}),
        "linear_attn_config.gate_lower_bound: got 5.0; allowed a number < 0",
    ),
    (
        config("kimi_linear", linear_attn_config=[1]),
        "linear_attn_config: got [1]; allowed an object",
    ),
    ({}, "model_type: got None; allowed nemotron_h"),
    ({"d_model": 2560, "ssm_cfg": {"layer": "Mamba2"}}, "model_type: got None; allowed nemotron_h"),
    (7, "config: got int; allowed a mapping, a path or a configuration object"),
    ({"model_type": "qwen3_5", "text_config": 7}, "text_config: got int"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[m[:50] for _, m in WRONG])
def test_wrong_fields(values, message):
    with pytest.raises(InputError) as caught:
        read_config(values)
    assert str(caught.value).startswith(message)
    assert str(caught.value).count("; ") == 2


@pytest.mark.parametrize("model_type", ["llama", "jamba", "mamba", "kimi_k3"])
def test_unknown_model_types(model_type):
    with pytest.raises(
        UnsupportedError, match=f"model_type: got '{model_type}'; allowed nemotron_h"
    ):
        read_config({"model_type": model_type})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_another_activation_after_the_convolution(model_type):
    field = "mamba_hidden_act" if model_type == "nemotron_h" else "hidden_act"
    if model_type == "zamba2":  # there the field is the MLP's
        assert read_config({"model_type": model_type, field: "gelu"}).spec.conv_activation == "silu"
        return
    with pytest.raises(UnsupportedError, match=f"{field}: got 'gelu'; allowed 'silu'"):
        read_config({"model_type": model_type, field: "gelu"})


def test_paths(tmp_path):
    with pytest.raises(
        InputError, match=r"config: got .*missing'; allowed a config.json or a folder"
    ):
        read_config(tmp_path / "missing")
    with pytest.raises(InputError, match=r"config: got .*; allowed a config.json or a folder"):
        read_config(tmp_path)  # a folder without one
    file = tmp_path / "config.json"
    for text, message in (("{", "which cannot be read"), ("[1]", "with a list in it")):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_config(tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="which cannot be read"):
        read_config(str(file))
    file.write_text(json.dumps({"model_type": "mamba2"}))
    assert read_config(str(tmp_path)) == read_config(file) == read_config({"model_type": "mamba2"})
