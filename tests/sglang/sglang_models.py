"""Configurations of tiny hybrid models; their weights are seeded by the shim."""

from __future__ import annotations

import json
from pathlib import Path

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

# Three value heads to a key head: SGLang takes the projections apart by slices.
QWEN3_NEXT = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "rope_type": "default",
    },
}

# Two: by a function, which may hand them on as they are.
QWEN3_NEXT_PAIRS = QWEN3_NEXT | {"linear_num_value_heads": 4}

# The projections of all heads together.
QWEN3_5 = QWEN3_NEXT_PAIRS | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
}

NEMOTRON_H = _COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "M-M*M-",
    "attention_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}

LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


def write(folder: Path) -> dict[str, str]:
    """Folders with a config each."""
    paths = {}
    for name, config in (
        ("qwen3_next", QWEN3_NEXT),
        ("qwen3_next_pairs", QWEN3_NEXT_PAIRS),
        ("qwen3_5", QWEN3_5),
        ("nemotron_h", NEMOTRON_H),
        ("llama", LLAMA),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        paths[name] = str(folder / name)
    return paths
