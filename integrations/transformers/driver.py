"""What cache layers and dispatched functions call: a pool, a wrapper and the step between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replayinfer import InputError, ReplayDecodeWrapper, StatePool

from .families import ModelBinding

__all__ = ["StateDriver", "spare_pages"]


def spare_pages(sequences: int) -> int:
    """Checkpoint or input pages beyond one set per sequence, so that no plan runs out of them.

    Sequences that share a page and fold in the same step each take a page before the shared one is
    released. Sharing needs two, so at most half as many pages are in flight as there are sequences.
    """
    return sequences // 2


class StateDriver:
    """The recurrent layers of one model over one pool, and which sequences the next forward is for.

    A forward is a *prefill* (the state begins in it), a *step* (a window a sequence, by replay: one
    token, or drafts after it), or an *extension* (more tokens onto a live state: the state is built
    in full, handed to the model's own chunked function, and its result is seeded again). A forward
    of several tokens is a step where the owner began one, or, with `own_steps`, while `recording`.

    Parameters
    ----------
    binding : ModelBinding
    max_sequences : int or None
        None: as many as the first prefill has rows.
    capacity, max_window, format, policy, backend, checkpoint_pages, input_pages
        As in `StatePool` and `ReplayDecodeWrapper`; page counts default to no plan running out.
    own_steps : bool
        Plan at the first recurrent layer of a step and commit after the last one. Otherwise the
        owner calls `begin_step`, and `commit` or `abort`.

    Attributes
    ----------
    recording : bool
        Whether several tokens onto a live state are a window, which `rollback` may cut.
    """

    def __init__(
        self,
        binding: ModelBinding,
        *,
        max_sequences: int | None,
        capacity: int = 16,
        max_window: int = 1,
        format: str = "fp32",
        policy: str = "full",
        backend: str = "auto",
        checkpoint_pages: int | None = None,
        input_pages: int | None = None,
        own_steps: bool,
    ) -> None:
        self.binding = binding
        self.spec: Any = binding.spec
        self.layers = binding.layers
        self.layout = binding.family.kind.layout
        self.sequences: list[int] = []
        # Every cache layer shows this dict to the model as its own.
        self.has_previous_state = {0: False}
        model = binding.model
        self._options: dict[str, Any] = {
            "capacity": capacity, "max_window": max_window, "format": format,
            "dtype": model.dtype, "device": model.device,
        }  # fmt: skip
        self._pages = (checkpoint_pages, input_pages)
        # An unfinished forward is dropped, which a direct step does not allow.
        self._steps: dict[str, Any] = {"backend": backend, "policy": policy, "direct": "never"}
        self._grows = max_sequences is None
        self._own_steps = own_steps
        self._trees = False
        self.recording = False
        self._make_pool(max_sequences or 1)
        self._open = False
        self._forget()

    def _make_pool(self, max_sequences: int) -> None:
        self.binding.check_batch(max_sequences)
        one = StatePool(self.spec, self.layers, 1, **self._options).sizes.input_pages
        spare = spare_pages(max_sequences)
        checkpoint_pages, input_pages = self._pages
        self.pool = StatePool(
            self.spec,
            self.layers,
            max_sequences,
            checkpoint_pages=checkpoint_pages or max_sequences + spare,
            input_pages=input_pages or max_sequences * one + spare,
            **self._options,
        )
        for layer, mixer in self.binding.mixers.items():
            self.pool.bind(layer, **self.binding.family.kind.weights(mixer))
        self.wrapper = ReplayDecodeWrapper(self.pool, **self._steps)

    # Which forward comes next -----------------------------------------------------------------

    def start(self, count: int) -> list[int]:
        """New sequences for a prefill, which becomes the next forward."""
        if self._grows and not self.sequences and count > self.pool.sizes.max_sequences:
            self._make_pool(count)
        sequences: list[int] = list(self.pool.alloc(count))
        self.use(sequences, live=False)
        return sequences

    def use(self, sequences: Sequence[int], *, live: bool) -> None:
        """The next forward is for these sequences, which have a state (`live`) or get one."""
        self.sequences = list(sequences)
        self.has_previous_state[0] = live
        self._forget()

    @property
    def in_window(self) -> bool:
        """Whether the forward that runs is a step."""
        return self._open

    @property
    def takes_paths(self) -> bool:
        """Whether the step is of draft trees, so that commit wants paths."""
        return self._trees

    def begin_step(
        self, force_fold: Any = None, *, windows: Any = None, parents: Any = None
    ) -> None:
        """Plan and fold one step of the current sequences; see `ReplayDecodeWrapper.plan`."""
        if self._open:  # the forward before did not come to its end
            self.abort()
        self.wrapper.plan(self.sequences, windows, force_fold=force_fold, parents=parents)
        self._trees = parents is not None
        self._open = True
        self.wrapper.fold()

    def commit(self, accepted: Any = None, *, paths: Any = None) -> None:
        self.wrapper.commit(accepted, paths=paths)
        self._open = False

    def rollback(self, tokens: int) -> None:
        """Drop the last tokens of every current sequence, which came with the last step."""
        for sequence in self.sequences:
            self.pool.rollback(sequence, tokens)

    def abort(self) -> None:
        """Drop an unfinished step or prefill."""
        self._forget()
        if self._open:
            self._open = False
            self.wrapper.abort()

    # Decode: called by the dispatched functions -----------------------------------------------

    @torch.no_grad()
    def conv(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """One step of a layer's convolution: ``[batch, window, channels]`` in and out."""
        if self._own_steps and layer == self.layers[0]:
            self.begin_step()
        y: torch.Tensor = self.wrapper.conv(layer, x)
        return y

    @torch.no_grad()
    def run(self, layer: int, **inputs: torch.Tensor) -> torch.Tensor:
        """One step of a layer's recurrence."""
        y: torch.Tensor = self.wrapper.run(layer, **inputs)
        if self._own_steps and layer == self.layers[-1]:
            self.commit()
        return y

    # Prefill and extension: called by the cache layers ----------------------------------------

    @torch.no_grad()
    def window_conv(self, layer: int, x: torch.Tensor) -> torch.Tensor | None:
        """In a step: the convolution of a window, ``[batch, channels, tokens]`` in and out."""
        if not self._open:
            begins = self._own_steps and self.recording and layer == self.layers[0]
            if not begins or not self.has_previous_state[0]:
                return None
            self._check_batch(x)
            self.begin_step(windows=x.shape[-1])
        return self.wrapper.conv(layer, x.transpose(1, 2)).transpose(1, 2)

    def keep_conv(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Take the pre-convolution rows ``[batch, channels, tokens]`` of a layer.

        Returns
        -------
        Tensor
            `x`, after the rows that came before it where the sequences are live.
        """
        self._check_batch(x)
        taps = self.spec.conv_width - 1
        if layer == self.layers[0]:
            self._forget()
            self._added = x.shape[-1]
            if self.has_previous_state[0]:
                self._built = torch.stack([self.wrapper.materialize(s) for s in self.sequences])
                self._before = torch.stack([self.pool.conv_tail(s) for s in self.sequences])
        if self.has_previous_state[0]:
            x = torch.cat([self._before[:, self.layers.index(layer)], x], dim=-1)
        self._tails[layer] = x[..., max(x.shape[-1] - taps, 0) :]
        return x

    def _check_batch(self, x: torch.Tensor) -> None:
        if x.shape[0] != len(self.sequences):
            raise InputError(
                f"input_ids: got a batch of {x.shape[0]}; allowed {len(self.sequences)}, the batch "
                "of this cache; make a new cache, or reset() it"
            )

    def full_state(self, layer: int) -> torch.Tensor:
        """The states of the live sequences in the peer's order, for its chunked function."""
        assert self._built is not _NOTHING, "extension without keep_conv"
        state = self._built[:, self.layers.index(layer)]
        return state.transpose(-1, -2) if self.layout == "kv" else state

    def keep_state(self, layer: int, state: torch.Tensor) -> None:
        """Take a layer's final state; after the last layer all sequences are seeded."""
        self._states[layer] = state
        if layer != self.layers[-1]:
            return
        for row, sequence in enumerate(self.sequences):
            self.pool.seed(
                sequence,
                {layer: s[row].contiguous() for layer, s in self._states.items()},
                conv={layer: t[row].contiguous() for layer, t in self._tails.items()},
                tokens=self.pool.tokens(sequence) + self._added,
                layout=self.layout,
            )
        self.has_previous_state[0] = True
        self._forget()

    def _forget(self) -> None:
        self._added = 0
        self._tails: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._built = self._before = _NOTHING


_NOTHING = torch.empty(0)
