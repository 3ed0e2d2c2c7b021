"""Causal depthwise convolution of one step, over rings of pre-convolution rows.

::

    y_t = activation(bias + sum_i weight_i x_{t - width + 1 + i})

Token ``t`` of the window lies at ring place ``(place + t) % ring``; the rows before it come from
the ring or from the window itself, where in a draft tree they are the node's ancestors. Writes ``y
[batch, window, channels]`` and the window's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu
from ..common.split import round_to
from ..launch.config import LaunchConfig

__all__ = ["conv_update"]


@triton.jit
def _highest_bit(bits):
    """Its number, -1 for none; `bits` has up to 24."""
    exponent = (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent, -1)


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=["ring", "blocks", "stride_ancestors_b"],
    do_not_specialize_on_alignment=[
        "weight_ptr", "slot_ptr", "place_ptr", "window_ptr", "ancestors_ptr",
    ],
)  # fmt: skip
def _conv_update_kernel(
    y_ptr, x_ptr, ring_ptr, weight_ptr, bias_ptr,
    slot_ptr, place_ptr, window_ptr, ancestors_ptr,
    stride_y_b, stride_y_t, stride_x_b, stride_x_t, stride_ring_slot, stride_ring_row,
    stride_ancestors_b, channels, ring, blocks,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK_C: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    b = pid // blocks
    ch = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = ch < channels
    slot = tl.load(slot_ptr + b).to(tl.int64)
    tokens = tl.load(window_ptr + b)
    place = tl.load(place_ptr + b)
    bias = tl.load(bias_ptr + ch, mask=in_c, other=0.0)
    ring_ptr += slot * stride_ring_slot
    x_ptr += b * stride_x_b
    y_ptr += b * stride_y_b
    if WINDOW > 1:
        ancestors_ptr += b * stride_ancestors_b
    for t in tl.static_range(WINDOW):
        live = (slot >= 0) & (t < tokens)
        inputs = ()  # newest first
        if WINDOW == 1:
            inputs += (tl.load(x_ptr + ch, mask=in_c & live, other=0.0),)
            for back in tl.static_range(1, WIDTH):
                at = (place + ring - back) % ring
                row_ptr = ring_ptr + at * stride_ring_row + ch
                inputs += (tl.load(row_ptr, mask=in_c & live, other=0.0),)
        else:
            node = place * 0 + t  # of the window; below 0 it counts the rows before the window
            above = tl.load(ancestors_ptr + t)
            for _ in tl.static_range(WIDTH):
                at = (place + node + ring) % ring
                row_ptr = tl.where(
                    node < 0, ring_ptr + at * stride_ring_row, x_ptr + node * stride_x_t
                )
                inputs += (tl.load(row_ptr + ch, mask=in_c & live, other=0.0),)
                # Up the tree; above its root on through the ring, newest first.
                above = tl.where(node < 0, 0, above & ~(1 << tl.maximum(node, 0)))
                node = tl.where(above == 0, tl.minimum(node, 0) - 1, _highest_bit(above))
        y = bias
        for i in tl.static_range(WIDTH):
            weight = tl.load(weight_ptr + ch * WIDTH + i, mask=in_c, other=0.0)
            y += weight * inputs[WIDTH - 1 - i].to(tl.float32)
        if SILU:
            y = silu(y)
        y = tl.where(live, y, 0.0)
        tl.store(y_ptr + t * stride_y_t + ch, round_to(y, y_ptr.dtype.element_ty), mask=in_c)
    # The ring is longer than taps + window, so no row read above is overwritten.
    for t in tl.static_range(WINDOW):
        live = (slot >= 0) & (t < tokens)
        x = tl.load(x_ptr + t * stride_x_t + ch, mask=in_c & live, other=0.0)
        at = (place + t) % ring
        tl.store(ring_ptr + at * stride_ring_row + ch, x, mask=in_c & live)


def conv_update(
    y: torch.Tensor,
    x: torch.Tensor,
    ring: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    slot: torch.Tensor,
    place: torch.Tensor,
    window: torch.Tensor,
    ancestors: torch.Tensor | None,
    *,
    activation: str | None,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, channels]`` with rings ``[slots, ring, channels]``.

    `ancestors` int32 ``[batch, window]`` has bit ``s`` of node ``t`` where ``s`` is ``t`` or leads
    to it; a window of one token needs none.
    """
    batch, steps, channels = x.shape
    block = min(config.rows or 256, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    _conv_update_kernel[(batch * blocks,)](
        y, x, ring, weight, bias,
        slot, place, window, ancestors,
        y.stride(0), y.stride(1), x.stride(0), x.stride(1), ring.stride(0), ring.stride(1),
        0 if ancestors is None else ancestors.stride(0), channels, ring.shape[1], blocks,
        WIDTH=weight.shape[1], WINDOW=steps, BLOCK_C=block, SILU=activation == "silu",
        num_warps=config.num_warps,
    )  # fmt: skip
