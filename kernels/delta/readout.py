"""Delta-rule decode readout: streams checkpoints and ``u`` rows; the prepass did the rest.

::

    u = beta (v - read_k (S0 k) - sum_j weight_k_j u_j)
    y = read_q (S0 q) + sum_j weight_q_j u_j + own u

Reads the checkpoint plane ``[pages, heads, dim, state]``, the ``u`` rows, and of the prepass
``weight [batch, heads, 2, rows]`` (q, k) and ``scale [batch, heads, 4]`` (read_q, read_k, beta,
own). Writes ``y [batch, heads, dim]`` and the token's ``u`` row, and its ``v`` row where a fold
solves for ``u`` again. With one gate for a head (GDN), ``q`` and ``k`` are the step's inputs; with
one for every channel (KDA) the prepass wrote them for each head, decayed; and one that convolves
(CONVOLVED) wrote ``q``, ``k`` and ``v``. What the prepass writes is loaded only after waiting for
it, all else before.

It is bound by bytes as long as enough loads are in flight and the instructions stay few. So a
program is a block of one head's rows and does everything once: first all loads, then all
arithmetic. The state is read in chunks of 128 bytes a row: whole cache lines, which L2 takes as one
request each, and three shuffles to a row's sum. The steps in a tile are constants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import load_pairs, round_to, unpack_pairs
from ..launch.config import LaunchConfig

__all__ = ["readout"]


@triton.jit
def _unpack(word, DTYPE: tl.constexpr):
    """Two neighbouring 16-bit values of a plane in an int32, the first in the low half."""
    if tl.bfloat16 == DTYPE:
        first, second = unpack_pairs(word)
    else:
        first = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        second = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _load_channels(
    ptr, STATE: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Channels of `q` or `k` as a tile has them: chunks of firsts, and of seconds where in pairs.

    APART: all firsts lie before all seconds.
    """
    firsts, seconds = (), ()
    for c in tl.static_range(CHUNKS):
        n = c * BLOCK_N + tl.arange(0, SIDE * BLOCK_N) % BLOCK_N
        if PAIRS:
            if APART:
                first = tl.load(ptr + n, mask=n < STATE // 2, other=0.0)
                second = tl.load(ptr + STATE // 2 + n, mask=n < STATE // 2, other=0.0)
            else:
                first, second = load_pairs(ptr, n, n < STATE // 2, False)
            seconds += (second.reshape(1, SIDE, BLOCK_N),)
        else:
            first = tl.load(ptr + n, mask=n < STATE, other=0.0).to(tl.float32)
        firsts += (first.reshape(1, SIDE, BLOCK_N),)
    return firsts, seconds


@triton.jit(
    # Only counted with, so that knowing more would gain nothing.
    do_not_specialize=["stride_table_b", "pages"],
    do_not_specialize_on_alignment=[
        "scale_ptr", "page_ptr", "history_ptr", "window_ptr", "table_ptr",
    ],
)  # fmt: skip
def _readout_kernel(
    y_ptr, plane_ptr, weight_ptr, scale_ptr, q_ptr, k_ptr, v_ptr, row_u_ptr, row_v_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_h, stride_plane_page, stride_plane_h,
    stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_v_b, stride_v_h,
    stride_row_u_page, stride_row_u_row, stride_row_u_h,
    stride_row_v_page, stride_row_v_row, stride_row_v_h,
    stride_table_b, pages,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    BLOCK_D: tl.constexpr, SIDE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr, PAGE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr, PER_CHANNEL: tl.constexpr, CONVOLVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % HEADS
    b = (pid // BLOCKS // HEADS).to(tl.int64)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_J)
    in_d = d < DIM
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    at_rows = row_offset(table_ptr, j, pages, stride_row_u_page, stride_row_u_row, PAGE_ROWS)
    y_ptr += b * stride_y_b + h * stride_y_h + d
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        if PDL:
            wait_for_previous()
        tl.store(y_ptr, tl.zeros([BLOCK_D], y_ptr.dtype.element_ty), mask=in_d)
        return

    # A tile is a chunk of the rows, loaded as one vector, which leaves no choice of a layout: SIDE
    # rows lie beside each other, the next in the same threads. Seen as [.., SIDE, BLOCK_N] it takes
    # chunks of `q` and `k` as they are loaded, once for each of the SIDE.
    WIDTH: tl.constexpr = STATE // 2 if PAIRS else STATE
    r = tl.arange(0, BLOCK_D * BLOCK_N) // BLOCK_N
    n = tl.arange(0, BLOCK_D * BLOCK_N) % BLOCK_N
    in_rows = block * BLOCK_D + r < DIM
    plane_ptr += page * stride_plane_page + h * stride_plane_h + block * (BLOCK_D * STATE)
    PLANE: tl.constexpr = plane_ptr.dtype.element_ty
    if PAIRS:
        plane_ptr = plane_ptr.to(tl.pointer_type(tl.int32))
    tiles = ()
    for c in tl.static_range(CHUNKS):
        # What a step reads or writes once leaves L2 first; what the prepass wrote is worth more.
        tile = tl.load(
            plane_ptr + (r * WIDTH + c * BLOCK_N + n), mask=in_rows & (c * BLOCK_N + n < WIDTH),
            other=0, eviction_policy="evict_first",
        )  # fmt: skip
        tiles += (tile.reshape(BLOCK_D // SIDE, SIDE, BLOCK_N),)
    source = h if PER_CHANNEL else h // RATIO
    q_ptr += b * stride_q_b + source * stride_q_h
    k_ptr += b * stride_k_b + source * stride_k_h
    v_ptr += b * stride_v_b + h * stride_v_h + d
    if not PER_CHANNEL and not CONVOLVED:
        q, q_odd = _load_channels(q_ptr, STATE, CHUNKS, SIDE, BLOCK_N, PAIRS, False)
        k, k_odd = _load_channels(k_ptr, STATE, CHUNKS, SIDE, BLOCK_N, PAIRS, False)
    live = j < history
    row_u_ptr += h * stride_row_u_h
    rows = tl.load(
        row_u_ptr + at_rows[:, None] + d[None, :], mask=live[:, None] & in_d[None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    if not CONVOLVED:
        v = tl.load(v_ptr, mask=in_d, other=0.0)
    here = tl.load(table_ptr + history // PAGE_ROWS).to(tl.int64)
    # Either of these keeps the loads above the arithmetic: mixed, too few would be in flight.
    if PDL:
        wait_for_previous()  # the prepass; all that was read so far is older
        launch_dependents()
    else:
        tl.debug_barrier()
    at_head = b * HEADS + h
    weight_ptr += at_head * (2 * BLOCK_J) + j
    weight_q = tl.load(weight_ptr, mask=live, other=0.0)
    weight_k = tl.load(weight_ptr + BLOCK_J, mask=live, other=0.0)
    scale_ptr += at_head * 4
    read_q = tl.load(scale_ptr)
    read_k = tl.load(scale_ptr + 1)
    beta = tl.load(scale_ptr + 2)
    own = tl.load(scale_ptr + 3)
    if PER_CHANNEL or CONVOLVED:
        q, q_odd = _load_channels(q_ptr, STATE, CHUNKS, SIDE, BLOCK_N, PAIRS, PER_CHANNEL)
        k, k_odd = _load_channels(k_ptr, STATE, CHUNKS, SIDE, BLOCK_N, PAIRS, PER_CHANNEL)
    if CONVOLVED:
        v = tl.load(v_ptr, mask=in_d, other=0.0)

    # In one running sum for a chunk after the other: the products then cost no additions.
    seen_q = tl.zeros([BLOCK_D // SIDE, SIDE, BLOCK_N], tl.float32)
    seen_k = tl.zeros([BLOCK_D // SIDE, SIDE, BLOCK_N], tl.float32)
    for c in tl.static_range(CHUNKS):
        if PAIRS:
            even, odd = _unpack(tiles[c], PLANE)
            seen_q += even * q[c]
            seen_k += even * k[c]
            seen_q += odd * q_odd[c]
            seen_k += odd * k_odd[c]
        else:
            seen_q += tiles[c] * q[c]
            seen_k += tiles[c] * k[c]
    seen_q = tl.sum(seen_q, axis=2).reshape(BLOCK_D)
    seen_k = tl.sum(seen_k, axis=2).reshape(BLOCK_D)
    rows = rows.to(tl.float32)
    recalled = read_k * seen_k + tl.sum(weight_k[:, None] * rows, axis=0)
    u = beta * (v.to(tl.float32) - recalled)
    y = read_q * seen_q + tl.sum(weight_q[:, None] * rows, axis=0) + own * u
    tl.store(y_ptr, round_to(y, y_ptr.dtype.element_ty), mask=in_d)

    # The token's own row goes to index `history`, which nobody reads in this step.
    row = history % PAGE_ROWS
    at = here * stride_row_u_page + row * stride_row_u_row
    u = round_to(u, row_u_ptr.dtype.element_ty)
    tl.store(row_u_ptr + at + d, u, mask=in_d, eviction_policy="evict_first")
    if row_v_ptr is not None:
        at = here * stride_row_v_page + row * stride_row_v_row + h * stride_row_v_h
        tl.store(row_v_ptr + at + d, v, mask=in_d, eviction_policy="evict_first")


def readout(
    y: torch.Tensor,
    plane: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_u: torch.Tensor,
    row_v: torch.Tensor | None,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    per_channel: bool,
    pdl: bool,
    config: LaunchConfig,
    convolved: bool = False,
) -> None:
    """Launch over ``[batch, heads, dim]`` inputs of one token and one layer; see the module.

    `q` and `k` are ``[batch, key_heads, state]``, or with `per_channel` the prepass's
    ``[batch, heads, state]``. A head's ``dim * state`` values are contiguous in `plane`. With
    `convolved` the prepass makes `q`, `k` and `v`: like its weights and scales they are loaded
    after the wait for it, and before it only the state and the ``u`` rows are.
    """
    batch, heads, dim = v.shape
    state = q.shape[2]
    pairs = plane.element_size() == 2
    width = state // 2 if pairs else state
    block_n = min(32, triton.next_power_of_2(width))
    block_d = min(config.rows or 64, triton.next_power_of_2(dim))
    kept = row_u if row_v is None else row_v
    _readout_kernel[(batch * heads * triton.cdiv(dim, block_d),)](
        y, plane, weight, scale, q, k, v, row_u, row_v,
        page, history, window, table,
        y.stride(0), y.stride(1), plane.stride(0), plane.stride(1),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        row_u.stride(0), row_u.stride(1), row_u.stride(2),
        kept.stride(0), kept.stride(1), kept.stride(2),
        table.stride(0), table.shape[1],
        HEADS=heads, RATIO=heads // q.shape[1], DIM=dim, STATE=state,
        # Each warp reads 512 bytes at a time.
        BLOCK_D=block_d, SIDE=min(block_d, 128 * config.num_warps // block_n),
        CHUNKS=triton.cdiv(width, block_n), BLOCK_N=block_n,
        BLOCK_J=weight.shape[3], PAGE_ROWS=row_u.shape[1],
        PAIRS=pairs, PER_CHANNEL=per_channel, CONVOLVED=convolved, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
