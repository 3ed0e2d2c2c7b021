"""Gate formulas in float32, as the reference backend has them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["silu", "softplus"]


@triton.jit
def softplus(x):
    """``max(x, 0) + log1p(e^-|x|)``: neither inf at 80 nor 0 at -80."""
    t = tl.exp(-tl.abs(x))
    # log1p is not a Triton builtin everywhere. log(1 + t) * t / ((1 + t) - 1) is accurate to an ulp
    # or two for every t in [0, 1]; where 1 + t rounds to 1, log1p(t) = t.
    u = 1.0 + t
    log1p = tl.where(u == 1.0, t, tl.log(u) * (t / (u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))
