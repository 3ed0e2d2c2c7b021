"""Find the launch choice for an operation: a table of measured choices, else a written rule."""

from __future__ import annotations

from typing import Any

import torch

from .config import LaunchConfig

__all__ = ["lookup"]


def lookup(op: str, spec: Any, fmt: str, batch: int, device: torch.device) -> LaunchConfig | None:
    if op == "conv":
        return LaunchConfig(num_warps=4, rows=512 if batch >= 16 else 256)
    if op == "fold":
        return LaunchConfig(num_warps=4, rows=32, programs_per_sm=5)
    if op == "prepass":
        return LaunchConfig(num_warps=4, rows=8)
    if op == "fused":
        return LaunchConfig(num_warps=2, rows=16) if batch * spec.heads <= 2048 else None
    return LaunchConfig(num_warps=1, rows=32)
