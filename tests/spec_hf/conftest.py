"""The ten model families in small, as transformers builds them."""

from __future__ import annotations

import importlib

import pytest


def given(**fields):
    return fields


# model_type -> (module, configuration class, model class, a small configuration with no default).
SMALL = {
    "nemotron_h": (
        "nemotron_h", "NemotronHConfig", "NemotronHForCausalLM",
        given(vocab_size=64, hidden_size=24, layers_block_type=[
                 "linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
             num_attention_heads=4, num_key_value_heads=2, head_dim=10, intermediate_size=16,
             ssm_state_size=12, mamba_num_heads=6, mamba_head_dim=5, n_groups=3, conv_kernel=3,
             use_conv_bias=False, time_step_limit=(0.0, 2.0), n_routed_experts=2,
             moe_intermediate_size=8, moe_shared_expert_intermediate_size=8,
             num_experts_per_tok=1, chunk_size=4),
    ),
    "bamba": (
        "bamba", "BambaConfig", "BambaForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=4, attn_layer_indices=[1, 3],
             num_attention_heads=6, num_key_value_heads=3, intermediate_size=16, mamba_n_heads=8,
             mamba_n_groups=2, mamba_d_state=10, mamba_d_conv=3, mamba_expand=3,
             mamba_conv_bias=False, time_step_limit=(0.01, 0.5), mamba_chunk_size=4),
    ),
    "mamba2": (
        "mamba2", "Mamba2Config", "Mamba2ForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_heads=6, head_dim=12,
             expand=3, state_size=10, n_groups=2, conv_kernel=5, use_conv_bias=False,
             time_step_limit=(0.01, 0.5), chunk_size=4),
    ),
    "falcon_h1": (
        "falcon_h1", "FalconH1Config", "FalconH1ForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=10, intermediate_size=16, mamba_d_ssm=30,
             mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=8, mamba_d_conv=3,
             mamba_conv_bias=False, mamba_rms_norm=True, time_step_limit=(0.01, 0.5),
             mamba_chunk_size=4),
    ),
    "granitemoehybrid": (
        "granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, layer_types=[
                 "linear_attention", "full_attention", "linear_attention"],
             num_local_experts=2, num_experts_per_tok=1, intermediate_size=16,
             shared_intermediate_size=16, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=10,
             mamba_d_conv=3, mamba_expand=3, mamba_conv_bias=False, time_step_limit=(0.01, 0.5),
             mamba_chunk_size=4),
    ),
    "zamba2": (
        "zamba2", "Zamba2Config", "Zamba2ForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=4, layers_block_type=[
                 "linear_attention", "hybrid", "linear_attention", "hybrid"],
             mamba_d_state=10, mamba_d_conv=3, mamba_expand=3, mamba_ngroups=2, n_mamba_heads=6,
             num_attention_heads=4, num_key_value_heads=2, intermediate_size=16, num_mem_blocks=1,
             adapter_rank=2, chunk_size=4),
    ),
    "qwen3_next": (
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=12, layer_types=[
                 "linear_attention", "full_attention", "linear_attention"],
             linear_conv_kernel_dim=3, linear_key_head_dim=6, linear_value_head_dim=10,
             linear_num_key_heads=2, linear_num_value_heads=6, num_experts=2,
             num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
             intermediate_size=16),
    ),
    "qwen3_5_text": (
        "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=12, layer_types=[
                 "linear_attention", "full_attention", "linear_attention"],
             linear_conv_kernel_dim=3, linear_key_head_dim=6, linear_value_head_dim=10,
             linear_num_key_heads=2, linear_num_value_heads=6, intermediate_size=16),
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=12, layer_types=[
                 "linear_attention", "full_attention", "linear_attention"],
             linear_conv_kernel_dim=3, linear_key_head_dim=6, linear_value_head_dim=10,
             linear_num_key_heads=2, linear_num_value_heads=6, num_experts=2,
             num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    ),
    "olmo_hybrid": (
        "olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, layer_types=[
                 "linear_attention", "full_attention", "linear_attention"],
             linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=10,
             linear_value_head_dim=6, linear_conv_kernel_dim=3, linear_allow_neg_eigval=False,
             intermediate_size=16, pad_token_id=0, eos_token_id=1),
    ),
    "kimi_linear": (
        "kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM",
        given(vocab_size=64, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8,
             layer_types=["linear_attention", "full_attention", "linear_attention"],
             linear_head_dim=7, linear_num_heads=3, linear_conv_kernel_dim=3, num_local_experts=2,
             num_experts_per_tok=1, moe_intermediate_size=8, intermediate_size=16,
             pad_token_id=0, bos_token_id=1, eos_token_id=2),
    ),
}  # fmt: skip


class Peer:
    """One family of the installed transformers."""

    def __init__(self, model_type: str) -> None:
        pytest.importorskip("transformers", reason="transformers is not installed")
        self.model_type = model_type
        folder, config, model, self.small = SMALL[model_type]
        home = f"transformers.models.{folder}"
        self.config_class = getattr(
            importlib.import_module(f"{home}.configuration_{folder}"), config
        )
        self._model = (f"{home}.modeling_{folder}", model)

    def config(self, **fields):
        return self.config_class(**fields)

    def build(self, config):
        module, name = self._model
        return getattr(importlib.import_module(module), name)(config).eval()


@pytest.fixture(params=SMALL)
def peer(request):
    return Peer(request.param)


@pytest.fixture
def peer_of():
    return Peer
