"""Matrix products that keep fp32 accuracy on 16-bit matrix units."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["dot_exact"]


@triton.jit
def dot_exact(a, b, INTERPRET: tl.constexpr):
    """``a @ b`` in float32, for float32 `a` and a `b` that is float32 or 16-bit.

    A bf16 `b` is exact on the matrix units; `a` is split into three bf16 terms that together hold
    its 24 bits, so every product is exact and only the float32 accumulation rounds. Otherwise the
    product is tf32x3, which drops terms below 2^-22 of each product.
    The interpreter multiplies the bit patterns of bf16 operands, so there both are widened.
    """
    if INTERPRET:
        return tl.dot(a, b.to(tl.float32), input_precision="ieee")
    elif b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # Smallest first, so that the accumulation keeps them.
        out = tl.dot(low, b)
        out = tl.dot(middle, b, out)
        return tl.dot(high, b, out)
    else:
        return tl.dot(a, b.to(tl.float32), input_precision="tf32x3")
