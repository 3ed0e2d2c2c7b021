"""Mamba-2 decode readout: streams checkpoints and ``x`` rows; the prepass did the rest.

::

    y = decay (S0 C) + sum_j weight_j x_j + own x          optionally  y *= silu(z)

Reads the checkpoint plane ``[pages, heads, dim, state]``, the ``x`` rows, and of the prepass
``weight [batch, heads, rows]`` and ``scale [batch, heads, 2]`` (decay, own); writes
``y [batch, heads, dim]`` and the token's ``x`` row.

It is bound by bytes as long as enough loads are in flight and the instructions stay few, about 20
to a 128-bit load. So a program is a block of one head's rows and does everything once: first all
loads, then all arithmetic. The state is read in chunks of 128 bytes a row: whole cache lines, which
L2 takes as one request each, and three shuffles to a row's sum. The steps in a tile are constants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import load_pairs, round_to, unpack_pairs
from ..launch.config import LaunchConfig

__all__ = ["readout"]


@triton.jit(
    # Only counted with, so that knowing more would gain nothing.
    do_not_specialize=["stride_table_b", "pages"],
    do_not_specialize_on_alignment=[
        "scale_ptr", "page_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _readout_kernel(
    y_ptr, plane_ptr, weight_ptr, scale_ptr, x_ptr, c_ptr, z_ptr, row_x_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_x_b, stride_x_h, stride_c_b, stride_c_g, stride_z_b, stride_z_h,
    stride_row_x_page, stride_row_x_row, stride_row_x_h,
    stride_table_b, pages,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, SIDE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PAGE_ROWS: tl.constexpr, PAIRS: tl.constexpr, HAS_Z: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % (GROUPS * HEADS)
    b = (pid // BLOCKS // (GROUPS * HEADS)).to(tl.int64)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_J)
    in_d = d < DIM
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    at_rows = row_offset(table_ptr, j, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    y_ptr += b * stride_y_b + h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        if PDL:
            wait_for_previous()
        tl.store(y_ptr, tl.zeros([BLOCK_D], y_ptr.dtype.element_ty), mask=in_d)
        return

    # A tile is a chunk of the rows, loaded as one vector, which leaves no choice of a layout: SIDE
    # rows lie beside each other, the next in the same threads. Seen as [.., SIDE, BLOCK_N] it takes
    # chunks of `C` as they are loaded, once for each of the SIDE.
    WIDTH: tl.constexpr = STATE // 2 if PAIRS else STATE
    r = tl.arange(0, BLOCK_D * BLOCK_N) // BLOCK_N
    n = tl.arange(0, BLOCK_D * BLOCK_N) % BLOCK_N
    in_rows = block * BLOCK_D + r < DIM
    plane_ptr += page * stride_plane_page + h * stride_plane_h + block * (BLOCK_D * STATE)
    if PAIRS:
        plane_ptr = plane_ptr.to(tl.pointer_type(tl.int32))
    c_ptr += b * stride_c_b + h // HEADS * stride_c_g
    m = tl.arange(0, SIDE * BLOCK_N) % BLOCK_N
    tiles, cs, cs_odd = (), (), ()
    # What a step reads or writes once is first to leave L2; what the prepass wrote is worth more.
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK_N + n
        tile = tl.load(
            plane_ptr + (r * WIDTH + at), mask=in_rows & (at < WIDTH), other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        tiles += (tile.reshape(BLOCK_D // SIDE, SIDE, BLOCK_N),)
    for i in tl.static_range(CHUNKS):
        at = i * BLOCK_N + m
        if PAIRS:
            c, c_odd = load_pairs(c_ptr, at, at < WIDTH, False)
            cs_odd += (c_odd.reshape(1, SIDE, BLOCK_N),)
        else:
            c = tl.load(c_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        cs += (c.reshape(1, SIDE, BLOCK_N),)
    live = j < history
    row_x_ptr += h * stride_row_x_h
    rows = tl.load(
        row_x_ptr + at_rows[:, None] + d[None, :], mask=live[:, None] & in_d[None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    x = tl.load(x_ptr + b * stride_x_b + h * stride_x_h + d, mask=in_d, other=0.0)
    here = row_offset(table_ptr, history, pages, stride_row_x_page, stride_row_x_row, PAGE_ROWS)
    # Either of these keeps the loads above the arithmetic: mixed, too few would be in flight.
    if PDL:
        wait_for_previous()  # the prepass; all that was read so far is older
        launch_dependents()
    else:
        tl.debug_barrier()
    at_weight = b * (GROUPS * HEADS) + h
    weight = tl.load(weight_ptr + at_weight * BLOCK_J + j, mask=live, other=0.0)
    decay = tl.load(scale_ptr + at_weight * 2)
    own = tl.load(scale_ptr + at_weight * 2 + 1)

    # In one running sum for a chunk after the other: the products then cost no additions.
    read = tl.zeros([BLOCK_D // SIDE, SIDE, BLOCK_N], tl.float32)
    for i in tl.static_range(CHUNKS):
        if PAIRS:
            even, odd = unpack_pairs(tiles[i])
            read += even * cs[i]
            read += odd * cs_odd[i]
        else:
            read += tiles[i].to(tl.float32) * cs[i]
    y = decay * tl.sum(read, axis=2).reshape(BLOCK_D)
    y += tl.sum(weight[:, None] * rows.to(tl.float32), axis=0) + own * x.to(tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + b * stride_z_b + h * stride_z_h + d, mask=in_d, other=0.0)
        y *= silu(z.to(tl.float32))
    tl.store(y_ptr, round_to(y, y_ptr.dtype.element_ty), mask=in_d)
    tl.store(row_x_ptr + here + d, x, mask=in_d, eviction_policy="evict_first")


def readout(
    y: torch.Tensor,
    plane: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    row_x: torch.Tensor,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module.

    A head's ``dim * state`` values are contiguous in `plane`.
    """
    batch, heads, dim = x.shape
    groups, state = c.shape[1], c.shape[2]
    block_d = min(config.rows or 64, triton.next_power_of_2(dim))
    pairs = plane.dtype == torch.bfloat16
    width = state // 2 if pairs else state
    block_n = min(128 // (4 if pairs else plane.element_size()), triton.next_power_of_2(width))
    gate = x if z is None else z
    _readout_kernel[(batch * heads * triton.cdiv(dim, block_d),)](
        y, plane, weight, scale, x, c, gate, row_x,
        page, history, window, table,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        x.stride(0), x.stride(1), c.stride(0), c.stride(1), gate.stride(0), gate.stride(1),
        row_x.stride(0), row_x.stride(1), row_x.stride(2),
        table.stride(0), table.shape[1],
        GROUPS=groups, HEADS=heads // groups, DIM=dim, STATE=state,
        # Each warp reads 512 bytes at a time.
        BLOCK_D=block_d, SIDE=min(block_d, 128 * config.num_warps // block_n),
        CHUNKS=triton.next_power_of_2(triton.cdiv(width, block_n)),
        BLOCK_N=block_n, BLOCK_J=weight.shape[2],
        PAGE_ROWS=row_x.shape[1], PAIRS=pairs, HAS_Z=z is not None, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
