"""What callers pass to a device planner, as tensors on the device; refused by form, never by value.

Values on the host are looked at where they are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..checks import capturing, dtype_name
from ..errors import InputError, PlanError, UnsupportedError
from ..pools import StatePool
from .arguments import flag_array, window_array
from .device_plan import DevicePlan
from .trees import check_parents, check_paths, mask_columns, pad_paths, parent_array

__all__ = [
    "INTEGERS",
    "check_array",
    "count_vector",
    "forced_folds",
    "new_tokens",
    "parent_matrix",
    "path_matrix",
    "require_no_capture",
]

INTEGERS = (torch.int32, torch.int64)


def check_array(
    pool: StatePool,
    name: str,
    value: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    advice: str,
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor that kernels cannot read; an axis of None has any length."""
    device = device or pool.device
    fits = value.dim() == len(shape) and value.dtype in dtypes and value.device == device
    fits = fits and all(n in (None, have) for n, have in zip(shape, value.shape, strict=True))
    if not fits or not value.is_contiguous():
        allowed = " or ".join(dtype_name(d) for d in dtypes)
        sizes = ", ".join("entries" if n is None else str(n) for n in shape)
        raise InputError(
            f"{name}: got {dtype_name(value.dtype)} {list(value.shape)} of strides "
            f"{list(value.stride())} on {value.device}; allowed contiguous {allowed} [{sizes}] on "
            f"{device}; give {advice}"
        )


def require_no_capture(pool: StatePool, name: str) -> None:
    """A graph would replay the upload of what a host array held at capture."""
    if capturing(pool.device):
        raise PlanError(
            f"{name}: got values on the host while the stream captures a CUDA graph; allowed a "
            "tensor on the device, since a graph would replay these; write new values into it "
            "before each replay"
        )


def new_tokens(
    pool: StatePool, windows: ArrayLike | torch.Tensor | None, entries: int
) -> tuple[int, torch.Tensor | None, int]:
    """The window of all, or those of each, and the longest that the host knows of."""
    if windows is None:
        return 1, None, 1
    if isinstance(windows, torch.Tensor):
        check_array(pool, "windows", windows, INTEGERS, (entries,), "one window per entry")
        return 0, windows, 0
    values = window_array(pool, windows, entries)
    longest = int(values.max(initial=0))
    if np.ndim(windows) == 0:
        return longest, None, longest
    require_no_capture(pool, "windows")
    return 0, pool.upload(torch.from_numpy(values)), longest


def forced_folds(
    pool: StatePool, force_fold: ArrayLike | torch.Tensor | None, entries: int
) -> torch.Tensor | None:
    """Flags ``[entries]``; None where none is set."""
    if force_fold is None:
        return None
    if isinstance(force_fold, torch.Tensor) and force_fold.dim():
        check_array(pool, "force_fold", force_fold, (torch.bool,), (entries,), "one flag per entry")
        return force_fold
    values = flag_array(force_fold, entries)
    if not values.any():
        return None
    require_no_capture(pool, "force_fold")
    return pool.upload(torch.from_numpy(values.copy()))


def count_vector(plan: DevicePlan, accepted: ArrayLike | torch.Tensor) -> torch.Tensor:
    """Accepted counts ``[entries]``."""
    pool, advice = plan.pool, "one count per entry of the plan, pads included"
    counts = accepted
    if not isinstance(counts, torch.Tensor):
        try:
            counts = torch.from_numpy(np.array(accepted))
        except (TypeError, ValueError):
            raise InputError(
                f"accepted: got {type(accepted).__name__}; allowed int32 or int64 "
                f"[{plan.batch}]; give {advice}"
            ) from None
        if not counts.numel():
            counts = counts.int()
    on_host = counts.device.type == "cpu" and pool.device.type != "cpu"
    device = counts.device if on_host else pool.device
    check_array(pool, "accepted", counts, INTEGERS, (plan.batch,), advice, device)
    if on_host:
        require_no_capture(pool, "accepted")
        return pool.upload(counts)
    return counts


def parent_matrix(
    pool: StatePool,
    parents: ArrayLike | torch.Tensor,
    windows: NDArray[np.int32] | None,
    shape: tuple[int, int],
) -> tuple[torch.Tensor, NDArray[np.int32] | None]:
    """Parents of `shape` ``[entries, width]``, and those that the host knows to be right.

    On the host they are looked at where the `windows` are known there, too.
    """
    if pool.max_window > 1 and not mask_columns(pool.max_window):
        raise UnsupportedError(
            f"parents: got draft trees in a pool of max_window={pool.max_window}; allowed up to 31 "
            "on the device, whose masks are the bits of an int32; make the pool so, or plan on the "
            "host"
        )
    if isinstance(parents, torch.Tensor):
        check_array(pool, "parents", parents, INTEGERS, shape, "the parent of every node")
        return parents, None
    if windows is None:
        known, width = None, shape[1]
        given = parent_array(parents, shape).clip(-1, width).astype(np.int32)
    else:
        given = known = check_parents(parents, windows, shape[1])
    require_no_capture(pool, "parents")
    return pool.upload(torch.from_numpy(given)), known


def path_matrix(
    plan: DevicePlan, paths: Sequence[ArrayLike] | NDArray[np.integer[Any]] | torch.Tensor
) -> torch.Tensor:
    """Accepted paths ``[entries, width]``; what the host knows to be no path is refused."""
    pool, shape = plan.pool, (plan.batch, plan.window)
    if isinstance(paths, torch.Tensor):
        advice = "a path per entry of the plan, -1 behind it"
        check_array(pool, "paths", paths, INTEGERS, shape, advice)
        return paths
    if plan.known is None:
        nodes = pad_paths(paths, *shape)
    else:
        _, nodes = check_paths(paths, *plan.known)
    require_no_capture(pool, "paths")
    return pool.upload(torch.from_numpy(nodes))
