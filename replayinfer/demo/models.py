"""Small seeded hybrid models whose tokens depend on the recurrent state; nothing is downloaded.

A freshly initialised model is no test of a state: its projections are so small that logits hardly
depend on what the recurrent layers remember, and a state off by 1% changes no token in hundreds.
Here every projection keeps the variance of what it projects, decays are slow, the skip past the
state is weak, and embeddings are small beside what the recurrent layers add. A state off by 1% then
moves logits by about 5% of their standard deviation and turns tokens in most prompts, while the
rounding differences of float32 stay four orders below (`tests/demo` holds both).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from replayinfer import InputError

from .configs import MODELS

__all__ = ["build_model", "draft_model", "scale_weights"]


_DISTURBANCE = 0.03


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
def draft_model(model: Any, seed: int = 0) -> Any:
    """What drafts for `model`: its copy with every weight 3% off.

    It stands for the smaller model that a trained one would have. It is right about half of the
    time, so that drafts of every length are accepted and refused.
    """
    draft = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(seed + 1)
    for weight in draft.parameters():
        noise = torch.randn(weight.shape, generator=rng).to(weight)
        weight.mul_(1 + _DISTURBANCE * noise)
    return draft


@torch.no_grad()
def scale_weights(model: Any, rng: torch.Generator) -> None:
    """Draw all weights again, so that logits depend on the recurrent states (see above)."""
    names = [name for name, _ in model.named_parameters()]
    recurrent = tuple(n.removesuffix("conv1d.weight") for n in names if "conv1d.weight" in n)
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
            gain = _gain(name, name.startswith(recurrent))
            weight.copy_(gain * torch.randn(weight.shape, generator=rng))
            if weight.dim() > 1 and "embed" not in name:
                weight.div_(math.sqrt(weight.shape[-1]))


def _gain(name: str, recurrent: bool) -> float:
    if name.endswith("lm_head.weight"):
        return 2.0  # so that the distribution over tokens is neither flat nor one-hot
    if "embed" in name:
        return 0.5
    if name.endswith("bias"):
        return 0.1
    # Attention, MLPs and experts add less than the recurrent layers do.
    last = any(end in name for end in ("o_proj", "down_proj", "output_linear"))
    return 0.5 if last and not recurrent else 1.0


def _log_uniform(like: torch.Tensor, low: float, high: float, rng: torch.Generator) -> torch.Tensor:
    spread = torch.rand(like.shape, generator=rng)
    return torch.exp(math.log(low) + spread * (math.log(high) - math.log(low)))
