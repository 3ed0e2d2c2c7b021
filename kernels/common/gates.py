"""Gate formulas in float32, as the reference backend has them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["clamp", "decay", "log_decay", "sigmoid", "silu", "softplus", "write_strength"]


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
def clamp(x, low, high):
    """As torch clamps: a NaN stays one, which the hardware's comparisons would drop."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def decay(log):
    """``e^log`` in two instructions, for a decay or weight: 0 where it would be denormal."""
    return tl.exp2(log * 1.4426950408889634)


@triton.jit
def log_decay(raw, a_log, bias, lower_bound, GATE: tl.constexpr):
    """The log decay of a delta-rule token, never above 0, from its raw gate in float32.

    GATE is ``"log"`` (`raw` is the log decay itself), ``"softplus"`` or ``"bounded"``.
    """
    if GATE == "log":
        g = raw
    else:
        # Kept finite: infinity times a softplus that underflowed to 0 would be NaN.
        rate = tl.minimum(tl.exp(a_log), 3.4028234663852886e38)
        if GATE == "bounded":
            g = lower_bound * sigmoid(rate * (raw + bias))
        else:
            g = -rate * softplus(raw + bias)
    return g


@triton.jit
def write_strength(raw, BETA: tl.constexpr):
    """Beta in float32: BETA is ``"sigmoid"``, ``"sigmoid2"`` (twice that) or ``"given"``."""
    if BETA == "given":
        beta = raw
    elif BETA == "sigmoid2":
        beta = 2.0 * sigmoid(raw)
    else:
        beta = sigmoid(raw)
    return beta
