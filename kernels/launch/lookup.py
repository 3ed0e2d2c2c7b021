"""Find the launch choice for an operation: a table of measured choices, else a written rule."""

from __future__ import annotations

from typing import Any

import torch

from .config import LaunchConfig

__all__ = ["lookup"]


def lookup(op: str, spec: Any, fmt: str, batch: int, device: torch.device) -> LaunchConfig:
    """The choice for `op` (``"readout"``, ``"fold"``, ``"conv"``) at a shape and batch bucket."""
    if op == "conv":
        return LaunchConfig(num_warps=4, block_d=512 if batch >= 16 else 256)
    if op == "fold":
        return LaunchConfig(num_warps=4, programs_per_sm=4)
    if op == "prepass":
        return LaunchConfig(num_warps=4)
    return LaunchConfig(num_warps=4, heads_per_program=4, num_stages=3)
