"""Mamba-2 decode without replay: one launch reads and writes every state, in place.

::

    S = exp(A dt) S + dt x B^T        y = S C + D x        optionally  y *= silu(z)

in float32 on the decoded state, which is encoded again; `y` is of the new state before that. Reads
and writes the pages ``[pages, heads, dim, state]``, both planes of a split one, and writes
``y [batch, heads, dim]``. A pad or an empty window gets zeros and no other write.

A program is a block of one head's state rows. It writes what it alone read, so pages may be updated
in place as long as no two sequences of the batch share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import clamp, silu, softplus
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.split import load_state, round_to, store_state
from ..launch.config import LaunchConfig

__all__ = ["direct"]


@triton.jit
def _direct_kernel(
    y_ptr, plane_ptr, low_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr,
    a_ptr, d_skip_ptr, dt_bias_ptr,
    page_ptr, window_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_x_b, stride_x_h, stride_dt_b, stride_b_b, stride_b_g, stride_c_b, stride_c_g,
    stride_z_b, stride_z_h, dt_min, dt_max,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % (GROUPS * HEADS)
    b = (pid // BLOCKS // (GROUPS * HEADS)).to(tl.int64)
    group = h // HEADS
    d = block * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    in_d, in_n = d < DIM, n < STATE
    rate = tl.load(a_ptr + h)
    skip = tl.load(d_skip_ptr + h)
    dt_bias = tl.load(dt_bias_ptr + h)
    if PDL:
        wait_for_previous()  # whatever made the inputs, folded, or moved these states before
        launch_dependents()

    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    x = tl.load(x_ptr + b * stride_x_b + h * stride_x_h + d, mask=in_d, other=0.0)
    new_b = tl.load(b_ptr + b * stride_b_b + group * stride_b_g + n, mask=in_n, other=0.0)
    c = tl.load(c_ptr + b * stride_c_b + group * stride_c_g + n, mask=in_n, other=0.0)
    dt = tl.load(dt_ptr + b * stride_dt_b + h).to(tl.float32) + dt_bias
    y_ptr += b * stride_y_b + h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        tl.store(y_ptr, tl.zeros([BLOCK_R], y_ptr.dtype.element_ty), mask=in_d)
        return

    in_tile = in_d[:, None] & in_n[None, :]
    tile = page * stride_plane_page + h * stride_plane_h + d[:, None] * STATE + n[None, :]
    state = load_state(plane_ptr, low_ptr, tile, in_tile)

    if SOFTPLUS:
        dt = softplus(dt)
    dt = clamp(dt, dt_min, dt_max)
    x = x.to(tl.float32)
    state = tl.exp(rate * dt) * state + (dt * x)[:, None] * new_b.to(tl.float32)[None, :]
    y = tl.sum(state * c.to(tl.float32)[None, :], axis=1) + skip * x
    if z_ptr is not None:
        z = tl.load(z_ptr + b * stride_z_b + h * stride_z_h + d, mask=in_d, other=0.0)
        y *= silu(z.to(tl.float32))
    tl.store(y_ptr, round_to(y, y_ptr.dtype.element_ty), mask=in_d)
    store_state(plane_ptr, low_ptr, tile, state, in_tile)


def direct(
    y: torch.Tensor,
    plane: torch.Tensor,
    low: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    a: torch.Tensor,
    d_skip: torch.Tensor,
    dt_bias: torch.Tensor,
    page: torch.Tensor,
    window: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module.

    A split state passes both planes as int16, with equal strides; a head's ``dim * state`` values
    are contiguous in a plane.
    """
    batch, heads, dim = x.shape
    groups, state = b.shape[1], b.shape[2]
    block_r = min(config.rows or 16, triton.next_power_of_2(dim))
    gate = x if z is None else z
    _direct_kernel[(batch * heads * triton.cdiv(dim, block_r),)](
        y, plane, low, x, dt, b, c, z,
        a, d_skip, dt_bias,
        page, window,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        gate.stride(0), gate.stride(1), dt_limit[0], dt_limit[1],
        GROUPS=groups, HEADS=heads // groups, DIM=dim, STATE=state,
        BLOCK_R=block_r, BLOCK_N=triton.next_power_of_2(state),
        SOFTPLUS=dt_softplus, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
