"""The exponential of a sum of gates where its error is applied to a state again and again."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["exact_decay"]


@triton.jit
def exact_decay(x):
    """``e^x`` of float32 ``x <= 0`` to an ulp, to half of one near 1; 0 below 2^-127.

    `tl.exp` is off by up to two ulps, and on the same side for neighbouring arguments: a state that
    is decayed by it at every fold would drift. So ``2^n e^r`` with ``|r| <= ln(2) / 2``, in plain
    arithmetic.
    """
    low = tl.where(x < -104.0, -104.0, x)  # -inf as well; a NaN stays
    n = tl.floor(low * 1.4426950408889634 + 0.5)
    r = low - n * 0.693359375  # 9 bits: the product is exact
    r = r + n * 2.12194440e-4
    p = 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r * r + r
    scale = (tl.maximum(n + 127.0, 0.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (1.0 + p) * scale
