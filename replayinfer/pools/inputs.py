"""The input pool: pages of rows, one tensor per field of a row."""

from __future__ import annotations

import torch

from ..formats import CheckpointFormat
from ..spec import LayerSpec
from .guards import GuardedPages

__all__ = ["InputPool"]


class InputPool:
    """Row pages of every layer: each field is ``[layers, pages, page_rows, *shape]``.

    That is how they are indexed; in memory a head's rows of a page lie one after the other. Row
    ``i`` of a sequence lives in page ``table[i // page_rows]`` at offset ``i % page_rows``. Pages
    come back with whatever they held: a reader masks at the load.
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
        self.guarded: list[GuardedPages] = []
        self.fields: dict[str, torch.Tensor] = {}
        for field in spec.row_fields(dtype, fmt):
            heads, *vector = field.shape
            # A readout reads all rows of one head: where a head has a vector, its rows lie
            # together.
            shape = (heads, page_rows, *vector) if vector else (page_rows, heads)
            guarded = GuardedPages(
                f"input pages ({field.name})", (layers, pages, *shape), field.dtype, device
            )
            self.guarded.append(guarded)
            self.fields[field.name] = guarded.pages.transpose(2, 3) if vector else guarded.pages

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.fields.values())

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, rows: int) -> None:
        """Copy the first `rows` rows of whole pages, in every layer and field."""
        for field in self.fields.values():
            field[:, target, :rows] = field[:, source, :rows]
