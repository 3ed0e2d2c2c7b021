"""A peer's Triton kernel, launched by another tile and warp count than its caller chose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Retile", "retiled"]


@dataclass(frozen=True)
class Retile:
    """Another launch of the kernel `kernel` of a module.

    Attributes
    ----------
    tile : str
        The kernel's parameter that is replaced by `rows`.
    extent : str, optional
        The parameter that `tile` divides. Where the caller has computed the grid already, its first
        axis has as many tiles of the old size as cover `extent`; it is computed again.
    """

    kernel: str
    tile: str
    rows: int
    warps: int
    extent: str | None = None

    def __str__(self) -> str:
        return f"tile {self.rows}, {self.warps} warp{'s' if self.warps > 1 else ''}"


@contextlib.contextmanager
def retiled(module: Any, choice: Retile | None) -> Iterator[None]:
    """Within it, `module` launches as chosen; None changes nothing."""
    if choice is None:
        yield
        return
    original = getattr(module, choice.kernel)
    setattr(module, choice.kernel, _Retiled(original, choice))
    try:
        yield
    finally:
        setattr(module, choice.kernel, original)


class _Retiled:
    """Stands in for a Triton kernel: ``kernel[grid](*args, **kwargs)``."""

    def __init__(self, kernel: Any, choice: Retile) -> None:
        self._kernel, self._choice = kernel, choice
        self._names = list(kernel.arg_names)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        choice = self._choice

        def launch(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(self._names, args, strict=False))
            old = (given | kwargs)[choice.tile]
            if choice.tile in given:
                place = self._names.index(choice.tile)
                args = (*args[:place], choice.rows, *args[place + 1 :])
            else:
                kwargs[choice.tile] = choice.rows
            shape = grid
            if choice.extent is not None and not callable(grid):
                extent = (given | kwargs)[choice.extent]
                tiles, rest = -(-extent // choice.rows), grid[0] // -(-extent // old)
                shape = (tiles * rest, *grid[1:])
            return self._kernel[shape](*args, **{**kwargs, "num_warps": choice.warps})

        return launch
