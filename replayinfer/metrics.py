"""Counters of what steps did, in units that can be compared with a kernel without replay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["StepCounters"]


@dataclass
class StepCounters:
    """Totals since construction or `reset`.

    Attributes
    ----------
    steps, tokens : int
        Committed steps and the tokens they accepted.
    direct_steps : int
        Steps among them that moved the states in place, without rows.
    folds, forced_folds, early_folds : int
        All folds; those that only ``force_fold`` or a direct step asked for (also where a direct
        step copies a shared page); those that the policy added.
    rows_rejected : int
        Window rows that were not accepted.
    aborted : int
        Plans that were aborted.
    state_bytes : int
        Bytes of checkpoints and rows that the steps had to move, over all layers of the pool.
    state_bytes_standard : int
        What a kernel that reads the state once and writes it for every token would have moved.
    """

    steps: int = 0
    tokens: int = 0
    direct_steps: int = 0
    folds: int = 0
    forced_folds: int = 0
    early_folds: int = 0
    rows_rejected: int = 0
    aborted: int = 0
    state_bytes: int = 0
    state_bytes_standard: int = 0

    def reset(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, 0)

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)
