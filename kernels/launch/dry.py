"""Launches without launching: what a launcher would hand to Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["DryLaunch", "dry_launches"]

_seen: ContextVar[list[DryLaunch] | None] = ContextVar("seen", default=None)


@dataclass(frozen=True)
class DryLaunch:
    """A kernel by name, its grid, its constexpr arguments, and Triton's options (warps, …)."""

    kernel: str
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


@contextmanager
def dry_launches() -> Iterator[list[DryLaunch]]:
    """Within it, in this thread, kernels are not launched but listed: no tensor is written."""
    from triton.runtime.jit import KernelInterface

    original = KernelInterface.__getitem__

    def listed(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        seen = _seen.get()
        if seen is None:
            launch: Callable[..., Any] = original(kernel, grid)
            return launch
        return lambda *args, **named: seen.append(_launch(kernel, grid, named))

    token = _seen.set([])
    KernelInterface.__getitem__ = listed
    try:
        launches = _seen.get()
        assert launches is not None
        yield launches
    finally:
        KernelInterface.__getitem__ = original
        _seen.reset(token)


def _launch(kernel: Any, grid: tuple[int, ...], named: dict[str, Any]) -> DryLaunch:
    """Launchers pass constants and options by keyword, and all else by position."""
    constants = {name: value for name, value in named.items() if name in kernel.arg_names}
    options = {name: value for name, value in named.items() if name not in constants}
    return DryLaunch(kernel.fn.__name__, grid, constants, options)
