"""Mamba-2 decode readout: streams checkpoints; the prepass has done everything else.

::

    y = decay (S0 C) + replay          optionally  y *= silu(z)

Reads the checkpoint plane ``[pages, heads, dim, state]`` and, of the prepass,
``replay [batch, heads, dim]`` and ``decay [batch, heads]``; writes ``y [batch, heads, dim]``.

It is bound by the bytes of the plane as long as the instructions stay few: about 20 a 128-bit load.
So a program is a block of state rows (the rows of a group, head after head, taken as one list), the
offsets inside a page are 32-bit with constant steps, and the state is read in chunks of 64 bytes a
row: four lanes share a row, which leaves two shuffles to its sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.split import load_pairs, round_to, unpack_pairs
from ..launch.config import LaunchConfig

__all__ = ["readout"]


@triton.jit
def _readout_kernel(
    y_ptr, plane_ptr, replay_ptr, decay_ptr, c_ptr, z_ptr,
    page_ptr, window_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_c_b, stride_c_g, stride_z_b, stride_z_h,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_R: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr, HAS_Z: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = HEADS * DIM  # of a group
    BLOCKS: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    group = pid // BLOCKS % GROUPS
    b = (pid // BLOCKS // GROUPS).to(tl.int64)
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)

    # A group's list of state rows is a list of its heads' dims. Where blocks divide heads, the head
    # is one number and the tile has constant steps.
    r = tl.arange(0, BLOCK_R)
    plane_ptr += page * stride_plane_page
    if DIM % BLOCK_R == 0:
        h = group * HEADS + block * BLOCK_R // DIM
        first = block * BLOCK_R % DIM
        d = first + r
        in_r = tl.full([BLOCK_R], True, tl.int1)
        plane_ptr += h * stride_plane_h + first * STATE
        at = r * STATE
    else:
        r += block * BLOCK_R
        h = group * HEADS + r // DIM
        d = r % DIM
        in_r = r < ROWS
        at = h * stride_plane_h + d * STATE
    y_ptr += b * stride_y_b
    at_y = h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        if PDL:
            wait_for_previous()
        tl.store(y_ptr + at_y, tl.zeros([BLOCK_R], y_ptr.dtype.element_ty), mask=in_r)
        return

    # A row is [CHUNKS, BLOCK_N]: its chunks lie in one thread, its columns in neighbours.
    WIDTH: tl.constexpr = STATE // 2 if PAIRS else STATE
    n = tl.arange(0, CHUNKS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_n = n < WIDTH
    in_tile = in_r[:, None, None] & in_n[None, :, :]
    c_ptr += b * stride_c_b + group * stride_c_g
    if PAIRS:
        plane_ptr = plane_ptr.to(tl.pointer_type(tl.int32))
        state = tl.load(plane_ptr + (at[:, None, None] // 2 + n[None, :, :]), mask=in_tile, other=0)
        c, c_odd = load_pairs(c_ptr, n, in_n)
    else:
        state = tl.load(plane_ptr + (at[:, None, None] + n[None, :, :]), mask=in_tile, other=0.0)
        c = tl.load(c_ptr + n, mask=in_n, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_previous()  # the prepass; checkpoints and C are older than it
    else:
        tl.debug_barrier()
    # Either keeps all loads above all arithmetic: mixed, too few would be in flight.
    if PAIRS:
        even, odd = unpack_pairs(state)
        products = even * c[None, :, :] + odd * c_odd[None, :, :]
    else:
        products = state.to(tl.float32) * c[None, :, :]
    y = tl.sum(tl.sum(products, axis=1), axis=1)
    num_heads = GROUPS * HEADS
    y *= tl.load(decay_ptr + b * num_heads + h)
    y += tl.load(replay_ptr + (b * num_heads + h) * DIM + d, mask=in_r, other=0.0)
    if HAS_Z:
        z = tl.load(z_ptr + b * stride_z_b + h * stride_z_h + d, mask=in_r, other=0.0)
        y *= silu(z.to(tl.float32))
    tl.store(y_ptr + at_y, round_to(y, y_ptr.dtype.element_ty), mask=in_r)


def readout(
    y: torch.Tensor,
    plane: torch.Tensor,
    replay: torch.Tensor,
    decay: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    page: torch.Tensor,
    window: torch.Tensor,
    *,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` of one token and one layer; see the module.

    A head's ``dim * state`` values are contiguous in `plane`.
    """
    batch, heads, dim = y.shape
    groups, state = c.shape[1], c.shape[2]
    rows = heads // groups * dim
    block_r = min(config.rows or 32, triton.next_power_of_2(rows))
    gate = y if z is None else z
    pairs = plane.dtype == torch.bfloat16 and state % 2 == 0
    width = state // 2 if pairs else state
    block_n = min(64 // (plane.element_size() * (2 if pairs else 1)), triton.next_power_of_2(width))
    _readout_kernel[(batch * groups * triton.cdiv(rows, block_r),)](
        y, plane, replay, decay, c, gate,
        page, window,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        c.stride(0), c.stride(1), gate.stride(0), gate.stride(1),
        GROUPS=groups, HEADS=heads // groups, DIM=dim, STATE=state,
        BLOCK_R=block_r, CHUNKS=triton.next_power_of_2(triton.cdiv(width, block_n)), BLOCK_N=block_n,
        PAIRS=pairs, HAS_Z=z is not None, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
