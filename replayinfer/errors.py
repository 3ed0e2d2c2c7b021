"""What the library raises.

Every message reads ``<name>: got <observed>; allowed <rule>; <what to do>``, and everything is
raised before anything changes: refused input leaves pools, plans and outputs as they were.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckError",
    "InputError",
    "NonFiniteStateError",
    "PlanError",
    "ReplayError",
    "StaleHandleError",
    "UnsupportedError",
]


class ReplayError(Exception):
    """Base of everything this library raises on purpose."""


class InputError(ReplayError, ValueError):
    """An argument has the wrong value, shape, dtype, device or stride."""


class UnsupportedError(ReplayError, ValueError):
    """A device, type, size or family that this build does not serve; raised at construction."""


class CapacityError(ReplayError, RuntimeError):
    """A pool has not enough left; nothing was taken.

    Attributes
    ----------
    pool : str
        What ran out: ``"sequence slots"``, ``"checkpoint pages"`` or ``"input pages"``.
    needed, free : int
        How many the call needed and how many were free.
    """

    def __init__(self, pool: str, needed: int, free: int, advice: str) -> None:
        super().__init__(f"{pool}: got a need of {needed}; allowed {free} (free now); {advice}")
        self.pool = pool
        self.needed = needed
        self.free = free


class StaleHandleError(ReplayError, RuntimeError):
    """A sequence handle that is not live in this pool: freed, freed twice, or another pool's."""


class PlanError(ReplayError, RuntimeError):
    """plan, fold, run, commit and abort out of order, or a sequence that a plan holds."""


class CheckError(ReplayError, AssertionError):
    """``REPLAYINFER_CHECK=1`` found a fault of this library or of a kernel; please report it."""


class NonFiniteStateError(ReplayError, ArithmeticError):
    """``REPLAYINFER_CHECK=1`` found a state or output that is not finite.

    Attributes
    ----------
    sequences : list of int
        Their handles. Abort the step and free them; nobody else's state is affected.
    """

    def __init__(self, message: str, sequences: list[int]) -> None:
        super().__init__(message)
        self.sequences = sequences
