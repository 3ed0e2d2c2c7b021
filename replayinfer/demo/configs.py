"""The demo's models: small configs, one table entry a model, each with what its kind can do.

Head sizes, group counts and layer patterns differ on purpose, so that nothing is served by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DEFAULT_MODELS", "MODELS", "VOCABULARY", "DemoModel"]

VOCABULARY = 256  # a token is a byte

_HIDDEN = 96
_RECURS, _ATTENDS = "linear_attention", "full_attention"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_ATTENTION: dict[str, Any] = {
    "max_position_embeddings": 1 << 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * _HIDDEN,
}
# Every expert is on for every token. With fewer, a router that is nearly tied would turn any
# difference, however small, into one of the size of a logit, and no bound on it could be stated.
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": _HIDDEN}
_MAMBA: dict[str, Any] = {  # as Bamba, Falcon-H1 and GraniteMoeHybrid spell it
    "mamba_n_heads": 8,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
}
_GDN: dict[str, Any] = {
    "layer_types": [_RECURS] * 3 + [_ATTENDS],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
}


@dataclass(frozen=True)
class DemoModel:
    """One of the demo's models.

    Attributes
    ----------
    name : str
        What the command line calls it.
    recurrence : str
        Its kind of recurrent layer.
    config_class : str
        Of transformers.
    values : mapping
        Fields of its config.
    """

    name: str
    recurrence: str
    config_class: str
    values: Mapping[str, Any] = field(repr=False)

    def config(self) -> Any:
        """A new config."""
        import transformers

        return getattr(transformers, self.config_class)(**_COMMON, **self.values)


_NEMOTRON_H = DemoModel(
    "nemotron_h",
    "Mamba-2",
    "NemotronHConfig",
    _ATTENTION
    | _EXPERTS
    | {
        "layers_block_type": [_RECURS, "mlp", _RECURS, _ATTENDS, _RECURS, "moe", _RECURS],
        "head_dim": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": 64,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": _HIDDEN,
    },
)
_QWEN3_NEXT = DemoModel(
    "qwen3_next",
    "Gated DeltaNet",
    "Qwen3NextConfig",
    _ATTENTION
    | _EXPERTS
    | _GDN
    | {
        "head_dim": 24,
        "decoder_sparse_step": 2,
        "num_experts": 4,
        "shared_expert_intermediate_size": _HIDDEN,
    },
)
_KIMI_LINEAR = DemoModel(
    "kimi_linear",
    "Kimi Delta Attention",
    "KimiLinearConfig",
    _ATTENTION
    | _EXPERTS
    | {
        "layer_types": [_RECURS, _RECURS, _ATTENDS, _RECURS],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "num_local_experts": 4,
    },
)
_BAMBA = DemoModel(
    "bamba",
    "Mamba-2",
    "BambaConfig",
    _ATTENTION | _MAMBA | {"num_hidden_layers": 5, "attn_layer_indices": [2]},
)
_MAMBA2 = DemoModel(
    "mamba2",
    "Mamba-2",
    "Mamba2Config",
    {
        "num_hidden_layers": 4,
        "num_heads": 12,
        "head_dim": 16,
        "state_size": 32,
        "n_groups": 3,
        "chunk_size": 64,
    },
)
# With mamba_rms_norm, transformers mixes the rows of a batch when it decodes.
_FALCON_H1 = DemoModel(
    "falcon_h1",
    "Mamba-2",
    "FalconH1Config",
    _ATTENTION
    | _MAMBA
    | {
        "num_hidden_layers": 4,
        "mamba_d_ssm": 256,
        "mamba_rms_norm": False,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [1.2, 0.9, 0.8, 1.1, 0.7],
        "ssm_out_multiplier": 2.0,
        "attention_out_multiplier": 0.75,
    },
)
_GRANITEMOEHYBRID = DemoModel(
    "granitemoehybrid",
    "Mamba-2",
    "GraniteMoeHybridConfig",
    _ATTENTION
    | _MAMBA
    | {
        "layer_types": [_RECURS, _ATTENDS, _RECURS, _RECURS],
        "num_hidden_layers": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "intermediate_size": _HIDDEN,
        "shared_intermediate_size": _HIDDEN,
        "attention_multiplier": 24**-0.5,
    },
)
_ZAMBA2 = DemoModel(
    "zamba2",
    "Mamba-2",
    "Zamba2Config",
    _ATTENTION
    | {
        "layers_block_type": [_RECURS, "hybrid", _RECURS, "hybrid", _RECURS],
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "n_mamba_heads": 8,
        "mamba_d_state": 64,
        "mamba_ngroups": 2,
        "chunk_size": 64,
    },
)
_QWEN3_5 = DemoModel(
    "qwen3_5", "Gated DeltaNet", "Qwen3_5TextConfig", _ATTENTION | _GDN | {"head_dim": 24}
)
_QWEN3_5_MOE = DemoModel(
    "qwen3_5_moe",
    "Gated DeltaNet",
    "Qwen3_5MoeTextConfig",
    _ATTENTION
    | _EXPERTS
    | _GDN
    | {"head_dim": 24, "num_experts": 4, "shared_expert_intermediate_size": _HIDDEN},
)
_OLMO_HYBRID = DemoModel(
    "olmo_hybrid",
    "Gated DeltaNet, beta in (0, 2)",
    "OlmoHybridConfig",
    _ATTENTION | _GDN | {"linear_allow_neg_eigval": True},
)

MODELS: dict[str, DemoModel] = {
    m.name: m
    for m in (
        _NEMOTRON_H, _QWEN3_NEXT, _KIMI_LINEAR, _BAMBA, _MAMBA2, _FALCON_H1, _GRANITEMOEHYBRID,
        _ZAMBA2, _QWEN3_5, _QWEN3_5_MOE, _OLMO_HYBRID,
    )
}  # fmt: skip
"""Every model that the demo can build, by name."""

DEFAULT_MODELS = (_NEMOTRON_H.name, _QWEN3_NEXT.name)
"""Those that it runs unless told otherwise."""
