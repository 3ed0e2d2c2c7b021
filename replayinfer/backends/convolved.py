"""What backends share of a readout that convolves its own inputs."""

from __future__ import annotations

from typing import Any

import torch

from ..pools import StatePool

__all__ = ["join_heads", "split_line", "why_not_convolved"]


def why_not_convolved(pool: StatePool) -> str | None:
    """None for a pool of a family whose lines a readout can convolve, else the reason."""
    spec: Any = pool.spec
    if spec.family != "gdn":
        return f"family {spec.family!r}; it convolves for gdn"
    if spec.dim % 2:
        return f"dim={spec.dim}; its channels are convolved in pairs"
    return None


def split_line(pool: StatePool, line: torch.Tensor) -> dict[str, torch.Tensor]:
    """``q``, ``k`` and ``v`` ``[bucket, 1, heads, ...]`` as views of ``[bucket, channels]``."""
    spec: Any = pool.spec
    keys = spec.key_heads * spec.state
    q, k, v = line[:, None].split([keys, keys, spec.heads * spec.dim], dim=-1)
    return {
        "q": q.unflatten(-1, (spec.key_heads, spec.state)),
        "k": k.unflatten(-1, (spec.key_heads, spec.state)),
        "v": v.unflatten(-1, (spec.heads, spec.dim)),
    }


def join_heads(pool: StatePool, x: torch.Tensor) -> torch.Tensor:
    """The line ``[bucket, channels]`` of what lies by key head."""
    spec: Any = pool.spec
    values = spec.heads // spec.key_heads * spec.dim
    parts = x.split([spec.state, spec.state, values], dim=2)
    return torch.cat([part.flatten(1) for part in parts], dim=1)
