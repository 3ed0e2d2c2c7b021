"""The gated norm behind a delta-rule readout."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .backends.torch import gating as formulas
from .backends.triton import gating as kernels
from .checks import check_tensor
from .errors import InputError
from .spec.base import GATE_DTYPES

__all__ = ["gated_norm"]


@torch.no_grad()
def gated_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    activation: Literal["silu", "sigmoid"] = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * activation(z)``, each head by itself, in float32.

    The output norm of Gated DeltaNet (``silu``; Qwen3-Next, Qwen3.5) and of Kimi Delta Attention
    (``sigmoid``), as ``transformers`` and ``flash-linear-attention`` have it. On Hopper and newer
    the kernel starts while the readout before it still drains.

    Parameters
    ----------
    x : Tensor, [batch, heads, dim]
        A readout's outputs: float32, bfloat16 or float16. Heads and rows may lie anywhere.
    z : Tensor, [batch, heads, dim]
        Of the dtype of `x`.
    weight : Tensor, [dim]
        In float32, bfloat16 or float16.
    eps : float
        Above 0.
    out : Tensor, optional
        Shape and dtype of `x`, which it may be, but not overlap otherwise; a new tensor if omitted.

    Returns
    -------
    Tensor
        `out`.

    Raises
    ------
    InputError
        A shape, dtype, device, `eps` or activation is none of these; nothing was written.

    Examples
    --------
    >>> import torch
    >>> from replayinfer import ops
    >>> y, z = torch.randn(2, 4, 16, 128)  # of a readout, and of the layer's projection
    >>> ops.gated_norm(y, z, torch.ones(128), eps=1e-6, out=y).shape
    torch.Size([4, 16, 128])
    """
    dims = ("batch", "heads", "dim")
    check_tensor("x", x, shape=(None, None, None), dims=dims, dtypes=GATE_DTYPES, device=x.device)
    same: dict[str, Any] = {
        "shape": x.shape, "dims": dims, "dtypes": (x.dtype,), "device": x.device,
    }  # fmt: skip
    check_tensor("z", z, **same)
    check_tensor(
        "weight", weight, shape=x.shape[2:], dims=dims[2:], dtypes=GATE_DTYPES, device=x.device
    )
    if out is None:
        out = torch.empty_like(x)
    else:
        check_tensor("out", out, **same, written=True)
    if not eps > 0:
        raise InputError(f"eps: got {eps!r}; allowed a number > 0; pass the layer's own")
    if activation not in ("silu", "sigmoid"):
        raise InputError(
            f"activation: got {activation!r}; allowed 'silu' and 'sigmoid'; apply others yourself"
        )
    backend = kernels if x.device.type == "cuda" else formulas
    backend.gated_norm(out, x, z, weight, eps, activation)
    return out
