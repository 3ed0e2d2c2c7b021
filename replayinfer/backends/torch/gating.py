"""The gated norm as a formula."""

from __future__ import annotations

import torch

from .gates import sigmoid, silu

__all__ = ["gated_norm"]


def gated_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
) -> None:
    """Into `out`, which may be `x`."""
    wide, gate = x.float(), z.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    out.copy_(wide * (silu(gate) if activation == "silu" else sigmoid(gate)))
