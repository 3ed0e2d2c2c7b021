"""Memory that shows when it is read or written by mistake.

Poison is NaN in floating-point memory and bytes of 0x7f in integer memory (as a page id or a count
that is far out of range, as a plane of a split state a NaN or a huge number).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .budget import bits, first_differences


def poison_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` with poison in place, whatever its strides, and return it."""
    return tensor.fill_(_poison_value(tensor.dtype))


def poisoned(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a fresh tensor that is poison all over."""
    return poison_(torch.empty(tuple(shape), dtype=dtype, device=device))


def is_poison(tensor: Tensor) -> Tensor:
    """Return, element by element, whether poison (for floats: any NaN) is there."""
    if tensor.dtype.is_floating_point:
        return torch.isnan(tensor.float() if tensor.element_size() == 1 else tensor)
    return tensor == _poison_value(tensor.dtype)


def assert_no_poison(tensor: Tensor, name: str = "tensor") -> None:
    """Fail, with the first place, if any element is poison: never written, or made from NaN."""
    dead = is_poison(tensor)
    if dead.any():
        first = tuple(int(i) for i in dead.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(dead.sum())} of {tensor.numel()} elements are poison, first at {first}"
        )


class PoisonedAllocations(TorchFunctionMode):
    """A context in which ``torch.empty`` and its kin return poison instead of stale memory.

    It covers the Python calls ``torch.empty``, ``empty_like``, ``empty_strided`` and
    ``Tensor.new_empty``. Booleans are left alone.

    Examples
    --------
    >>> with PoisonedAllocations():
    ...     bool(torch.empty(3).isnan().all())
    True
    """

    # _empty_functions : the callables whose results hold no defined value
    _empty_functions = frozenset(
        {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty}
    )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._empty_functions and result.dtype != torch.bool and not result.is_meta:
            poison_(result)
        return result

    # Typed here since torch's own methods are not.
    def __enter__(self) -> PoisonedAllocations:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, value, traceback)  # type: ignore[no-untyped-call]


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the named tensors, for :func:`assert_untouched`."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_untouched(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    apart_from: Collection[str] | Mapping[str, Tensor | None] = (),
) -> None:
    """Fail if any bit differs between a snapshot and the tensors now.

    Parameters
    ----------
    before : what :func:`snapshot` returned
    after : the same names with their tensors now
    apart_from : names of tensors that may have changed; or a mapping from a name to a bool mask,
        broadcast to the tensor, that is true where a change is allowed (None: everywhere)

    Raises
    ------
    AssertionError
        Listing every tensor that changed, with the first place and both values.
    KeyError
        If ``apart_from`` names no tensor of the snapshot: a misspelt exception hides nothing.
    """
    allowed = apart_from if isinstance(apart_from, Mapping) else dict.fromkeys(apart_from)
    unknown = sorted(set(allowed) - set(before))
    if unknown:
        raise KeyError(f"apart_from: got {unknown}; allowed names {sorted(before)}")
    if set(before) != set(after):
        raise AssertionError(f"tensors: {sorted(set(before) ^ set(after))} came or went")
    faults = []
    for name, old in before.items():
        mask = allowed.get(name)
        if name in allowed and mask is None:
            continue
        now = after[name]
        if now.shape != old.shape or now.dtype != old.dtype:
            faults.append(
                f"{name}: was {old.dtype} {list(old.shape)}, is {now.dtype} {list(now.shape)}"
            )
            continue
        differs = bits(now) != bits(old)
        if mask is not None:
            differs &= ~mask
        if differs.any():
            faults.append(f"{name}: {first_differences(now, old, differs)}")
    if faults:
        raise AssertionError("touched where nothing may be written\n  " + "\n  ".join(faults))


def _poison_value(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    if dtype == torch.bool or dtype.is_complex:
        raise TypeError(f"dtype: got {dtype}; allowed floating-point and integer types")
    return int.from_bytes(b"\x7f" * dtype.itemsize, "little")
