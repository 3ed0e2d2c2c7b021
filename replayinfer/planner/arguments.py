"""What callers pass to a planner, as arrays: checked and refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError
from ..pools import StatePool
from .plan import Plan

__all__ = [
    "choose_bucket",
    "count_array",
    "flag_array",
    "goes_direct",
    "step_width",
    "window_array",
]


def window_array(pool: StatePool, windows: ArrayLike | None, n: int) -> NDArray[np.int32]:
    """New tokens of `n` sequences, int32 ``[n]``; 1 each if omitted."""
    if windows is None:
        return np.ones(n, dtype=np.int32)
    given = _as_array(windows, np.int32)
    if given.dtype.kind not in "iu" or given.ndim > 1 or (given.ndim and given.size != n):
        raise InputError(
            f"windows: got {given.dtype} {list(given.shape)}; allowed an integer or an integer "
            f"array [{n}]; give one window per sequence"
        )
    limit = pool.max_window
    low, high = int(given.min(initial=0)), int(given.max(initial=0))
    if low < 0 or high > limit:
        raise InputError(
            f"windows: got {low if low < 0 else high}; allowed 0..{limit} (max_window of the "
            "pool); make the pool with a larger max_window, since no window is truncated"
        )
    return np.broadcast_to(given, (n,)).astype(np.int32)


def flag_array(mask: ArrayLike | None, n: int) -> NDArray[np.bool_]:
    """Which of `n` sequences are told to fold, bool ``[n]``."""
    if mask is None:
        return np.zeros(n, dtype=bool)
    given = _as_array(mask, np.bool_)
    if given.dtype != np.bool_ or given.ndim > 1 or (given.ndim and given.size != n):
        raise InputError(
            f"force_fold: got {given.dtype} {list(given.shape)}; allowed a bool or a bool "
            f"array [{n}]; give one flag per sequence"
        )
    return np.broadcast_to(given, (n,))


def choose_bucket(sizes: tuple[int, ...], n: int, bucket: int | None) -> int:
    """The rows of the padded batch, from the planner's `sizes` or the caller's choice."""
    if bucket is None:
        for size in sizes:
            if size >= n:
                return size
        if sizes:
            raise InputError(
                f"sequences: got {n}; allowed at most the largest bucket, {sizes[-1]}; "
                "add a bucket or split the batch"
            )
        return max(n, 1)
    if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < max(n, 1):
        raise InputError(
            f"bucket: got {bucket!r}; allowed an integer >= {max(n, 1)}; pad to at least the batch"
        )
    return bucket


def step_width(pool: StatePool, windows: NDArray[np.int32], window: int | None) -> int:
    """Tokens per row of the step's tensors."""
    longest = int(windows.max(initial=0))
    if window is None:
        return max(longest, 1)
    limit = pool.max_window
    if (
        isinstance(window, bool)
        or not isinstance(window, int)
        or not (max(longest, 1) <= window <= limit)
    ):
        raise InputError(
            f"window: got {window!r}; allowed {max(longest, 1)}..{limit}; it is the token "
            "axis of the step's tensors"
        )
    return window


def goes_direct(
    direct: bool | Callable[[int], bool],
    windows: NDArray[np.int32],
    width: int,
    tree: bool,
    bucket: int,
) -> bool:
    """Whether a step moves the states themselves, as far as its arguments decide."""
    if not isinstance(direct, bool) and not callable(direct):
        raise InputError(
            f"direct: got {direct!r}; allowed a bool or a function of the bucket; say whether "
            "the step moves the states themselves"
        )
    if direct is False:
        return False
    longest = int(windows.max(initial=0))
    if direct is not True:
        return not tree and width == 1 and bool(direct(bucket))
    advice = "plan it with direct=False, since a state that has moved takes no token back"
    if tree:
        raise InputError(
            f"parents: got draft trees for a direct step; allowed windows of 0 or 1; {advice}"
        )
    if longest > 1 or width > 1:
        name, got = ("windows", longest) if longest > 1 else ("window", width)
        allowed = "0 or 1" if longest > 1 else "1"
        raise InputError(f"{name}: got {got} for a direct step; allowed {allowed}; {advice}")
    return True


def count_array(plan: Plan, accepted: ArrayLike | torch.Tensor) -> NDArray[np.int32]:
    """Accepted tokens of each sequence of a host plan, int32 ``[batch]``."""
    if isinstance(accepted, torch.Tensor):
        accepted = accepted.cpu().numpy()
    counts = _as_array(accepted, np.int32)
    if counts.dtype.kind not in "iu" or counts.shape != (plan.batch,):
        raise InputError(
            f"accepted: got {counts.dtype} {list(counts.shape)}; allowed integers "
            f"[{plan.batch}]; give one count per sequence, pads left out"
        )
    bad = (counts < 0) | (counts > plan.windows)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise InputError(
            f"accepted: got {int(counts[i])} for sequence {i} of the plan; allowed "
            f"0..{int(plan.windows[i])}, its window; nothing was committed"
        )
    short = counts < plan.windows
    if plan.moved and short.any():
        i = int(np.flatnonzero(short)[0])
        raise InputError(
            f"accepted: got 0 for sequence {i} of a direct step; allowed 1, its window, since "
            "its state has moved already; commit it and free the sequence, or plan with "
            "direct=False where a token may be refused"
        )
    return counts.astype(np.int32)


def _as_array(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """As numpy reads it; an empty list, which it takes for floats, becomes `dtype`."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        array = np.asarray(values, dtype=object)
    return array if array.size else array.astype(dtype)
