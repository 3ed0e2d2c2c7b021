"""Mamba-2 decode prepass: all about the rows that does not depend on ``dim``.

::

    weight_j = dt_j exp(A d(j,t)) (B_j . C)      decay = exp(A d(0,t))      own = dt (B . C) + D

with ``d(j, t)`` the sum of ``dt`` over the rows ``(j, t]``. Reads the ``B`` and ``dt`` rows; writes
``weight [batch, heads, rows]`` (live rows only) and ``scale [batch, heads, 2]`` (decay, own)
for the readout, and the token's ``B`` and ``dt`` row. A program is one group of one sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import clamp, softplus
from ..common.pdl import launch_dependents, wait_for_previous
from ..common.rows import row_offset
from ..common.split import load_pairs, store_pairs
from ..launch.config import LaunchConfig

__all__ = ["prepass"]


@triton.jit(
    # Only counted with, so that knowing more would gain nothing.
    do_not_specialize=["stride_table_b", "pages"],
    do_not_specialize_on_alignment=["scale_ptr", "history_ptr", "window_ptr", "table_ptr"],
)
def _prepass_kernel(
    weight_ptr, scale_ptr, dt_ptr, b_ptr, c_ptr,
    a_ptr, d_skip_ptr, dt_bias_ptr,
    row_b_ptr, row_dt_ptr,
    history_ptr, window_ptr, table_ptr,
    stride_dt_b, stride_b_b, stride_b_g, stride_c_b, stride_c_g,
    stride_row_b_page, stride_row_b_row, stride_row_b_g,
    stride_row_dt_page, stride_row_dt_row,
    stride_table_b, pages, dt_min, dt_max,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr,
    BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_J: tl.constexpr,
    PAGE_ROWS: tl.constexpr, SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)  # all of the grid on axis 0
    group = pid % GROUPS
    b = (pid // GROUPS).to(tl.int64)
    h = group * HEADS + tl.arange(0, BLOCK_H)
    j = BLOCK_J - 1 - tl.arange(0, BLOCK_J)  # from the end: sums over later rows scan forwards
    # Pairs of channels in chunks of 64 bytes, as in the readout: two shuffles to a sum.
    n = tl.arange(0, CHUNKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    in_h, in_n = tl.arange(0, BLOCK_H) < HEADS, n < STATE // 2
    rate = tl.load(a_ptr + h, mask=in_h, other=0.0)
    skip = tl.load(d_skip_ptr + h, mask=in_h, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + h, mask=in_h, other=0.0)
    if PDL:
        wait_for_previous()  # whatever made the inputs, or folded
        launch_dependents()  # only now: the readout reads those before it waits for this kernel

    tokens = tl.load(window_ptr + b)
    history = tl.load(history_ptr + b)
    table_ptr += b * stride_table_b
    at_b = row_offset(table_ptr, j, pages, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
    at_dt = row_offset(table_ptr, j, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    at_next = row_offset(table_ptr, j + 1, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    c, c_odd = load_pairs(c_ptr + b * stride_c_b + group * stride_c_g, n, in_n, False)
    new_b, new_b_odd = load_pairs(b_ptr + b * stride_b_b + group * stride_b_g, n, in_n, False)
    dt = tl.load(dt_ptr + b * stride_dt_b + h, mask=in_h, other=0.0).to(tl.float32) + dt_bias
    if tokens == 0:  # pad or empty window: the readout writes its zeros
        return

    live, more = j < history, j + 1 < history
    row_b_ptr += group * stride_row_b_g
    rows_b, rows_b_odd = load_pairs(
        row_b_ptr, at_b[:, None, None] // 2 + n[None, :, :],
        live[:, None, None] & in_n[None, :, :], ONCE=True,
    )  # fmt: skip
    own = tl.load(
        row_dt_ptr + at_dt[:, None] + h[None, :], mask=live[:, None] & in_h[None, :], other=0.0
    )
    following = tl.load(
        row_dt_ptr + at_next[:, None] + h[None, :], mask=more[:, None] & in_h[None, :], other=0.0
    )
    tl.debug_barrier()  # keeps the loads above the arithmetic, so that all are in flight

    if SOFTPLUS:
        dt = softplus(dt)
    dt = clamp(dt, dt_min, dt_max)
    # Sums over (j, t]: the rows' dt shifted by one, this token's in the last place, scanned from
    # the end. Never a difference of prefix sums.
    following = tl.where((j + 1 == history)[:, None], dt[None, :], following)
    reach = tl.cumsum(following, axis=0)
    seen = tl.sum(rows_b * c[None, :, :], axis=1) + tl.sum(rows_b_odd * c_odd[None, :, :], axis=1)
    seen = tl.sum(seen, axis=1)
    weight = own * tl.exp(rate[None, :] * reach) * seen[:, None]
    at = b * (GROUPS * HEADS) + h
    # Overwritten by the next layer: kept in L2 until then, it need never go to memory.
    tl.store(
        weight_ptr + at[None, :] * BLOCK_J + j[:, None], weight,
        mask=in_h[None, :] & live[:, None], eviction_policy="evict_last",
    )  # fmt: skip
    tl.store(scale_ptr + at * 2, tl.exp(rate * (tl.sum(own, axis=0) + dt)), mask=in_h)
    new_seen = tl.sum(tl.sum(new_b * c + new_b_odd * c_odd, axis=0), axis=0)
    tl.store(scale_ptr + at * 2 + 1, dt * new_seen + skip, mask=in_h)

    # The token's own row goes to index `history`, which nobody reads in this step.
    at = row_offset(table_ptr, history, pages, stride_row_b_page, stride_row_b_row, PAGE_ROWS)
    store_pairs(row_b_ptr, at // 2 + n, new_b, new_b_odd, in_n)
    at = row_offset(table_ptr, history, pages, stride_row_dt_page, stride_row_dt_row, PAGE_ROWS)
    tl.store(row_dt_ptr + at + h, dt, mask=in_h)


def prepass(
    weight: torch.Tensor,
    scale: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d_skip: torch.Tensor,
    dt_bias: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    pdl: bool,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, ...]`` inputs of one token and one layer; see the module."""
    batch, groups, state = b.shape
    heads = dt.shape[1] // groups
    _prepass_kernel[(batch * groups,)](
        weight, scale, dt, b, c,
        a, d_skip, dt_bias,
        row_b, row_dt,
        history, window, table,
        dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        row_b.stride(0), row_b.stride(1), row_b.stride(2),
        row_dt.stride(0), row_dt.stride(1),
        table.stride(0), table.shape[1], dt_limit[0], dt_limit[1],
        GROUPS=groups, HEADS=heads, STATE=state,
        # 16 at least: Triton does not compile a scan of fewer values than threads.
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        CHUNKS=triton.next_power_of_2(triton.cdiv(state, 32)),
        BLOCK_J=weight.shape[2],
        PAGE_ROWS=row_b.shape[1], SOFTPLUS=dt_softplus, PDL=pdl,
        num_warps=config.num_warps, maxnreg=config.registers or None, launch_pdl=pdl,
    )  # fmt: skip
