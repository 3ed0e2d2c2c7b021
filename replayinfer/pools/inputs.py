"""The input pool: pages of rows, one tensor per field of a row."""

from __future__ import annotations

import torch

from ..formats import CheckpointFormat
from ..spec import LayerSpec
from .guards import GuardedPages

__all__ = ["InputPool"]


class InputPool:
    """Row pages of every layer: each field is ``[layers, pages, page_rows, *shape]``.

    Row ``i`` of a sequence lives in page ``table[i // page_rows]`` at offset ``i % page_rows``.
    Pages come back with whatever they held: a reader masks at the load.
    """

    def __init__(
        self,
        spec: LayerSpec,
        fmt: CheckpointFormat,
        dtype: torch.dtype,
        layers: int,
        pages: int,
        page_rows: int,
        device: torch.device,
    ) -> None:
        self.page_rows = page_rows
        self.guarded = [
            GuardedPages(
                f"input pages ({f.name})", (layers, pages, page_rows, *f.shape), f.dtype, device
            )
            for f in spec.row_fields(dtype, fmt)
        ]
        names = [f.name for f in spec.row_fields(dtype, fmt)]
        self.fields: dict[str, torch.Tensor] = {
            name: guarded.pages for name, guarded in zip(names, self.guarded, strict=True)
        }

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.fields.values())

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, rows: int) -> None:
        """Copy the first `rows` rows of whole pages, in every layer and field."""
        for field in self.fields.values():
            field[:, target, :rows] = field[:, source, :rows]
