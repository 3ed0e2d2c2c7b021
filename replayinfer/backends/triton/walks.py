"""Steps on a caller's own states: straight to the kernels."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["delta_walk", "mamba2_ring", "mamba2_walk", "why_not"]


def why_not(device: torch.device) -> str | None:
    """None where the kernels run on `device`, else the reason why not."""
    from replayinfer.kernels.launch.config import interpreting

    if device.type == "cuda" or (device.type == "cpu" and interpreting()):
        return None
    return (
        f"device {device}; they run on cuda, or on a CPU with TRITON_INTERPRET=1 set before "
        "Triton is imported"
    )


def mamba2_walk(*args: Any, **options: Any) -> None:
    from replayinfer.kernels.mamba2.walk import walk

    walk(*args, **options)


def mamba2_ring(*args: Any, **options: Any) -> None:
    from replayinfer.kernels.mamba2.ring import ring

    ring(*args, **options)


def delta_walk(*args: Any, **options: Any) -> None:
    from replayinfer.kernels.delta.walk import walk

    walk(*args, **options)
