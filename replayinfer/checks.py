"""Validation shared by every entry point; kernels and launchers validate nothing themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import InputError, UnsupportedError

__all__ = [
    "capturing",
    "check_tensor",
    "describe_dtypes",
    "dtype_name",
    "positive_int",
    "storage_overlaps",
    "usable_device",
]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as a user writes it in a message: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def describe_dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(dtype_name(d) for d in dtypes)


def positive_int(name: str, value: Any, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Return `value` as an int within bounds, or raise `InputError`; bools are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: got {value!r}; allowed an integer >= {minimum}; pass an int")
    if value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and <= {maximum}"
        raise InputError(f"{name}: got {value}; allowed an integer >= {minimum}{upper}; change it")
    return value


def usable_device(device: torch.device | str) -> torch.device:
    """The device with its index (``"cuda"`` becomes ``"cuda:0"``), or `UnsupportedError`."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch raises any of them
        reason = str(error).splitlines()[0]
        raise UnsupportedError(
            f"device: got {device!r}; allowed a device that this torch can use; torch says: "
            f"{reason}"
        ) from None


def capturing(device: torch.device) -> bool:
    """Whether what is launched there now goes into a CUDA graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_tensor(
    name: str,
    value: Any,
    *,
    shape: Sequence[int | None],
    dims: Sequence[str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    advice: str = "pass a tensor of that shape, dtype and device",
    written: bool = False,
) -> torch.Tensor:
    """Check one tensor against its declaration and return it unchanged.

    Parameters
    ----------
    shape, dims
        Required sizes (`None`: any) and the names they go by in the message.
    written
        The tensor is an output: overlapping elements are refused as well.

    Raises
    ------
    InputError
        Wrong type, shape, dtype, device, or an innermost stride other than 1. Nothing is ever
        copied to make a tensor fit, since a silent copy of a pool would lose the writes to it.
    """
    rule = ", ".join(
        d if s is None else (f"{s}" if d == str(s) else f"{d}={s}")
        for d, s in zip(dims, shape, strict=True)
    )
    allowed = f"{describe_dtypes(dtypes)} [{rule}] on {device}"
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name}: got {type(value).__name__}; allowed {allowed}; {advice}")
    fits = value.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(value.shape, shape, strict=True)
    )
    if not fits or value.dtype not in dtypes or value.device != device:
        got = f"{dtype_name(value.dtype)} {list(value.shape)} on {value.device}"
        raise InputError(f"{name}: got {got}; allowed {allowed}; {advice}")
    if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise InputError(
            f"{name}: got strides {value.stride()}; allowed an innermost stride of 1; "
            "call .contiguous() where the tensor is made"
        )
    if written and storage_overlaps(value):
        raise InputError(
            f"{name}: got strides {value.stride()} for shape {list(value.shape)}, so elements "
            "overlap; allowed one address per element; pass a tensor of its own memory"
        )
    return value


def storage_overlaps(tensor: torch.Tensor) -> bool:
    """True where two indices of `tensor` may share an address (expanded or overlapping rows)."""
    extents = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    reach = 0  # largest offset the dimensions so far can produce
    for stride, size in extents:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
