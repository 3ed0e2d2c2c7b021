"""Causal depthwise convolution of one step, over rings of pre-convolution rows.

::

    y_t = activation(bias + sum_i weight_i x_{t - width + 1 + i})

Token ``t`` of the window lies at ring place ``(place + t) % ring``; the rows before it come from
the ring or from the window itself. Writes ``y [batch, window, channels]`` and the window's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.gates import silu
from ..common.split import round_to
from ..launch.config import LaunchConfig

__all__ = ["conv_update"]


@triton.jit(
    # Read a word at a time, or only counted with, so that knowing more would gain nothing.
    do_not_specialize=["ring", "blocks"],
    do_not_specialize_on_alignment=["weight_ptr", "slot_ptr", "place_ptr", "window_ptr"],
)  # fmt: skip
def _conv_update_kernel(
    y_ptr, x_ptr, ring_ptr, weight_ptr, bias_ptr,
    slot_ptr, place_ptr, window_ptr,
    stride_y_b, stride_y_t, stride_x_b, stride_x_t, stride_ring_slot, stride_ring_row,
    channels, ring, blocks,
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
    ring_ptr += slot * stride_ring_slot + ch
    x_ptr += b * stride_x_b + ch
    y_ptr += b * stride_y_b + ch
    for t in tl.static_range(WINDOW):
        live = (slot >= 0) & (t < tokens)
        y = bias
        for i in tl.static_range(WIDTH):
            # t - WIDTH + 1 + i counts from the window's first token.
            if t + 1 + i < WIDTH:
                at = (place + (t - WIDTH + 1 + i) + ring) % ring
                x = tl.load(ring_ptr + at * stride_ring_row, mask=in_c & live, other=0.0)
            else:
                x = tl.load(x_ptr + (t - WIDTH + 1 + i) * stride_x_t, mask=in_c & live, other=0.0)
            y += tl.load(weight_ptr + ch * WIDTH + i, mask=in_c, other=0.0) * x.to(tl.float32)
        if SILU:
            y = silu(y)
        y = tl.where(live, y, 0.0)
        tl.store(y_ptr + t * stride_y_t, round_to(y, y_ptr.dtype.element_ty), mask=in_c)
    # The ring is longer than taps + window, so no row read above is overwritten.
    for t in tl.static_range(WINDOW):
        live = (slot >= 0) & (t < tokens)
        x = tl.load(x_ptr + t * stride_x_t, mask=in_c & live, other=0.0)
        at = (place + t) % ring
        tl.store(ring_ptr + at * stride_ring_row, x, mask=in_c & live)


def conv_update(
    y: torch.Tensor,
    x: torch.Tensor,
    ring: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    slot: torch.Tensor,
    place: torch.Tensor,
    window: torch.Tensor,
    *,
    activation: str | None,
    config: LaunchConfig,
) -> None:
    """Launch over ``[batch, window, channels]`` with rings ``[slots, ring, channels]``."""
    batch, steps, channels = x.shape
    block = min(config.rows or 256, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, block)
    _conv_update_kernel[(batch * blocks,)](
        y, x, ring, weight, bias,
        slot, place, window,
        y.stride(0), y.stride(1), x.stride(0), x.stride(1), ring.stride(0), ring.stride(1),
        channels, ring.shape[1], blocks,
        WIDTH=weight.shape[1], WINDOW=steps, BLOCK_C=block, SILU=activation == "silu",
        num_warps=config.num_warps,
    )  # fmt: skip
