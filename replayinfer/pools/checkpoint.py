"""The checkpoint pool: pages of recurrent state in one of the formats."""

from __future__ import annotations

import torch

from ..checks import check_tensor
from ..errors import InputError
from ..formats import CheckpointFormat, join_planes, split_planes, to_storage
from ..spec import LayerSpec
from .guards import GuardedPages

__all__ = ["CheckpointPool", "check_lent"]


def check_lent(
    spec: LayerSpec, fmt: CheckpointFormat, layers: int, device: torch.device, pages: torch.Tensor
) -> int:
    """Refuse memory that cannot be checkpoint pages; how many pages it holds.

    ``fp32_split`` takes float32 ``[layers, pages, heads, dim, state]`` and keeps a head's two
    planes in the place of its state.
    """
    dtype = torch.float32 if fmt.rounded_readout else fmt.plane_dtype
    heads, dim, state = spec.state_shape
    check_tensor(
        "checkpoints", pages, shape=(layers, None, heads, dim, state),
        dims=("layers", "pages", "heads", "dim", "state"), dtypes=(dtype,), device=device,
        advice="lend the states of these layers in the pool's format",
    )  # fmt: skip
    if not pages[0, 0].is_contiguous():
        raise InputError(
            f"checkpoints: got strides {list(pages.stride())}; allowed pages that are contiguous "
            "in themselves; lend memory in which a page's heads lie one after the other"
        )
    return int(pages.shape[1])


class CheckpointPool:
    """State pages of every layer: ``[layers, pages, heads, dim, state]``.

    In ``fp32_split`` a head's two planes lie one after the other, so a page has the size and the
    head offsets of plain fp32, and a readout streams ``dim * state`` contiguous 16-bit values.

    Attributes
    ----------
    storage : Tensor
        The allocation: ``[layers, pages, heads, (2,) dim, state]``.
    plane : Tensor, [layers, pages, heads, dim, state]
        What a readout loads: the state, or its high plane.
    low : Tensor or None
        int16, the low plane of ``fp32_split``.
    lent : Tensor or None
        The caller's memory, where the pages are that: ``[layers, pages, heads, dim, state]``.
    """

    def __init__(
        self,
        spec: LayerSpec,
        fmt: CheckpointFormat,
        layers: int,
        pages: int,
        device: torch.device,
        lent: torch.Tensor | None = None,
    ) -> None:
        self.format = fmt
        self.lent = lent
        heads, dim, state = spec.state_shape
        self.low: torch.Tensor | None = None
        if fmt.rounded_readout:
            shape: tuple[int, ...] = (layers, pages, heads, 2, dim, state)
            if lent is None:
                self.guarded = GuardedPages("checkpoint pages", shape, torch.int16, device)
            else:
                planes = lent.view(torch.int16).view(layers, pages, heads, 2, dim, state)
                self.guarded = GuardedPages.around("checkpoint pages", planes)
            self.storage = self.guarded.pages
            self.plane = self.storage[:, :, :, 0].view(torch.bfloat16)
            self.low = self.storage[:, :, :, 1]
        else:
            shape = (layers, pages, heads, dim, state)
            if lent is None:
                self.guarded = GuardedPages("checkpoint pages", shape, fmt.plane_dtype, device)
            else:
                self.guarded = GuardedPages.around("checkpoint pages", lent)
            self.storage = self.guarded.pages
            self.plane = self.storage

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def zero(self, pages: torch.Tensor) -> None:
        """Set whole pages to the zero state in every layer."""
        self.storage.index_fill_(1, pages, 0)  # `[...] = 0` would wait for the device

    def read(self, layer: int | slice, pages: torch.Tensor) -> torch.Tensor:
        """The state as a readout sees it, float32 ``[(layers,) n, heads, dim, state]``."""
        return self.plane[layer, pages].float()

    def load(self, layer: int | slice, pages: torch.Tensor) -> torch.Tensor:
        """The state as a fold sees it: all stored bits, float32."""
        if self.low is None:
            return self.read(layer, pages)
        return join_planes(self.plane[layer, pages], self.low[layer, pages])

    def store(self, layer: int | slice, pages: torch.Tensor, state: torch.Tensor) -> None:
        """Encode float32 states into pages."""
        if self.low is None:
            self.plane[layer, pages] = to_storage(state, self.format)
            return
        high, low = split_planes(state)
        self.plane[layer, pages] = high
        self.low[layer, pages] = low

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, every plane and layer, without decoding them."""
        self.storage[:, target] = self.storage[:, source]
