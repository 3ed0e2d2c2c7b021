"""Published models by name: the part of each config that decides the shapes of its layers.

`source` says where the figures were read, `assumed` which of them were not found there. Layers of
a multi-token prediction head are not part of any preset. Read in August to October 2026 in
"aiconfigurator": ai-dynamo/aiconfigurator, copies of the models' own config.json under
``model_configs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .hf import ModelLayers, read_config

__all__ = ["PRESETS", "Preset", "find_preset"]


@dataclass(frozen=True)
class Preset:
    """A published model.

    Attributes
    ----------
    name : str
    hub_id : str
        Of the checkpoint that `config` describes.
    config : mapping
        Fields of its config.json, spelled as there.
    source : str
        Where the figures come from.
    assumed : tuple of str
        Figures that the source does not give, each with the reason for its value.
    """

    name: str
    hub_id: str
    config: Mapping[str, Any]
    source: str
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))

    def read(self) -> ModelLayers:
        """The layers of the model."""
        return read_config(self.config)


def find_preset(name: str) -> Preset | None:
    """The preset of that name or hub id, whatever the case; None if there is none."""
    wanted = name.lower()
    return next((p for p in PRESETS.values() if wanted in (p.name, p.hub_id.lower())), None)


_COPY = "the model's config.json, as copied in aiconfigurator"

_NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 131072,
    "head_dim": 128,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
}

_QWEN: dict[str, Any] = {
    "dtype": "bfloat16",
    "head_dim": 256,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_PRESETS = (
    # Layers, widths and heads: mlc-ai/mlc-llm, tests/python/model/test_nemotron_h.py; 21 Mamba-2,
    # 4 attention and 17 MLP layers and 96 Mamba heads also in NVIDIA's announcement.
    Preset(
        "nemotron-3-nano-4b",
        "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
        _NEMOTRON
        | {
            "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
            "num_hidden_layers": 42,
            "hidden_size": 3136,
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
        "the model's config.json, as quoted in mlc-ai/mlc-llm, tests/python/model/"
        "test_nemotron_h.py",
        (
            "mamba_ssm_cache_dtype: float32, the class's default",
            "dtype: bfloat16, as the checkpoint is named",
        ),
    ),
    # aiconfigurator, nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json.
    Preset(
        "nemotron-3-nano-30b",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _NEMOTRON
        | {
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "num_hidden_layers": 52,
            "hidden_size": 2688,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
        },
        _COPY,
    ),
    # aiconfigurator, nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8_config.json.
    Preset(
        "nemotron-3-super",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
        _NEMOTRON
        | {
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
            "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            "num_hidden_layers": 88,
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
        },
        _COPY,
    ),
    # aiconfigurator, nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16_config.json, whose
    # layers_block_type is written as a pattern here.
    Preset(
        "nemotron-3-ultra",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        _NEMOTRON
        | {
            "hybrid_override_pattern": "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*"
            "EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "num_hidden_layers": 108,
            "hidden_size": 8192,
            "mamba_num_heads": 256,
            "mamba_head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 2,
        },
        _COPY,
    ),
    # aiconfigurator at 1b7cfb10, Qwen--Qwen3-Next-80B-A3B-Thinking_config.json.
    Preset(
        "qwen3-next",
        "Qwen/Qwen3-Next-80B-A3B-Thinking",
        _QWEN
        | {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "vocab_size": 151936,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
        },
        _COPY,
    ),
    # THUDM/slime, scripts/models/qwen3.5-4B.sh: layers, widths, attention, vocabulary.
    Preset(
        "qwen3.5-4b",
        "Qwen/Qwen3.5-4B",
        _QWEN
        | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "vocab_size": 248320,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "mamba_ssm_dtype": "float32",
        },
        "training arguments of the model in THUDM/slime, scripts/models/qwen3.5-4B.sh",
        (
            "linear_num_value_heads, linear_num_key_heads, linear_key_head_dim, "
            "linear_value_head_dim, linear_conv_kernel_dim: 32, 16, 128, 128, 4, the defaults of "
            "the class and the figures of halen214/st01, a checkpoint of the same sizes",
            "full_attention_interval, mamba_ssm_dtype, dtype: 4, float32, bfloat16, as there and "
            "in every other Qwen3.5",
        ),
    ),
    # aiconfigurator, Qwen--Qwen3.5-27B_config.json, the text_config.
    Preset(
        "qwen3.5-27b",
        "Qwen/Qwen3.5-27B",
        _QWEN
        | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "vocab_size": 248320,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "mamba_ssm_dtype": "float32",
        },
        _COPY,
    ),
    # aiconfigurator, Qwen--Qwen3.5-122B-A10B_config.json, the text_config.
    Preset(
        "qwen3.5-122b",
        "Qwen/Qwen3.5-122B-A10B",
        _QWEN
        | {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 48,
            "hidden_size": 3072,
            "vocab_size": 248320,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "mamba_ssm_dtype": "float32",
        },
        _COPY,
    ),
    # pytorch/torchtitan, torchtitan/experiments/kimi_linear/model/args.py, which keeps the
    # config's layer numbers, counted from 1; the same in the defaults of transformers 5.17.
    Preset(
        "kimi-linear",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        {
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "num_hidden_layers": 27,
            "hidden_size": 2304,
            "vocab_size": 163840,
            "hidden_act": "silu",
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 28) if i % 4 and i != 27],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        "the model's figures in pytorch/torchtitan, experiments/kimi_linear/model/args.py",
        ("dtype: bfloat16, as quoted with the model's config elsewhere",),
    ),
)

PRESETS: dict[str, Preset] = {p.name: p for p in _PRESETS}
"""The published models that `replayinfer describe` knows, by name."""
