"""Delta-rule readout of a window of tokens: streams checkpoints and ``u`` rows; the prepass did the
rest.

::

    r_t = beta_t (v_t - read_k_t (S0 k_t) - sum_j weight_k_tj u_j)      over the history's rows j
    u_t = r_t - sum_s solve_ts u_s                                      over the window's rows s < t
    y_t = read_q_t (S0 q_t) + sum_j weight_q_tj u_j + sum_s own_ts u_s                      s <= t

A window is a chain or a draft tree: `solve` and `own` are 0 unless ``s`` leads to ``t``, and a 0
takes no product, so that a draft which is not finite stays by itself. Reads the checkpoint plane
``[pages, heads, dim, state]``, the ``u`` rows, and of the prepass ``weight [batch, heads, rows,
window, 2]`` (q, k), ``scale [batch, heads, 3 window]`` (read_q and read_k in turn, then beta) and
``pairs [batch, heads, 2, window, window]`` (solve, own; by s, by t). Writes ``y [batch, window,
heads, dim]`` and the tokens' ``u`` rows after the history, and their ``v`` rows where a fold solves
for ``u`` again. With one gate for a head (GDN), ``q`` and ``k`` are the step's inputs; with one for
every channel (KDA) the prepass wrote them, decayed.

The matrix units do the products, the state's rows against queries and keys as columns: a bf16 plane
and bf16 inputs are exact operands as they are, and norms and decays multiply sums. Anything wider
is split into bf16 terms, accurate to fp32 throughout, since ``u`` is fed back. As in `readout` a
program is a block of one head's rows: first all loads, then all arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dot import add_products
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import round_to
from ..common.units import block_of, columns_to_units
from ..launch.config import LaunchConfig, interpreting
from .operands import operand_terms

__all__ = ["block_of_tokens", "verify"]


@triton.jit
def _rows_of_units(r, WARPS: tl.constexpr):
    """As `units.rows_of_units`, of several tiles of 16 rows to a warp."""
    if WARPS == 1:
        return r
    else:
        inner = r % 8 + r // 8 % 2 * (8 * WARPS) + r // 16 % WARPS * 8
        return inner + r // (16 * WARPS) * (16 * WARPS)


@triton.jit
def _to_units(x, WARPS: tl.constexpr):
    """As `units.to_units`, of several tiles of 16 rows to a warp."""
    CHUNKS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    UNIT: tl.constexpr = x.shape[2]
    x = x.reshape(CHUNKS, ROWS // (16 * WARPS), 2, WARPS, 8, 4, UNIT // 8, 2)
    return x.permute(1, 3, 2, 4, 0, 6, 5, 7).reshape(ROWS, CHUNKS * UNIT)


@triton.jit(
    # Only counted with, so that knowing more would gain nothing.
    do_not_specialize=["stride_table_b", "pages"],
    do_not_specialize_on_alignment=["page_ptr", "history_ptr", "window_ptr", "table_ptr"],
)
def _verify_kernel(
    y_ptr, plane_ptr, weight_ptr, scale_ptr, pairs_ptr, q_ptr, k_ptr, v_ptr, row_u_ptr, row_v_ptr,
    page_ptr, history_ptr, window_ptr, table_ptr,
    stride_y_b, stride_y_t, stride_y_h, stride_plane_page, stride_plane_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_row_u_page, stride_row_u_row, stride_row_u_h,
    stride_row_v_page, stride_row_v_row, stride_row_v_h,
    stride_table_b, pages,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, UNIT: tl.constexpr, BLOCK_J: tl.constexpr, ROWS: tl.constexpr,
    PAGE_ROWS: tl.constexpr, WARPS: tl.constexpr, PERMUTE: tl.constexpr,
    PER_CHANNEL: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    CHUNKS: tl.constexpr = BLOCK_N // UNIT
    pid = tl.program_id(0)  # all of the grid on axis 0
    block = pid % BLOCKS
    h = pid // BLOCKS % HEADS
    b = (pid // BLOCKS // HEADS).to(tl.int64)
    r = tl.arange(0, BLOCK_D)
    d = block * BLOCK_D + r
    if PERMUTE:
        d = block * BLOCK_D + _rows_of_units(r, WARPS)
    in_d = d < DIM
    t = tl.arange(0, BLOCK_T)
    c = tl.arange(0, 2 * BLOCK_T)  # q and k of a token in turn
    j = tl.arange(0, BLOCK_J)
    page = tl.load(page_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    at_rows = row_offset(table_ptr, j, pages, stride_row_u_page, stride_row_u_row, PAGE_ROWS)
    y_ptrs = y_ptr + b * stride_y_b + h * stride_y_h + t[None, :] * stride_y_t + d[:, None]
    in_y = in_d[:, None] & (t < WINDOW)[None, :]
    if (page < 0) | (tokens == 0):  # pad or empty window: zeros, and no other write
        if PDL:
            wait_for_previous()
        tl.store(y_ptrs, tl.zeros([BLOCK_D, BLOCK_T], y_ptr.dtype.element_ty), mask=in_y)
        return

    n = tl.arange(0, CHUNKS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    corner = block * BLOCK_D
    plane_ptr += page * stride_plane_page + h * stride_plane_h + corner * STATE
    in_rows = (corner + r < DIM)[None, :, None]
    tiles = ()
    for p in tl.static_range(PARTS):
        # What a step reads or writes once leaves L2 first; what the prepass wrote is worth more.
        tile = tl.load(
            plane_ptr + p * BLOCK_N + (r[None, :, None] * STATE + n[:, None, :]),
            mask=in_rows & (p * BLOCK_N + n < STATE)[:, None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        tiles += (tile,)
    # Now, since the prepass is done long before all but the first programs, and what follows shall
    # wait for memory with the state. What was read so far is older.
    if PDL:
        wait_for_previous()
        launch_dependents()
    at_head = b * HEADS + h
    scale_ptr += at_head * (3 * BLOCK_T)
    read = tl.load(scale_ptr + c, mask=c < 2 * WINDOW, other=0.0)
    beta = tl.load(scale_ptr + 2 * BLOCK_T + t, mask=t < WINDOW, other=0.0)
    pairs_ptr += at_head * (2 * BLOCK_T * BLOCK_T) + t
    solve, give = (), ()
    for s in tl.static_range(WINDOW if BLOCK_T <= 8 else 0):  # more would fill the registers
        solve += (tl.load(pairs_ptr + s * BLOCK_T, mask=t < WINDOW, other=0.0),)
        give += (tl.load(pairs_ptr + (BLOCK_T + s) * BLOCK_T, mask=t < WINDOW, other=0.0),)
    entry = (history + t) // PAGE_ROWS
    new_page = tl.load(table_ptr + entry, mask=entry < pages, other=0).to(tl.int64)
    new_row = (history + t) % PAGE_ROWS
    own = (t < tokens)[:, None] & in_d[None, :]
    v_ptr += b * stride_v_b + h * stride_v_h
    v = tl.load(v_ptr + t[:, None] * stride_v_t + d[None, :], mask=own, other=0.0)
    # The loads above stay above this, and below it the first products, which need the queries:
    # otherwise the assembler puts those first, and each load after them waits by itself.
    if PDL:
        wait_for_previous()  # over at once
    else:
        tl.debug_barrier()

    if PER_CHANNEL:
        x_ptrs = q_ptr + at_head * (2 * BLOCK_T * STATE) + c * STATE
    else:
        q_ptr += b * stride_q_b + h // RATIO * stride_q_h
        k_ptr += b * stride_k_b + h // RATIO * stride_k_h
        # By a choice of addresses: where tensors are joined, the compiler takes another order.
        x_ptrs = tl.where(c % 2 == 0, q_ptr + c // 2 * stride_q_t, k_ptr + c // 2 * stride_k_t)
    channel = tl.arange(0, BLOCK_N)
    queries = ()
    for p in tl.static_range(PARTS):
        n_part = p * BLOCK_N + channel
        inside = (c < 2 * WINDOW)[:, None] & (n_part < STATE)[None, :]
        queries += (tl.load(x_ptrs[:, None] + n_part[None, :], mask=inside, other=0.0),)
    live = j < history
    row_u_ptr += h * stride_row_u_h
    rows = tl.load(
        row_u_ptr + at_rows[:, None] + d[None, :], mask=live[:, None] & in_d[None, :], other=0.0,
        eviction_policy="evict_first",
    )  # fmt: skip
    weight_ptr += at_head * (ROWS * 2 * BLOCK_T)
    weight = tl.load(
        weight_ptr + j[:, None] * (2 * BLOCK_T) + c[None, :],
        mask=live[:, None] & (c < 2 * WINDOW)[None, :], other=0.0,
    )  # fmt: skip

    large = tl.zeros([BLOCK_D, 2 * BLOCK_T], tl.float32)
    small = tl.zeros([BLOCK_D, 2 * BLOCK_T], tl.float32)
    for p in tl.static_range(PARTS):
        x = tl.trans(columns_to_units(queries[p], UNIT) if PERMUTE else queries[p])
        if tiles[p].dtype == tl.float16 and x.dtype == tl.float16:  # one product, exact as well
            state, wanted = (tiles[p],), (x,)
        else:
            state, wanted = operand_terms(tiles[p], INTERPRET), operand_terms(x, INTERPRET)
        parts = ()
        for i in tl.static_range(len(state)):
            if PERMUTE:
                parts += (_to_units(state[i], WARPS),)
            else:
                parts += (state[i].reshape(BLOCK_D, BLOCK_N),)
        large, small = add_products(large, small, parts, wanted)
    seen = (large + small) * read[None, :]
    seen, small = add_products(
        seen, tl.zeros([BLOCK_D, 2 * BLOCK_T], tl.float32),
        operand_terms(tl.trans(rows), INTERPRET), operand_terms(weight, INTERPRET),
    )  # fmt: skip
    y, recalled = tl.split((seen + small).reshape(BLOCK_D, BLOCK_T, 2))

    u = beta[None, :] * (tl.trans(v).to(tl.float32) - recalled)
    for s in tl.static_range(WINDOW):
        # Column s is final: no row after it leads to it.
        u_s = tl.sum(tl.where((t == s)[None, :], u, 0.0), axis=1)[:, None]
        if BLOCK_T > 8:
            to_u = tl.load(pairs_ptr + s * BLOCK_T, mask=t < WINDOW, other=0.0)
            to_y = tl.load(pairs_ptr + (BLOCK_T + s) * BLOCK_T, mask=t < WINDOW, other=0.0)
        else:
            to_u, to_y = solve[s], give[s]
        y = tl.where((to_y != 0.0)[None, :], y + to_y[None, :] * u_s, y)
        u = tl.where((to_u != 0.0)[None, :], u - to_u[None, :] * u_s, u)
    y = tl.where((t < tokens)[None, :], y, 0.0)
    tl.store(y_ptrs, round_to(y, y_ptr.dtype.element_ty), mask=in_y)

    # The window's own rows go after the history, where nobody reads in this step.
    at = new_page * stride_row_u_page + new_row * stride_row_u_row
    tl.store(
        row_u_ptr + at[None, :] + d[:, None], round_to(u, row_u_ptr.dtype.element_ty),
        mask=in_d[:, None] & (t < tokens)[None, :], eviction_policy="evict_first",
    )  # fmt: skip
    if row_v_ptr is not None:
        at = new_page * stride_row_v_page + new_row * stride_row_v_row
        row_v_ptr += h * stride_row_v_h
        tl.store(row_v_ptr + at[:, None] + d[None, :], v, mask=own, eviction_policy="evict_first")


def block_of_tokens(window: int) -> int:
    """Tokens that the arrays between prepass and readout have room for."""
    return max(4, 1 << (window - 1).bit_length())


def verify(
    y: torch.Tensor,
    plane: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    pairs: torch.Tensor,
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
    capacity: int,
    per_channel: bool,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, heads, dim]`` inputs of one layer; see the module.

    `q` and `k` are ``[batch, window, key_heads, state]``, or with `per_channel` both the prepass's
    ``[batch, heads, window, 2, state]``. A head's ``dim * state`` values are contiguous in `plane`.
    """
    batch, width, heads, dim = v.shape
    state = q.shape[-1]
    block_t = block_of_tokens(width)
    warps = min(config.num_warps, 2)  # four would take wgmma, whose operands lie in shared memory
    # Sums of more tokens, or queries of more terms, leave registers for fewer rows.
    most = 16 * warps * max(1, (8 if per_channel else 16) // block_t)
    block_d = max(16, min(config.rows or 64, block_of(dim), most))
    unit = 64 // plane.element_size()  # 16 bytes for each of 4 threads
    block_n = min(config.columns or unit, block_of(state))
    permute = block_n >= unit and block_d % (16 * warps) == 0
    kept = row_u if row_v is None else row_v
    _verify_kernel[(batch * heads * triton.cdiv(dim, block_d),)](
        y, plane, weight, scale, pairs, q, k, v, row_u, row_v,
        page, history, window, table,
        y.stride(0), y.stride(1), y.stride(2), plane.stride(0), plane.stride(1),
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2),
        row_u.stride(0), row_u.stride(1), row_u.stride(2),
        kept.stride(0), kept.stride(1), kept.stride(2),
        table.stride(0), table.shape[1],
        HEADS=heads, RATIO=1 if per_channel else heads // q.shape[2], DIM=dim, STATE=state,
        WINDOW=width, BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_N=block_n,
        PARTS=triton.cdiv(state, block_n), UNIT=unit if permute else block_n,
        BLOCK_J=block_of(capacity), ROWS=weight.shape[2], PAGE_ROWS=row_u.shape[1],
        WARPS=warps, PERMUTE=permute,
        PER_CHANNEL=per_channel, INTERPRET=interpreting(), PDL=pdl,
        num_warps=warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
