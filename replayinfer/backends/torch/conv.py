"""Causal depthwise convolution over a window, with its pre-convolution rows kept in a ring."""

from __future__ import annotations

import torch

from ...planner import Plan
from ...pools import StatePool
from ..base import ShiftedConvolution
from .gates import silu
from .rows import Window

__all__ = ["conv_update", "shift_update"]


def conv_update(
    pool: StatePool, plan: Plan, layer: int, window: Window, x: torch.Tensor
) -> torch.Tensor:
    """``y_t = activation(bias + sum_i weight_i x_{t - width + 1 + i})``.

    Float32 ``[n, window, channels]``.
    Window rows go into the ring as given. A rejected one is overwritten by the next window, since
    its place follows from the token's position alone.
    """
    ring, taps = pool.conv.rows[layer], pool.conv.taps
    new = window.take(x)
    place = plan.arrays.conv_place[: plan.batch].long()
    slot = plan.arrays.slot[: plan.batch].long()
    back = torch.arange(-taps, 0, device=x.device)
    old = ring[slot[:, None], (place[:, None] + back) % pool.conv.ring].float()
    ring[window.slot, window.ring] = new[window.sequence, window.token].to(ring.dtype)

    line = torch.cat([old, new], dim=1)  # [n, taps + window, channels]
    weight = pool.weights["conv_weight"][layer]
    sequence = torch.arange(window.batch, device=x.device)[:, None]
    y = pool.weights["conv_bias"][layer].expand(new.shape)
    for i in range(taps + 1):
        y = y + weight[:, i] * line[sequence, window.taps[:, :, i]]
    return silu(y) if pool.spec.conv_activation == "silu" else y


def shift_update(conv: ShiftedConvolution, window: torch.Tensor) -> torch.Tensor:
    """Outputs ``[bucket, channels]`` in the type of ``x``; windows move where `window` has a token.

    `window` is int32 ``[bucket]``.
    """
    live = window > 0
    slots = torch.where(live, conv.slots, 0).long()
    line = torch.cat([conv.states[slots], conv.x[:, :, None]], dim=2)
    conv.states[slots[live]] = line[live][:, :, 1:]
    y = (line.float() * conv.weight.float()).sum(2)
    if conv.bias is not None:
        y = y + conv.bias.float()
    return torch.where(live[:, None], silu(y) if conv.activation else y, 0.0).to(conv.x.dtype)
