"""`ReplayCache`: a cache that the model's own ``generate`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replayinfer import InputError, SpeculationCounters, StatePool

from .dispatch import install
from .driver import StateDriver
from .families import ModelBinding, describe
from .layers import ReplayHybridLayer, ReplayStateLayer, with_peer_base

__all__ = ["ReplayCache"]


class ReplayCache:
    """A `transformers` cache whose recurrent layers decode by replay.

    Make one with `from_model`. It is used up by one batch, as any cache is; `reset` empties it.
    Rows of a batch are sequences of the pool, so beam search forks and frees them instead of
    copying states. Several tokens onto a live cache (a chunked prefill, the next turn of a
    conversation) are served by the model's own chunked function, from the materialised state,
    unless `activate_past_recording` says that they are drafts, which `crop` may drop again.
    Mamba2 calls its cache ``cache_params``; every other model ``past_key_values``.

    Attributes
    ----------
    pool : StatePool
    counters
        Steps, folds and bytes of state traffic, as `ReplayDecodeWrapper.counters`.
    speculation : SpeculationCounters
        What `assisted_decoding` drafted and accepted with this cache.

    Examples
    --------
    >>> cache = ReplayCache.from_model(model, capacity=16)          # doctest: +SKIP
    >>> model.generate(**prompt, past_key_values=cache)             # doctest: +SKIP
    """

    # From the peer's class, which `from_model` adds as a base.
    layers: list[Any]

    def __init__(self, driver: StateDriver, layers: list[Any]) -> None:
        super().__init__(layers=layers)  # type: ignore[call-arg]
        self.driver = driver
        self.speculation = SpeculationCounters()

    @staticmethod
    def from_model(
        model: Any,
        *,
        batch: int | None = None,
        capacity: int = 16,
        drafts: int = 0,
        format: str = "fp32",
        policy: str = "full",
        backend: str = "auto",
    ) -> ReplayCache:
        """A fresh cache for a supported model.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        batch : int, optional
            Rows that the pool has room for; as many as the first forward has if omitted, which is
            enough unless rows are added later (`batch_repeat_interleave`).
        drafts : int
            Most draft tokens of a window that is verified in one forward.
        capacity, format, policy, backend
            As in `StatePool` and `ReplayDecodeWrapper`.

        Raises
        ------
        UnsupportedError
            The model, the version, or an option is not served; the message says why.

        Notes
        -----
        Wraps functions in the model's modeling module; see `install`.
        """
        binding = describe(model)
        driver = StateDriver(
            binding, max_sequences=batch, capacity=capacity, max_window=1 + drafts, format=format,
            policy=policy, backend=backend, own_steps=True,
        )  # fmt: skip
        install(binding.family, binding.module)
        cache: ReplayCache = with_state_layers(ReplayCache, binding, driver)
        return cache

    @property
    def pool(self) -> StatePool:
        return self.driver.pool

    @property
    def counters(self) -> Any:
        return self.driver.wrapper.counters

    # Called by the model ------------------------------------------------------------------------

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> Any:
        """As in the peer; the first call of a fresh cache starts its sequences."""
        driver = self.driver
        if not driver.sequences:
            driver.start(conv_states.shape[0])
        return super().update_conv_state(conv_states, layer_idx, **kwargs)  # type: ignore[misc]

    # Called by generate --------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row ``i`` continue row ``beam_idx[i]``: rows kept twice fork, others are freed."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (integers, or a mask)."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue every row `repeats` times."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._select([row for row in range(len(self.driver.sequences)) for _ in range(repeats)])

    def activate_past_recording(self, active: bool = True) -> None:
        """Take several tokens onto a live cache as a window of drafts, not as more of a prompt."""
        super().activate_past_recording()  # type: ignore[misc]
        self.driver.recording = active

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of every row, which came with the last window.

        Recurrent layers move a cursor; nothing is copied or computed.

        Raises
        ------
        InputError
            A positive count, or more tokens than the last forward of a window added.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"tokens_to_remove: got {tokens_to_remove}; allowed 0 or less; pass how many "
                "tokens to drop as a negative number"
            )
        self.driver.rollback(-tokens_to_remove)
        for layer in self.layers:
            attention = getattr(layer, "attention", layer)
            if getattr(attention, "keys", None) is not None:
                attention.crop(tokens_to_remove)

    def reset(self) -> None:
        """Empty the cache: frees its sequences."""
        super().reset()  # type: ignore[misc]
        for layer in self.layers:
            attention = getattr(layer, "attention", layer)
            # An older peer zeroes keys and values but keeps their length.
            if hasattr(attention, "keys"):
                attention.keys = attention.values = None
                attention.is_initialized = False
        self.driver.abort()
        if self.driver.sequences:
            self.pool.free(self.driver.sequences)
        self.driver.use([], live=False)

    def _select(self, rows: Sequence[int]) -> None:
        old = self.driver.sequences
        if not old:
            return
        if len(rows) > self.pool.sizes.max_sequences:
            raise InputError(
                f"batch: got {len(rows)} rows; allowed {self.pool.sizes.max_sequences}, the batch "
                "of this cache; pass batch=… to ReplayCache.from_model, beams counted"
            )
        if unused := [s for row, s in enumerate(old) if row not in rows]:
            self.pool.free(unused)
        new: list[int] = []
        for place, row in enumerate(rows):
            first = rows.index(row) == place
            new.append(old[row] if first else self.pool.fork(old[row])[0])
        self.driver.sequences = new


def with_state_layers(kind: type, binding: ModelBinding, driver: StateDriver) -> Any:
    """The peer's own dynamic cache for a model, with ours in place of its recurrent layers."""
    from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

    layers = list(DynamicCache(config=binding.model.config).layers)
    state = with_peer_base(ReplayStateLayer, "LinearAttentionCacheLayerMixin")
    hybrid = with_peer_base(ReplayHybridLayer, "LinearAttentionAndFullAttentionLayer")
    for index in binding.layers:
        attends = isinstance(layers[index], CacheLayerMixin)
        layers[index] = hybrid(driver, index, DynamicLayer()) if attends else state(driver, index)
    return with_peer_base(kind, "Cache")(driver, layers)
