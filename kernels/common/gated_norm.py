"""RMS norm of each head's outputs, then its gate: what lies between a readout and its projection.

::

    out = x / sqrt(mean(x^2) + eps) * weight * activation(z)

A program is a block of rows of ``dim``, which it holds in registers, so `out` may be `x`. The step
is short at any batch, and starting it costs as much: it starts while the readout still drains.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gates import sigmoid, silu
from .pdl import launch_dependents, wait_for_previous
from .split import round_to

__all__ = ["gated_norm"]

_VALUES = 1024  # of a program: 8 to a thread of four warps, one wide load where they are bf16


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_kernel(
    out_ptr, x_ptr, z_ptr, weight_ptr, rows, eps,
    stride_out_b, stride_out_h, stride_x_b, stride_x_h, stride_z_b, stride_z_h,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)[None, :]
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (row < rows)[:, None] & (d < DIM)
    h = (row % HEADS)[:, None]
    b = (row // HEADS).to(tl.int64)[:, None]
    weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    if PDL:
        wait_for_previous()  # of the readout, and of whatever made `z`
        launch_dependents()
    x = tl.load(x_ptr + (b * stride_x_b + h * stride_x_h + d), mask=inside, other=0.0)
    z = tl.load(z_ptr + (b * stride_z_b + h * stride_z_h + d), mask=inside, other=0.0)
    x, z = x.to(tl.float32), z.to(tl.float32)
    norm = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    out = x * norm[:, None] * weight
    if SILU:
        out *= silu(z)
    else:
        out *= sigmoid(z)
    out = round_to(out, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (b * stride_out_b + h * stride_out_h + d), out, mask=inside)


def gated_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    silu: bool,
    pdl: bool,
) -> None:
    """Launch over ``[batch, heads, dim]``, whose channels lie beside each other; see the module."""
    batch, heads, dim = x.shape
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, _VALUES // block_d)
    _gated_norm_kernel[(triton.cdiv(batch * heads, block_r),)](
        out, x, z, weight, batch * heads, eps,
        out.stride(0), out.stride(1), x.stride(0), x.stride(1), z.stride(0), z.stride(1),
        HEADS=heads, DIM=dim, BLOCK_R=block_r, BLOCK_D=block_d, SILU=silu, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
