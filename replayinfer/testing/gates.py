"""The gate, step and norm formulas of every family, written once for the oracles.

All of them take tensors that are in the computing type already and stay in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + exp(x))`` without overflow, cancellation or a cut-off.

    ``torch.nn.functional.softplus`` returns ``x`` itself above 20, which is off by 2e-9: too much
    for a float64 oracle. ``log(1 + exp(x))`` as written is 0 below -16 in float32.
    """
    return torch.clamp(x, min=0) + torch.log1p(torch.exp(-x.abs()))


def l2_normalise(x: Tensor, eps: float) -> Tensor:
    """Return ``x * rsqrt(sum(x^2) + eps)`` over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def mamba2_step(
    dt_raw: Tensor,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Return the step size ``dt``: bias, then softplus, then the limits.

    Parameters
    ----------
    dt_raw : [..., heads]
    dt_bias : [heads], optional
    dt_softplus : whether softplus is applied
    dt_limit : lowest and highest step
    """
    dt = dt_raw if dt_bias is None else dt_raw + dt_bias
    if dt_softplus:
        dt = softplus(dt)
    return torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])


def softplus_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Return the log decay ``-exp(A_log) * softplus(a + dt_bias)``, never above 0.

    Shapes broadcast: GDN has ``a`` [..., heads]; KDA has ``a`` [..., heads, state] and ``A_log``
    [heads, 1].
    """
    return -torch.exp(A_log) * softplus(a if dt_bias is None else a + dt_bias)


def bounded_gate(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, *, lower_bound: float
) -> Tensor:
    """Return the log decay ``lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``.

    It lies in ``(lower_bound, 0)``; ``exp(A_log)`` is the slope, not the size of the decay.
    """
    inner = torch.exp(A_log) * (a if dt_bias is None else a + dt_bias)
    return lower_bound * torch.sigmoid(inner)


def beta_value(b: Tensor, rule: str) -> Tensor:
    """Return the write strength ``beta`` of the delta rule from the model's raw ``b``.

    ``"sigmoid"`` gives (0, 1), ``"sigmoid2"`` gives (0, 2), ``"given"`` returns ``b`` itself.
    """
    if rule == "sigmoid":
        return torch.sigmoid(b)
    if rule == "sigmoid2":
        return 2.0 * torch.sigmoid(b)
    if rule == "given":
        return b
    raise ValueError(f"beta_rule: got {rule!r}; allowed 'sigmoid', 'sigmoid2', 'given'")
