"""Chunked prefill in plain torch: each chunk is a window that continues the state before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...pools import StatePool
from .gates import silu

__all__ = ["prefill_conv_one", "prefill_one"]

# Tokens of a chunk. Its products take chunk * chunk * heads * channels numbers.
_CHUNK = 16

ChunkFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def prefill_one(
    pool: StatePool,
    layer: int,
    chunk: ChunkFunction,
    state: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Run one sequence's tokens ``[tokens, ...]`` from `state`; returns the final state."""
    for start in range(0, out.shape[0], _CHUNK):
        part = {name: value[None, start : start + _CHUNK] for name, value in inputs.items()}
        y, state = chunk(pool, pool.spec, layer, state, part)
        out[start : start + _CHUNK] = y[0].to(out.dtype)
    return state


def prefill_conv_one(
    pool: StatePool, layer: int, before: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Convolve one sequence's rows ``[tokens, channels]``; returns its last `taps` rows."""
    line = torch.cat([before, x])
    weight = pool.weights["conv_weight"][layer]
    y = pool.weights["conv_bias"][layer].expand(x.shape)
    for i in range(pool.spec.conv_width):
        y = y + weight[:, i] * line[i : i + x.shape[0]].float()
    if pool.spec.conv_activation == "silu":
        y = silu(y)
    out.copy_(y)
    return line[line.shape[0] - pool.conv.taps :]
