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
    num_warps : int
    rows : int
        Rows of a tile: of the state, or of the history in the prepass. 0 leaves it to the launcher.
    columns : int
        Channels of a state tile in the fold; 0 leaves it to the launcher.
    heads : int
        Heads of a program; 0 means all that share a group.
    stages : int
        Heads in flight where a program walks several.
    programs_per_sm : int
        Resident programs of a persistent grid.
    registers : int
        Most registers of a thread, for more resident programs; 0 leaves it to the compiler.
    """

    num_warps: int = 4
    rows: int = 0
    columns: int = 0
    heads: int = 0
    stages: int = 1
    programs_per_sm: int = 4
    registers: int = 0


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (set before Triton's first import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
