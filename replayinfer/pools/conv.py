"""The convolution pool: a ring of pre-convolution rows per sequence slot."""

from __future__ import annotations

import torch

from ..spec import LayerSpec
from .guards import GuardedPages

__all__ = ["ConvPool"]


class ConvPool:
    """Pre-convolution rows ``[layers, slots, ring, channels]``.

    Token ``n`` of a sequence (``n`` = base + history, so a fold does not move it) lies at ``n %
    ring``. The ring is as long as the taps before a window plus the longest window, so a rejected
    window is simply overwritten; a pool that can restart anywhere keeps the taps plus a whole
    buffer.
    """

    def __init__(
        self,
        spec: LayerSpec,
        dtype: torch.dtype,
        layers: int,
        slots: int,
        ring: int,
        device: torch.device,
    ) -> None:
        self.taps = max(spec.conv_width - 1, 0)  # rows before a token that its output needs
        self.ring = ring
        channels = spec.conv_channels if spec.conv_width else 0
        self.guarded = GuardedPages(
            "convolution rings", (layers, slots, ring, channels), dtype, device
        )
        self.rows = self.guarded.pages

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def zero(self, slots: torch.Tensor) -> None:
        self.rows.index_fill_(1, slots, 0)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.rows[:, target] = self.rows[:, source]

    def before(self, slot: int, token: int) -> torch.Tensor:
        """The `taps` rows before `token`: ``[layers, taps, channels]``."""
        return self.rows[:, slot, self._places(token)]

    def write_before(self, layer: int, slot: int, token: int, rows: torch.Tensor) -> None:
        """Set the `taps` rows before `token` in one layer from ``[taps, channels]``."""
        self.rows[layer, slot, self._places(token)] = rows.to(self.rows.dtype)

    def _places(self, token: int) -> torch.Tensor:
        places = (torch.arange(self.taps) + token - self.taps) % self.ring
        return places.to(self.rows.device)
