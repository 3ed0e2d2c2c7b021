"""Operands of the matrix units for windows of tokens: terms, and queries beside keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.dot import bf16_terms, narrow, upper_half

__all__ = ["interleave", "operand_terms"]


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
def interleave(q, k):
    """``[tokens, channels]`` twice to ``[2 tokens, channels]``, q and k of a token in turn."""
    pairs = tl.join(q, k).permute(0, 2, 1)
    return pairs.reshape(2 * q.shape[0], q.shape[1])
