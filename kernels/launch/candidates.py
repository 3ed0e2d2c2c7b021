"""What `replayinfer tune` tries, by family and operation: choices near those that ever won.

A family adds a function with `_of`; an operation without candidates is not tuned. The rule's choice
for the batch at hand is always tried as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .config import LaunchConfig

__all__ = ["candidates"]

_Maker = Callable[[Any, str], Iterable[LaunchConfig]]
_MAKERS: dict[tuple[str, str], _Maker] = {}

_EVERY = ("mamba2", "gdn", "kda")


def candidates(op: str, spec: Any, fmt: str) -> list[LaunchConfig]:
    """Choices worth timing for `op` at a shape and format; empty where there is nothing to choose.

    Parameters
    ----------
    op : str
        As in `lookup`.
    spec : LayerSpec
    fmt : str
        Checkpoint format.
    """
    make = _MAKERS.get((spec.family, op))
    return [] if make is None else list(dict.fromkeys(make(spec, fmt)))


def _of(op: str, *families: str) -> Callable[[_Maker], _Maker]:
    """Register a maker of candidates for `op`."""

    def add(make: _Maker) -> _Maker:
        _MAKERS.update(dict.fromkeys(((family, op) for family in families), make))
        return make

    return add


@_of("readout", *_EVERY)
def _readout(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    """4 to 16 KB of the checkpoint to a warp."""
    blocks = ((1, 32), (1, 64), (2, 64), (2, 32), (4, 64))
    if spec.dim % 64:
        blocks = ((1, 16), (2, 32), (2, 128), (4, 128), (1, 32))
    elif fmt == "fp32":
        blocks = ((1, 16), (1, 32), (2, 32), (2, 64), (4, 64))
    for warps, rows in blocks:
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("prepass", "mamba2")
def _prepass(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps in (1, 2):
        yield LaunchConfig(num_warps=warps)


@_of("prepass", "gdn", "kda")
def _delta_prepass(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps, rows in ((1, 8), (2, 8), (1, 16), (2, 16), (4, 16)):
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("conv_readout", "gdn")
def _conv_readout(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    """4 to 16 KB of the checkpoint to a warp; beyond, what arrives late leaves no registers."""
    blocks = ((1, 32), (1, 64), (2, 64), (2, 32), (4, 64))
    if spec.dim % 64:
        blocks = ((1, 16), (1, 32), (2, 32), (2, 64))
    elif fmt == "fp32":
        blocks = ((1, 16), (1, 32), (2, 32), (4, 64))
    for warps, rows in blocks:
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("conv_prepass", "gdn")
def _conv_prepass(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps in (1, 2, 4):
        yield LaunchConfig(num_warps=warps)


@_of("fold", "gdn", "kda")
def _delta_fold(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    if spec.family == "kda" and fmt == "fp32_split" and not spec.dim % 64 and spec.state <= 128:
        yield LaunchConfig(programs_per_sm=2)  # of more rows it takes minutes to compile
    yield from _long_delta_fold(spec, fmt)


@_of("fold32", "gdn", "kda")
def _long_delta_fold(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    if spec.dim % 64:
        for columns, programs in ((32, 8), (64, 8), (32, 12), (32, 16)):
            yield LaunchConfig(num_warps=1, rows=16, columns=columns, programs_per_sm=programs)
        return
    for columns, programs, registers in (
        (32, 2, 0), (32, 3, 168), (32, 4, 128), (64, 2, 0), (64, 3, 168), (64, 4, 128),
    ):  # fmt: skip
        yield LaunchConfig(rows=64, columns=columns, programs_per_sm=programs, registers=registers)


@_of("fused", *_EVERY)
def _fused(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps, rows in ((4, 16), (2, 16), (4, 32), (2, 32)):
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("direct", *_EVERY)
def _direct(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps, rows in ((1, 8), (1, 16), (2, 16), (2, 32), (4, 32), (4, 64)):
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("fold", "mamba2")
def _fold(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    if spec.dim % 64:  # tiles of 64 rows would leave many idle
        for warps, columns, programs, registers, heads in (
            (1, 128, 12, 168, 4), (1, 64, 16, 128, 2), (1, 128, 12, 168, 2), (2, 64, 8, 128, 2),
        ):  # fmt: skip
            yield LaunchConfig(
                num_warps=warps, rows=16 * warps, columns=columns, heads=heads,
                programs_per_sm=programs, registers=registers,
            )  # fmt: skip
        return
    for programs, registers, heads, stages in (
        (4, 128, 2, 1), (4, 128, 4, 1), (4, 128, 16, 1), (5, 104, 4, 1),
        (4, 128, 16, 2), (4, 128, 16, 3), (5, 96, 8, 2),
    ):  # fmt: skip
        yield LaunchConfig(
            rows=64, columns=64, heads=heads, stages=stages, programs_per_sm=programs,
            registers=registers,
        )  # fmt: skip


@_of("fold64", "mamba2")
def _long_fold(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    """Of more than 32 rows: narrower tiles, or fewer programs."""
    if spec.dim % 64:
        for columns, programs in ((64, 8), (64, 12), (128, 8)):
            yield LaunchConfig(
                num_warps=1, rows=16, columns=columns, heads=4, programs_per_sm=programs
            )
        return
    for columns, programs, registers, heads in (
        (32, 4, 128, 2), (32, 4, 128, 4), (64, 3, 168, 2), (64, 3, 168, 4), (64, 4, 128, 2),
    ):  # fmt: skip
        yield LaunchConfig(
            rows=64, columns=columns, heads=heads, programs_per_sm=programs, registers=registers
        )


@_of("verify", "mamba2")
@_of("verify64", "mamba2")
def _verify(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    """4 to 16 KB of the checkpoint to a warp."""
    for warps, rows, registers in (
        (1, 32, 0), (1, 32, 128), (1, 64, 0), (1, 16, 0), (2, 64, 0), (2, 64, 128),
    ):  # fmt: skip
        yield LaunchConfig(num_warps=warps, rows=rows, registers=registers)


@_of("verify_prepass", "mamba2")
def _verify_prepass(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps, rows in ((1, 32), (1, 16), (2, 32), (1, 64)):
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("verify", "gdn", "kda")
def _delta_verify(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    """Queries of every token beside the tile: rows are what the registers leave."""
    for warps, rows in ((1, 64), (1, 32), (1, 16), (2, 64), (2, 32), (2, 128)):
        yield LaunchConfig(num_warps=warps, rows=rows)


@_of("verify_prepass", "gdn", "kda")
def _delta_verify_prepass(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps, registers in ((1, 168), (1, 0), (1, 128), (2, 0)):
        yield LaunchConfig(num_warps=warps, registers=registers)


@_of("conv", *_EVERY)
def _conv(spec: Any, fmt: str) -> Iterable[LaunchConfig]:
    for warps, rows in ((4, 512), (4, 256), (4, 1024), (2, 256), (8, 1024)):
        yield LaunchConfig(num_warps=warps, rows=rows)
