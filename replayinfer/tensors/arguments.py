"""What the steps on a caller's own states take: sizes, types and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..checks import check_tensor, describe_dtypes, dtype_name, positive_int
from ..errors import InputError, UnsupportedError

__all__ = [
    "FLOATS",
    "INDEX",
    "Write",
    "batch_of",
    "check",
    "check_mamba2_inputs",
    "check_state",
    "device_of",
    "dims_of",
    "index_of",
    "lead_of",
    "output_like",
    "require_steps",
]

Write = Literal["none", "last", "each"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int8, torch.int16)
INDEX = (torch.int32, torch.int64)


def device_of(state: torch.Tensor) -> torch.device:
    if not isinstance(state, torch.Tensor):
        raise InputError(f"state: got {type(state).__name__}; allowed a tensor; pass the states")
    return state.device


def dims_of(name: str, value: torch.Tensor, count: int) -> torch.Size:
    if not isinstance(value, torch.Tensor) or value.dim() != count:
        got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{name}: got {got}; allowed a tensor of {count} dimensions; reshape it")
    return value.shape


def lead_of(x: torch.Tensor, starts: torch.Tensor | None) -> dict[str, int]:
    if starts is None:
        shape = dims_of("x", x, 4)
        return {"batch": int(shape[0]), "window": int(shape[1])}
    return {"tokens": int(dims_of("x", x, 3)[0])}


def check(
    name: str,
    value: torch.Tensor,
    shape: Sequence[int | None],
    dims: Sequence[str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous: int = 0,
    written: bool = False,
    strided: bool = False,
) -> None:
    """`check_tensor`, with the last `contiguous` + 1 axes dense; `strided`: any last stride."""
    if strided and isinstance(value, torch.Tensor) and value.dim() == 1:
        if value.shape != tuple(shape) or value.dtype not in dtypes or value.device != device:
            raise InputError(
                f"{name}: got {dtype_name(value.dtype)} {list(value.shape)} on {value.device}; "
                f"allowed {describe_dtypes(dtypes)} {list(shape)} on {device}; pass one for every "
                "slot"
            )
        return
    check_tensor(name, value, shape=shape, dims=dims, dtypes=dtypes, device=device, written=written)
    dense = 1
    for axis in range(1, contiguous + 1):
        dense *= value.shape[-axis]
        if value.shape[-axis - 1] > 1 and value.stride(-axis - 1) != dense:
            raise InputError(
                f"{name}: got strides {list(value.stride())}; allowed dense values in the last "
                f"{contiguous + 1} axes; keep padding between the axes before"
            )


def check_state(
    state: torch.Tensor, heads: int, dim: int, size: int, scale: torch.Tensor | None
) -> None:
    """A Mamba-2 state, and the scales of its rows where it is of integers."""
    dims, device = ["slots", "heads", "dim", "state"], state.device
    dtypes = FLOATS if scale is None else INTEGERS
    check("state", state, [None, heads, dim, size], dims, dtypes, device, contiguous=1,
           written=True)  # fmt: skip
    if scale is not None:
        check("scale", scale, [state.shape[0], heads, dim], dims[:3], (torch.float32,), device,
               contiguous=1, written=True)  # fmt: skip


def check_mamba2_inputs(
    device: torch.device,
    lead: dict[str, int],
    heads: int,
    dim: int,
    size: int,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> int:
    """Check what both Mamba-2 steps take alike; returns the number of groups."""
    shape, names = list(lead.values()), list(lead)
    for name, t in (("x", x), ("z", z)):
        if t is not None:
            check(name, t, [*shape, heads, dim], [*names, "heads", "dim"], FLOATS, device)
    check("B", B, [*shape, None, size], [*names, "groups", "state"], FLOATS, device)
    groups = int(B.shape[-2])
    if not groups or heads % groups:
        raise InputError(
            f"B: got {groups} groups for {heads} heads; allowed a divisor of the heads; reshape it"
        )
    check("C", C, [*shape, groups, size], [*names, "groups", "state"], FLOATS, device)
    if not isinstance(dt, torch.Tensor) or tuple(dt.shape) != (*shape, heads):
        got = list(dt.shape) if isinstance(dt, torch.Tensor) else type(dt).__name__
        raise InputError(f"dt: got {got}; allowed {[*shape, heads]}; one step size a head")
    if dt.dtype not in FLOATS or dt.device != device:
        raise InputError(
            f"dt: got {dtype_name(dt.dtype)} on {dt.device}; allowed {describe_dtypes(FLOATS)} on "
            f"{device}; move it"
        )
    for name, t in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        if t is not None:
            check(name, t, [heads], ["heads"], FLOATS, device)
    return groups


def batch_of(
    device: torch.device, x: torch.Tensor, starts: torch.Tensor | None, window: int | None
) -> tuple[int, int]:
    """Sequences, and the most tokens of one."""
    if starts is None:
        if window is not None and window != x.shape[1]:
            raise InputError(
                f"window: got {window} for x {list(x.shape)}; allowed {x.shape[1]}; leave it out"
            )
        return int(x.shape[0]), int(x.shape[1])
    check("starts", starts, [None], ["batch + 1"], INDEX, device)
    if starts.shape[0] < 1:
        raise InputError("starts: got no value; allowed 0 and the running sums; pass [batch + 1]")
    return int(starts.shape[0]) - 1, positive_int("window", window)


def output_like(out: torch.Tensor | None, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    check("out", out, list(like.shape), [str(n) for n in like.shape], FLOATS, device, written=True)
    return out


def index_of(
    name: str, index: torch.Tensor | None, batch: int, columns: int, device: torch.device
) -> torch.Tensor | None:
    """An index of slots as ``[batch, columns or more]``."""
    if index is None:
        return None
    if isinstance(index, torch.Tensor) and index.dim() == 1:
        index = index[:, None]
    fits = isinstance(index, torch.Tensor) and index.dim() == 2 and index.shape[0] == batch
    if not fits or index.dtype not in INDEX or index.device != device:
        got = (
            f"{dtype_name(index.dtype)} {list(index.shape)} on {index.device}"
            if isinstance(index, torch.Tensor)
            else type(index).__name__
        )
        raise InputError(
            f"{name}: got {got}; allowed int32 or int64 [{batch}] or [{batch}, columns] on "
            f"{device}; pass a row for every sequence"
        )
    if index.shape[1] < columns:
        raise InputError(
            f"{name}: got {index.shape[1]} columns; allowed {columns} or more, one for every "
            "token; pass a wider one"
        )
    return index


def require_steps(name: str, each: torch.Tensor, window: int) -> None:
    if each.shape[1] < window:
        raise UnsupportedError(
            f"{name}: got room for {each.shape[1]} tokens of a window of {window}; allowed as many "
            "as the window or more; make it larger"
        )
