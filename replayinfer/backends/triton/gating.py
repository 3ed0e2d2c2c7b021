"""The gated norm as a kernel."""

from __future__ import annotations

import torch

from .workspace import has_pdl

__all__ = ["gated_norm"]


def gated_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
) -> None:
    """Into `out`, which may be `x`; one launch, none for no rows."""
    from replayinfer.kernels.common.gated_norm import gated_norm as launch

    if x.numel():
        launch(out, x, z, weight, eps=eps, silu=activation == "silu", pdl=has_pdl(x.device))
