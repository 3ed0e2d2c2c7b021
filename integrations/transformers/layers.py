"""Our cache layers, as plain classes; `with_peer_base` adds the peer's base class at first use."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .dispatch import StateHandle, WindowHandle
from .driver import StateDriver

__all__ = ["ReplayHybridLayer", "ReplayStateLayer", "with_peer_base"]


@functools.cache
def with_peer_base(ours: type, base: str) -> Any:
    """`ours` with ``transformers.cache_utils.<base>`` as its second base, for the peer to know it.

    The peer is imported here and not where `ours` is defined, so that defining it costs nothing.
    """
    from transformers import cache_utils

    peer = getattr(cache_utils, base)
    return type(
        ours.__name__, (ours, peer), {"__module__": ours.__module__, "__doc__": ours.__doc__}
    )


class ReplayStateLayer:
    """The cache layer of one recurrent layer: hands out handles, takes prefill states."""

    # Read by `generate`: only what came with the last window can be cropped, not any token, and no
    # step of ours can be traced.
    is_compileable = False
    is_croppable = False

    def __init__(self, driver: StateDriver, layer: int) -> None:
        super().__init__()
        handle = StateHandle(driver, layer)
        self.driver = driver
        self.layer = layer
        self.conv_states: dict[int, Any] = {0: handle}
        self.recurrent_states: dict[int, Any] = {0: handle}
        self.has_previous_state = driver.has_previous_state

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the pool was made with the cache."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor | WindowHandle:
        """Keep what the convolution of the next token needs; return what this one's needs."""
        convolved = self.driver.window_conv(self.layer, conv_states)
        if convolved is not None:
            return WindowHandle(self.driver, self.layer, convolved)
        return self.driver.keep_conv(self.layer, conv_states)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor | StateHandle, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor | StateHandle:
        """Seed the pool; a handle means that replay has kept the state already."""
        if isinstance(recurrent_states, torch.Tensor):
            self.driver.keep_state(self.layer, recurrent_states)
        return recurrent_states

    def offload(self) -> None:
        """The pool decides where states live."""

    def prefetch(self) -> None:
        """The pool decides where states live."""

    def reset(self) -> None:
        """The cache frees the sequences of all layers at once."""

    # The cache forks, frees and rolls back whole sequences, once for all layers.

    def activate_past_recording(self) -> None:
        """See `ReplayCache.activate_past_recording`."""

    def crop(self, tokens_to_remove: int) -> None:
        """See `ReplayCache.crop`."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See `ReplayCache.reorder_cache`."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `ReplayCache.batch_repeat_interleave`."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `ReplayCache.batch_select_indices`."""


class ReplayHybridLayer(ReplayStateLayer):
    """The cache layer of a layer that both recurs and attends.

    Attributes
    ----------
    attention
        The cache layer of its keys and values.
    """

    def __init__(self, driver: StateDriver, layer: int, attention: Any) -> None:
        super().__init__(driver, layer)
        self.attention = attention

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the new tokens in, of all tokens out."""
        keys, values = self.attention.update(*args, **kwargs)
        return keys, values

    def get_seq_length(self) -> int:
        return int(self.attention.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, offset = self.attention.get_mask_sizes(query_length)
        return length, offset

    def get_max_length(self) -> int:
        return int(self.attention.get_max_length())

    def offload(self) -> None:
        self.attention.offload()

    def prefetch(self) -> None:
        self.attention.prefetch()

    def reset(self) -> None:
        self.attention.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.attention.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.attention.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.attention.batch_select_indices(indices)
