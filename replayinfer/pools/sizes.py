"""Every size of a pool, settled and validated before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..checks import positive_int
from ..errors import UnsupportedError
from ..formats import CheckpointFormat, get_format
from ..spec import LayerSpec
from .cursors import MAX_SLOTS

__all__ = ["PoolSizes", "layer_tuple", "settle_sizes"]

_DEFAULT_PAGE_ROWS = 8


@dataclass(frozen=True)
class PoolSizes:
    """Every number that decides a pool's memory."""

    spec: LayerSpec
    format: CheckpointFormat
    dtype: torch.dtype
    layers: int
    max_sequences: int
    checkpoint_pages: int
    input_pages: int
    page_rows: int
    capacity: int
    ring: int
    device_cursors: bool = False

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.capacity // self.page_rows)


def layer_tuple(layers: Iterable[int]) -> tuple[int, ...]:
    result = tuple(layers) if isinstance(layers, Iterable) else ()
    bad = [x for x in result if isinstance(x, bool) or not isinstance(x, int) or x < 0]
    if not result or bad or len(set(result)) != len(result):
        raise UnsupportedError(
            f"layers: got {list(result) or layers!r}; allowed distinct model layer indices >= 0, "
            "at least one; list the recurrent layers"
        )
    return result


def settle_sizes(
    spec: LayerSpec,
    layers: Iterable[int],
    max_sequences: int,
    *,
    capacity: int = 16,
    max_window: int = 1,
    format: str | CheckpointFormat = "fp32",
    dtype: torch.dtype = torch.float32,
    checkpoint_pages: int | None = None,
    input_pages: int | None = None,
    page_rows: int | None = None,
    restore: str = "window",
    planner: str = "host",
) -> PoolSizes:
    """Validate the constructor's arguments and settle every size."""
    if not isinstance(spec, LayerSpec):
        raise UnsupportedError(
            f"spec: got {type(spec).__name__}; allowed Mamba2Spec, GDNSpec or KDASpec; make one"
        )
    fmt = get_format(format)
    spec.check_dtype(dtype)
    count = len(layer_tuple(layers))
    positive_int("max_sequences", max_sequences, maximum=MAX_SLOTS)
    positive_int("capacity", capacity)
    positive_int("max_window", max_window)
    if capacity < max_window:
        raise UnsupportedError(
            f"capacity: got {capacity}; allowed >= max_window={max_window}, since a window is "
            "never truncated; raise capacity or lower max_window"
        )
    if restore not in ("window", "any"):
        raise UnsupportedError(f"restore: got {restore!r}; allowed 'window' or 'any'; pick one")
    if planner not in ("host", "device"):
        raise UnsupportedError(f"planner: got {planner!r}; allowed 'host' or 'device'; pick one")
    if page_rows is None:
        page_rows = min(_DEFAULT_PAGE_ROWS, 1 << (capacity - 1).bit_length())
    positive_int("page_rows", page_rows)
    if page_rows & (page_rows - 1):
        raise UnsupportedError(
            f"page_rows: got {page_rows}; allowed a power of two; try "
            f"{1 << (page_rows.bit_length() - 1)}"
        )
    pages = -(-capacity // page_rows)
    if checkpoint_pages is None:
        checkpoint_pages = max_sequences
    if input_pages is None:
        input_pages = max_sequences * pages
    positive_int("checkpoint_pages", checkpoint_pages)
    positive_int("input_pages", input_pages)
    ring = max(spec.conv_width - 1, 0) + (capacity if restore == "any" else max_window)
    return PoolSizes(
        spec=spec, format=fmt, dtype=dtype, layers=count, max_sequences=max_sequences,
        checkpoint_pages=checkpoint_pages, input_pages=input_pages, page_rows=page_rows,
        capacity=capacity, ring=ring, device_cursors=planner == "device",
    )  # fmt: skip
