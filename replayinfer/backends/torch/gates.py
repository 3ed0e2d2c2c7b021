"""The one gate formula per kind, the one beta rule and the one norm, always in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...spec import DeltaSpec, KDASpec, Mamba2Spec

__all__ = ["beta", "log_decay", "norm_scale", "sigmoid", "silu", "softplus", "step_sizes"]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + e^-x)``: one formula, so that an element has the same bits wherever it lies.

    On a CPU `torch.sigmoid` computes the last elements of a tensor by another routine.
    """
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x sigmoid(x)``."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + e^x)``, right over all of fp32: not 0 for x = -80, not inf for x = 80.

    ``max(x, 0) + log1p(e^-|x|)`` never exponentiates a positive number.
    """
    x = x.float()
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def step_sizes(spec: Mamba2Spec, dt: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Mamba-2's ``dt``: bias, softplus, clamp; float32 ``[..., heads]``."""
    dt = dt.float() + dt_bias
    if spec.dt_softplus:
        dt = softplus(dt)
    return dt.clamp(*spec.dt_limit)


def log_decay(
    spec: DeltaSpec,
    weights: Mapping[str, torch.Tensor],
    layer: int,
    gate: torch.Tensor,
) -> torch.Tensor:
    """The gate of a delta-rule layer, float32, never above 0: ``[..., heads, (state)]``.

    `gate` is ``g`` itself with ``gate="log"``, else the raw ``a``.
    """
    if spec.gate == "log":
        return gate.float()
    a = gate.float() + weights["dt_bias"][layer]
    a_log = weights["A_log"][layer]
    rate = torch.exp(a_log if a.dim() == 3 else a_log[:, None])
    # The rate is kept finite: infinity times a softplus that underflowed to 0 would be NaN.
    rate = rate.clamp_max(torch.finfo(torch.float32).max)
    if isinstance(spec, KDASpec) and spec.gate == "bounded":
        return spec.lower_bound * sigmoid(rate * a)
    return -rate * softplus(a)


def beta(spec: DeltaSpec, b: torch.Tensor) -> torch.Tensor:
    """How strongly a token overwrites, in float32: in (0, 1), in (0, 2), or as given."""
    b = b.float()
    if spec.beta == "given":
        return b
    return sigmoid(b) * (2.0 if spec.beta == "sigmoid2" else 1.0)


def norm_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Reciprocal l2 norm over the last dimension, ``rsqrt(sum x^2 + eps)``."""
    x = x.float()
    return torch.rsqrt((x * x).sum(-1) + eps)
