"""Launch choices: frozen, from a table, never tuned in place (kernels write what they read)."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["LaunchConfig", "interpreting"]


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is launched for one device, shape and batch bucket.

    Attributes
    ----------
    num_warps, num_stages : int
    block_d : int
        Rows of a state tile; 0 means the whole head.
    heads_per_program : int
        Heads that one program walks through.
    programs_per_sm : int
        Resident programs of a persistent grid.
    dot : bool
        Use matrix units where the types allow it.
    """

    num_warps: int = 4
    num_stages: int = 1
    block_d: int = 0
    heads_per_program: int = 1
    programs_per_sm: int = 4
    dot: bool = True


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (set before Triton's first import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
