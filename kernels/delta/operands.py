"""Operands of the matrix units for windows of tokens: terms, and queries beside keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.dot import bf16_terms, narrow, upper_half

__all__ = ["add_term_products", "interleave", "operand_terms"]


@triton.jit
def operand_terms(x, INTERPRET: tl.constexpr):
    """Operands of the matrix units that add up to `x`: one of bf16, two of fp16, three of fp32."""
    if x.dtype == tl.float16:
        wide = x.to(tl.float32)
        high, value = upper_half(wide, INTERPRET)
        return high, narrow(wide - value, INTERPRET)
    else:
        return bf16_terms(x, INTERPRET)


@triton.jit
def add_term_products(large, small, a, b):
    """Products of the first terms of `a` and `b` in one sum, and of the others in another.

    So every small product meets a small sum; what is below 2^-23 is left out.
    """
    for i in tl.static_range(len(a) - 1, -1, -1):
        for j in tl.static_range(len(b) - 1, -1, -1):
            if i + j > 0 and i + j < 3:
                small = tl.dot(a[i], b[j], small, input_precision="ieee")
    return tl.dot(a[0], b[0], large, input_precision="ieee"), small


@triton.jit
def interleave(q, k):
    """``[tokens, channels]`` twice to ``[2 tokens, channels]``, q and k of a token in turn."""
    pairs = tl.join(q, k).permute(0, 2, 1)
    return pairs.reshape(2 * q.shape[0], q.shape[1])
