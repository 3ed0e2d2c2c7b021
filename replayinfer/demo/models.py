"""Small seeded hybrid models whose tokens depend on the recurrent state; nothing is downloaded.

A freshly initialised model is no test of a state: its projections are so small that logits hardly
depend on what the recurrent layers remember, and a state off by 1% changes no token in hundreds.
Here every projection keeps the variance of what it projects, decays are slow, the skip past the
state is weak, and embeddings are small beside what the recurrent layers add. A state off by 1% then
moves logits by about 5% of their standard deviation and turns tokens in most prompts, while the
rounding differences of float32 stay four orders below (`tests/demo` holds both).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replayinfer import InputError

__all__ = ["MODELS", "VOCABULARY", "DemoModel", "build_model", "scale_weights"]

VOCABULARY = 256  # a token is a byte

_HIDDEN = 96


@dataclass(frozen=True)
class DemoModel:
    """One of the demo's models: its name, its kind of recurrent layer, and its config."""

    name: str
    recurrence: str
    config: Callable[[], Any]


def _nemotron_h() -> Any:
    from transformers import NemotronHConfig

    return NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        layers_block_type=[
            "linear_attention", "mlp", "linear_attention", "full_attention",
            "linear_attention", "moe", "linear_attention",
        ],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=2 * _HIDDEN,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=64,
        n_groups=2,
        chunk_size=64,
        n_routed_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=_HIDDEN,
        moe_shared_expert_intermediate_size=_HIDDEN,
        **_COMMON,
    )  # fmt: skip


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=2 * _HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=32,
        decoder_sparse_step=2,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=_HIDDEN,
        shared_expert_intermediate_size=_HIDDEN,
        **_COMMON,
    )


# Every expert is on for every token. With fewer, a router that is nearly tied would turn any
# difference, however small, into one of the size of a logit, and no bound on it could be stated.
_COMMON: dict[str, Any] = {
    "max_position_embeddings": 1 << 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

MODELS: dict[str, DemoModel] = {
    m.name: m
    for m in (
        DemoModel("nemotron_h", "Mamba-2", _nemotron_h),
        DemoModel("qwen3_next", "Gated DeltaNet", _qwen3_next),
    )
}
"""The demo's models by ``config.model_type``."""


def build_model(name: str, seed: int = 0) -> Any:
    """A seeded float32 model, in evaluation mode; the global random state is left as it was.

    Parameters
    ----------
    name : str
        One of `MODELS`.
    seed : int
        The same seed gives the same weights.
    """
    if name not in MODELS:
        raise InputError(f"model: got {name!r}; allowed {', '.join(MODELS)}; pick one")
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(MODELS[name].config(), dtype=torch.float32)
    scale_weights(model, torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def scale_weights(model: Any, rng: torch.Generator) -> None:
    """Draw all weights again, so that logits depend on the recurrent states (see above)."""
    for name, weight in model.named_parameters():
        kind = name.rsplit(".", 1)[-1]
        if "norm" in name:
            continue
        if kind == "A_log":  # decay rates: memories of some ten to some hundred tokens
            weight.copy_(torch.log(_log_uniform(weight, 3e-3, 1e-1, rng)))
        elif kind == "dt_bias":  # the inverse of softplus of the step size
            step = _log_uniform(weight, 0.1, 1.0, rng)
            weight.copy_(step + torch.log(-torch.expm1(-step)))
        elif kind == "D":  # the skip past the state
            weight.copy_(0.1 * torch.randn(weight.shape, generator=rng))
        else:
            weight.copy_(_gain(name) * torch.randn(weight.shape, generator=rng))
            if weight.dim() > 1 and "embed" not in name:
                weight.div_(math.sqrt(weight.shape[-1]))


def _gain(name: str) -> float:
    if name.endswith("lm_head.weight"):
        return 2.0  # so that the distribution over tokens is neither flat nor one-hot
    if "embed" in name:
        return 0.5
    if name.endswith("bias"):
        return 0.1
    # Attention, MLPs and experts add less than the recurrent layers do.
    return 0.5 if "o_proj" in name or "down_proj" in name else 1.0


def _log_uniform(like: torch.Tensor, low: float, high: float, rng: torch.Generator) -> torch.Tensor:
    spread = torch.rand(like.shape, generator=rng)
    return torch.exp(math.log(low) + spread * (math.log(high) - math.log(low)))
