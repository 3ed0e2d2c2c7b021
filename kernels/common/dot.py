"""Matrix products that keep fp32 accuracy on 16-bit matrix units."""

from __future__ import annotations

import triton
import triton.language as tl

from .split import round_to

__all__ = [
    "add_products",
    "add_terms",
    "bf16_terms",
    "dot_exact",
    "dot_terms",
    "narrow",
    "upper_half",
]


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


@triton.jit
def narrow(x, INTERPRET: tl.constexpr):
    """float32 `x` rounded to an operand of the matrix units: bf16, in the interpreter widened."""
    if INTERPRET:
        return round_to(x, tl.bfloat16).to(tl.float32)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def upper_half(x, INTERPRET: tl.constexpr):
    """The upper 16 bits of float32 `x` as an operand of the matrix units, and as float32."""
    bits = x.to(tl.int32, bitcast=True)
    value = (bits & -65536).to(tl.float32, bitcast=True)
    if INTERPRET:
        return value, value
    else:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), value


@triton.jit
def bf16_terms(x, INTERPRET: tl.constexpr):
    """Three operands of the matrix units that add up to `x`; a bf16 `x` is one by itself.

    Cut, not rounded: a cut is a mask and a byte permutation, and three times 8 bits hold all 24.
    """
    if x.dtype == tl.bfloat16:
        if INTERPRET:
            return (x.to(tl.float32),)
        else:
            return (x,)
    else:
        x = x.to(tl.float32)
        high, value = upper_half(x, INTERPRET)
        rest = x - value
        middle, value = upper_half(rest, INTERPRET)
        return high, middle, narrow(rest - value, INTERPRET)


@triton.jit
def dot_terms(a, b):
    """``a @ b`` in float32 from the terms of both; three by three drop what is below 2^-23."""
    # Smallest first, so that the accumulation keeps them.
    if len(b) == 1:
        out = tl.dot(a[2], b[0], input_precision="ieee")
        out = tl.dot(a[1], b[0], out, input_precision="ieee")
    else:
        out = tl.dot(a[2], b[0], input_precision="ieee")
        out = tl.dot(a[0], b[2], out, input_precision="ieee")
        out = tl.dot(a[1], b[1], out, input_precision="ieee")
        out = tl.dot(a[1], b[0], out, input_precision="ieee")
        out = tl.dot(a[0], b[1], out, input_precision="ieee")
    return tl.dot(a[0], b[0], out, input_precision="ieee")


@triton.jit
def add_products(large, small, a, b):
    """Products of the first terms of `a` and `b` in one sum, and of the others in another.

    For parts of a longer sum: every small product meets a small sum, in whatever order the parts
    come. What is below 2^-23 is left out.
    """
    A: tl.constexpr = len(a) - 1
    B: tl.constexpr = len(b) - 1
    for i in tl.static_range(A + 1):
        for j in tl.static_range(B + 1):
            if A - i + B - j > 0 and A - i + B - j <= 2:
                small = tl.dot(a[A - i], b[B - j], small, input_precision="ieee")
    return tl.dot(a[0], b[0], large, input_precision="ieee"), small


@triton.jit
def add_terms(total, a, b):
    """``total + a @ b`` in float32 from the terms of both; what is below 2^-23 is left out."""
    A: tl.constexpr = len(a) - 1
    B: tl.constexpr = len(b) - 1
    # Smallest first, so that the accumulation keeps them.
    for i in tl.static_range(A + 1):
        for j in tl.static_range(B + 1):
            if A - i + B - j <= 2:
                total = tl.dot(a[A - i], b[B - j], total, input_precision="ieee")
    return total
