"""When a sequence must fold: the one rule that host, device and kernels use."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["must_fold"]


@overload
def must_fold(history: int, window: int, capacity: int) -> bool: ...
@overload
def must_fold(
    history: NDArray[np.integer[Any]], window: NDArray[np.integer[Any]], capacity: int
) -> NDArray[np.bool_]: ...
def must_fold(history: Any, window: Any, capacity: int) -> Any:
    """Whether the window of this step does not fit after the history: ``h + T > L``.

    Folds run before readouts, so only this step's window has to fit.

    Examples
    --------
    >>> must_fold(15, 1, 16), must_fold(16, 1, 16), must_fold(13, 4, 16)
    (False, True, True)
    """
    return history + window > capacity
