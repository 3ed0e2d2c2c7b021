"""`ReplayEngine`: one model, many sequences that come and go."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayinfer import InputError, PlanError, StatePool, UnsupportedError

from .cache import with_state_layers
from .dispatch import install
from .driver import StateDriver
from .families import describe
from .kv import SlotLayer, SlotTable
from .layers import with_peer_base

__all__ = ["ParkedSequence", "ReplayEngine"]


@dataclass(frozen=True)
class ParkedSequence:
    """A preempted sequence in host memory: states, convolution rows, keys and values."""

    tokens: int
    states: torch.Tensor  # float32 [layers, heads, dim, state]
    conv: torch.Tensor  # [layers, channels, conv_width - 1]
    attention: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        pairs = sum(k.nbytes + v.nbytes for k, v in self.attention)
        return self.states.nbytes + self.conv.nbytes + pairs


class _EngineCache:
    """What the engine passes to the model as its cache."""

    def __init__(self, driver: StateDriver, layers: list[Any]) -> None:
        super().__init__(layers=layers)  # type: ignore[call-arg]
        self.driver = driver


class ReplayEngine:
    """Serve an unmodified hybrid model: sequences of any length in one batch, decoded by replay.

    Recurrent layers live in a `StatePool`; attention layers in a plain slot per sequence. The
    engine holds no queue and samples nothing: it turns tokens into logits.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        One of `FAMILIES`, in evaluation mode, with full attention (``sdpa`` or ``eager``).
    capacity, max_window, format, policy, backend
        As in `StatePool` and `ReplayDecodeWrapper`.
    max_sequences : int
        Sequences that may live at once, forks counted.
    checkpoint_pages, input_pages : int, optional
        By default enough for `max_sequences` with every fork among them, so that no step runs out.

    Raises
    ------
    UnsupportedError
        The model, the version, or an option is not served; the message says why.

    Examples
    --------
    >>> engine = ReplayEngine(model, max_sequences=4)               # doctest: +SKIP
    >>> seq, logits = engine.prefill([72, 105])                     # doctest: +SKIP
    >>> logits = engine.step([seq], [int(logits.argmax())])[0]      # doctest: +SKIP
    >>> engine.free([seq])                                          # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 16,
        max_window: int = 1,
        format: str = "fp32",
        max_sequences: int = 8,
        policy: str = "full",
        backend: str = "auto",
        checkpoint_pages: int | None = None,
        input_pages: int | None = None,
    ) -> None:
        binding = describe(model)
        attention = model.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise UnsupportedError(
                f"attn_implementation: got {attention!r}; allowed 'sdpa' or 'eager', which take a "
                "mask per row; set it with model.set_attn_implementation"
            )
        self.model = model
        self.driver = StateDriver(
            binding, max_sequences=max_sequences, capacity=capacity, max_window=max_window,
            format=format, policy=policy, backend=backend, checkpoint_pages=checkpoint_pages,
            input_pages=input_pages, own_steps=False,
        )  # fmt: skip
        self._table = SlotTable(max_sequences, model.device)
        self._cache = with_state_layers(_EngineCache, binding, self.driver)
        self._use_slots(max_sequences)
        self._verifying: list[int] = []
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        install(binding.family, binding.module)

    def _use_slots(self, slots: int) -> None:
        from transformers.cache_utils import CacheLayerMixin, DynamicLayer

        for index, layer in enumerate(self._cache.layers):
            if not isinstance(layer, CacheLayerMixin):
                continue
            # A layer that also recurs keeps its attention apart.
            attention = getattr(layer, "attention", layer)
            if type(attention) is not DynamicLayer:
                raise UnsupportedError(
                    f"layer {index}: got a {type(attention).__name__}; allowed full attention; use "
                    "ReplayCache with model.generate"
                )
            slot_layer = with_peer_base(SlotLayer, "CacheLayerMixin")(self._table, slots)
            if attention is layer:
                self._cache.layers[index] = slot_layer
            else:
                layer.attention = slot_layer

    @property
    def pool(self) -> StatePool:
        return self.driver.pool

    @property
    def max_window(self) -> int:
        """Most tokens of a sequence that one `verify` takes."""
        return self.pool.max_window

    @property
    def counters(self) -> Any:
        """Steps, folds and bytes of state traffic."""
        return self.driver.wrapper.counters

    def tokens(self, sequence: int) -> int:
        """Tokens that a sequence has taken in."""
        return self.pool.tokens(sequence)

    # A sequence's life ------------------------------------------------------------------------

    def prefill(self, token_ids: Sequence[int] | torch.Tensor) -> tuple[int, torch.Tensor]:
        """Start a sequence with the model's own prefill.

        Returns
        -------
        sequence : int
        logits : Tensor
            ``[vocabulary]``, for the token after the last one given.

        Raises
        ------
        CapacityError
            No slot or page is free; nothing is taken.
        """
        ids = self._ids(token_ids)
        self._require([])
        (sequence,) = self.driver.start(1)
        self._table.open(sequence)
        try:
            return sequence, self._forward([sequence], ids[None])[0]
        except BaseException:
            self.driver.abort()
            self.free([sequence])
            raise

    def extend(self, sequence: int, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Take more tokens into a live sequence at once: a chunk of a prefill, the next turn.

        Returns
        -------
        Tensor
            ``[vocabulary]``, for the token after the last one given.

        Notes
        -----
        The state is materialised, carried by the model's own chunked function, and seeded again; a
        single token is a decode step.
        """
        ids = self._ids(token_ids)
        if ids.numel() == 1:
            return self.step([sequence], ids)[0]
        self._require([sequence])
        self.driver.use([sequence], live=True)
        return self._forward([sequence], ids[None])[0]

    def step(
        self,
        sequences: Sequence[int],
        tokens: Sequence[int] | torch.Tensor,
        *,
        force_fold: Any = None,
    ) -> torch.Tensor:
        """Decode one token of each sequence.

        Parameters
        ----------
        sequences : list of int
            Live sequences, each once, in any order and of any length.
        tokens : list of int
            The token that each takes in.
        force_fold : bool or list of bool, optional
            As in `ReplayDecodeWrapper.plan`.

        Returns
        -------
        Tensor
            ``[batch, vocabulary]``.

        Raises
        ------
        StaleHandleError, InputError, CapacityError
            Nothing has changed then.
        """
        ids = self._ids(tokens)
        if ids.numel() != len(sequences):
            raise InputError(
                f"tokens: got {ids.numel()}; allowed {len(sequences)}, one per sequence; pass the "
                "last token of each"
            )
        self._require(sequences)
        self.driver.use(sequences, live=True)
        self.driver.begin_step(force_fold)
        try:
            logits = self._forward(sequences, ids[:, None])
        except BaseException:
            self.driver.abort()
            raise
        self.driver.commit()
        return logits

    def verify(
        self,
        sequences: Sequence[int],
        windows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Begin a step of several tokens a sequence, of which `accept` keeps some.

        Parameters
        ----------
        sequences : list of int
        windows : list of list of int
            The token that each takes in, then its drafts; at most `max_window`.
        parents : list of list of int, optional
            Makes them draft trees, as in `ReplayDecodeWrapper.plan`; chains if omitted.

        Returns
        -------
        Tensor
            ``[batch, window, vocabulary]``: after each node, for the token after it. What lies
            past a sequence's own window means nothing.

        Notes
        -----
        Until `accept` or `abort` the engine takes no other call that runs the model.
        """
        if len(windows) != len(sequences) or not all(len(window) for window in windows):
            raise InputError(
                f"windows: got {[len(w) for w in windows]} tokens; allowed at least one for each "
                f"of {len(sequences)} sequences; pass the last token of each and its drafts"
            )
        self._ids([token for window in windows for token in window])
        self._require(sequences)
        lengths = [len(window) for window in windows]
        ids = _padded(windows, max(lengths), 0)
        tree = None if parents is None else _padded(parents, max(lengths), -1)
        self.driver.use(sequences, live=True)
        self.driver.begin_step(windows=lengths, parents=None if tree is None else tree.numpy())
        try:
            logits = self._run(sequences, ids.to(self.pool.device), max(lengths), tree)
        except BaseException:
            self.driver.abort()
            raise
        self._verifying = list(sequences)
        return logits

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """End `verify`: keep these nodes of each window, from its first token on.

        Of chains a path is ``0, 1, ...``. Nothing is copied for a chain, and no state for a tree.

        Raises
        ------
        InputError
            A path that is none; `verify` is still to be ended then.
        """
        sequences = self._verified("accept")
        if self.driver.takes_paths:
            self.driver.commit(paths=[list(path) for path in paths])
        else:
            self._require_chains(paths)
            self.driver.commit([len(path) for path in paths])
        self._table.keep(sequences, paths)
        self._verifying = []

    def abort(self) -> None:
        """End `verify` and keep nothing of it."""
        self._verified("abort")
        self.driver.abort()
        self._verifying = []

    def fork(self, sequence: int, count: int = 1) -> list[int]:
        """Start `count` copies of a sequence; recurrent states are shared, not copied.

        Raises
        ------
        CapacityError
            No slot or page is free; nothing is taken.
        """
        self._require([sequence])
        children: list[int] = list(self.pool.fork(sequence, count))
        for child in children:
            self._table.copy(sequence, child)
        return children

    def preempt(self, sequence: int) -> ParkedSequence:
        """Move a sequence to host memory and free everything it held; its handle goes stale."""
        self._require([sequence])
        parked = ParkedSequence(
            tokens=self.tokens(sequence),
            states=self.driver.wrapper.materialize(sequence).cpu(),
            conv=self.pool.conv_tail(sequence).cpu(),
            attention=[(k.cpu(), v.cpu()) for k, v in self._table.read(sequence)],
        )
        self.free([sequence])
        return parked

    def resume(self, parked: ParkedSequence) -> int:
        """Bring a preempted sequence back, under a new handle.

        Raises
        ------
        CapacityError
            No slot or page is free; nothing is taken.
        """
        layers, device = self.driver.layers, self.pool.device
        (sequence,) = self.pool.alloc()
        self._table.open(sequence, parked.tokens)
        self.pool.seed(
            sequence,
            {layer: parked.states[i].to(device) for i, layer in enumerate(layers)},
            conv={layer: parked.conv[i].to(device) for i, layer in enumerate(layers)},
            tokens=parked.tokens,
        )
        self._table.write(sequence, parked.attention)
        return sequence

    def free(self, sequences: Sequence[int]) -> None:
        """End sequences; a handle that is not live is refused and none is freed."""
        self._require(sequences)
        self.pool.free(list(sequences))
        for sequence in sequences:
            self._table.close(sequence)

    # Inside -----------------------------------------------------------------------------------

    def _forward(self, sequences: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """Logits after the last token of each, whose tokens all count."""
        logits = self._run(sequences, ids, 1)
        self._table.advance(sequences, ids.shape[1])
        return logits[:, -1]

    @torch.no_grad()
    def _run(
        self,
        sequences: Sequence[int],
        ids: torch.Tensor,
        keep: int,
        parents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._table.begin(sequences, ids.shape[1], parents)
        options: dict[str, Any] = {self.driver.binding.cache_argument: self._cache}
        if self._takes_positions:
            options["position_ids"] = self._table.batch.positions
        output = self.model(
            input_ids=ids,
            # In four dimensions the peer takes a mask as it is, for full attention only.
            attention_mask=self._table.mask(self.model.dtype),
            use_cache=True,
            logits_to_keep=keep,
            **options,
        )
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits

    def _verified(self, action: str) -> list[int]:
        if not self._verifying:
            raise PlanError(f"{action}: got no step; allowed after verify; call verify first")
        return self._verifying

    def _require_chains(self, paths: Sequence[Sequence[int]]) -> None:
        for path in paths:
            if list(path) != list(range(len(path))):
                raise InputError(
                    f"paths: got {list(path)} for a chain; allowed 0, 1, ... without a gap; give "
                    "verify the parents of a tree"
                )

    def _ids(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        ids = torch.as_tensor(token_ids, device=self.pool.device)
        size = self.model.config.get_text_config(decoder=True).vocab_size
        if ids.dim() != 1 or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(
                f"token_ids: got {ids.dtype} {list(ids.shape)}; allowed integers [tokens], at "
                "least one; pass one sequence at a time"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise InputError(
                f"token_ids: got {low if low < 0 else high}; allowed 0..{size - 1}, the "
                "vocabulary; use the model's tokenizer"
            )
        return ids.long()

    def _require(self, sequences: Sequence[int]) -> None:
        if self._verifying:
            raise PlanError(
                "sequences: got a call while windows are verified; allowed after accept or abort; "
                "end the step first"
            )
        seen: set[int] = set()
        for sequence in sequences:
            self.pool.tokens(sequence)  # raises unless the handle is live
            if sequence in seen:
                raise InputError(
                    f"sequences: got {sequence} twice; allowed each once; drop the repetition"
                )
            seen.add(sequence)


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> torch.Tensor:
    """``[rows, width]`` on the host."""
    full = torch.full((len(rows), width), fill, dtype=torch.long)
    for place, row in enumerate(rows):
        full[place, : len(row)] = torch.tensor(row, dtype=torch.long)
    return full
