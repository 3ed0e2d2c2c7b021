"""When a sequence must fold: the one rule that host, device and kernels use."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["must_fold"]

# int or an integer array: the rule is one expression for both.
T = TypeVar("T")


def must_fold(history: T, window: T, capacity: int) -> T:
    """Whether the window of this step does not fit after the history: ``h + T > L``.

    Folds run before readouts, so only this step's window has to fit.

    Examples
    --------
    >>> must_fold(15, 1, 16), must_fold(16, 1, 16), must_fold(13, 4, 16)
    (False, True, True)
    """
    return history + window > capacity  # type: ignore[operator, no-any-return]
