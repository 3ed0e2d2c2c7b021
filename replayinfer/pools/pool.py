"""`StatePool`: the sequences of one model's recurrent layers, and everything they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import positive_int, usable_device
from ..errors import InputError
from ..formats import CheckpointFormat, get_format
from ..spec import LayerSpec
from .capacity import CapacityReport, fit_sequences, report
from .checkpoint import CheckpointPool, check_lent
from .conv import ConvPool
from .cursors import MAX_SLOTS, Cursors, SequenceId, SlotArray
from .device_cursors import DeviceCursors
from .guards import GuardedPages
from .inputs import InputPool
from .pages import PageAllocator
from .residence import Residence
from .seeding import check_seed
from .sharing import drop_shared_pages, fork, rollback
from .sizes import layer_tuple, settle_sizes
from .transfer import SequenceSnapshot, export_sequence, import_sequence
from .weights import LayerWeights

__all__ = ["StatePool"]


class StatePool:
    """Checkpoint pages, input pages, convolution rings and cursors of one set of layers.

    A sequence has the same page ids in every layer. Nothing is ever written into a page that
    another sequence holds; every method either does the whole of what it says or raises and changes
    nothing.

    Parameters
    ----------
    spec : LayerSpec
        The shape of the layers (one shape per pool; use a pool per shape otherwise).
    layers : iterable of int
        Model layer indices that this pool serves, e.g. the recurrent layers of a pipeline stage.
    max_sequences : int
        Sequences that may live at once.
    capacity : int
        Rows a sequence may hold after its checkpoint, the window of a step included (L).
    max_window : int
        Longest window of a step (T): 1 to decode, 1 + drafts to verify.
    format : str
        Checkpoint format: ``fp32``, ``fp32_split``, ``bf16`` or ``fp16``.
    dtype : torch.dtype
        Activations in rows and convolution rings: float32, bfloat16 or float16.
    checkpoint_pages, input_pages : int, optional
        Defaults suffice for `max_sequences` that share nothing. Forks need spare checkpoint pages:
        two sharers that fold in one step take a page each before the shared one is released.
    page_rows : int, optional
        Rows of an input page, a power of two. A fork copies at most one page.
    restore : {"window", "any"}
        ``"any"`` keeps ``capacity`` more convolution rows per sequence, and with them may roll back
        to any row after the checkpoint; ``"window"`` reaches back over the last window only.
    planner : {"host", "device"}
        ``"device"`` keeps the cursors on the device as well, so that a step can be planned there,
        before the host knows how many tokens of the last one were accepted. A sequence then owns
        all the pages that it can need, spares for what it shares included: `alloc` takes
        ``ceil(capacity / page_rows)`` input pages, and a fork takes as many and a checkpoint page
        for each copy, and for the parent a spare of every page that it lends. `alloc`, `free` and
        `seed` send their changes without waiting; what needs the cursors themselves (`fork`,
        `rollback`, `export`, a prefill, `tokens`, `history`) reads the device first, a sync.
    checkpoints : Tensor, optional
        Memory of the caller's for the checkpoint pages, ``[layers, pages, heads, dim, state]`` in
        the format's type (float32 for ``fp32_split``, whose planes take the place of the state),
        e.g. the state slots that an engine has already. `alloc` zeroes what it hands out. Such a
        pool neither sleeps nor resizes.
    device : torch.device or str

    Raises
    ------
    UnsupportedError
        A size, type or format that cannot work, e.g. a capacity below the window.
    InputError
        `checkpoints` of another shape, type or device.

    Examples
    --------
    >>> from replayinfer import Mamba2Spec, StatePool
    >>> pool = StatePool(Mamba2Spec(heads=4, dim=8, state=16), layers=[0, 2], max_sequences=8)
    >>> a, b = pool.alloc(2)
    >>> (c,) = pool.fork(a)
    >>> pool.free([a, b, c])
    >>> pool.pages_in_use()
    {'checkpoint pages': 0, 'input pages': 0, 'sequence slots': 0}
    """

    def __init__(
        self,
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
        restore: Literal["window", "any"] = "window",
        planner: Literal["host", "device"] = "host",
        checkpoints: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = layer_tuple(layers)
        self.device = usable_device(device)
        if checkpoints is not None:
            pages = check_lent(spec, get_format(format), len(self.layers), self.device, checkpoints)
            if checkpoint_pages not in (None, pages):
                raise InputError(
                    f"checkpoint_pages: got {checkpoint_pages}; allowed {pages}, the pages that "
                    "were lent; leave it out"
                )
            checkpoint_pages = pages
        self._lent = checkpoints
        sizes = settle_sizes(
            spec, self.layers, max_sequences, capacity=capacity, max_window=max_window,
            format=format, dtype=dtype, checkpoint_pages=checkpoint_pages,
            input_pages=input_pages, page_rows=page_rows, restore=restore, planner=planner,
        )  # fmt: skip
        self.spec = spec
        self.layer_index = {layer: i for i, layer in enumerate(self.layers)}
        self.sizes = sizes
        self.format = sizes.format
        self.dtype = dtype
        self.capacity = capacity
        self.max_window = max_window
        self.restore = restore

        self.make_tensors()
        self._weights = LayerWeights(spec, self.layers, self.device)
        self.weights = self._weights.tensors  # name -> float32 [layers, ...]
        self.cursors = Cursors(max_sequences, sizes.pages_per_sequence)
        self.on_device = DeviceCursors(self) if sizes.device_cursors else None
        advice = "free sequences, or make the pool with more {}"
        self._residence = Residence(self)
        self.slot_ids = PageAllocator(
            "sequence slots", max_sequences, advice.format("max_sequences")
        )
        self.checkpoint_ids = PageAllocator(
            "checkpoint pages", sizes.checkpoint_pages, advice.format("checkpoint_pages")
        )
        self.input_ids = PageAllocator(
            "input pages", sizes.input_pages, advice.format("input_pages")
        )

    @classmethod
    def from_memory_budget(
        cls, spec: LayerSpec, layers: Iterable[int], budget: int, **options: Any
    ) -> StatePool:
        """A pool for as many sequences that share nothing as fit into `budget` bytes.

        `options` are those of the constructor except the counts of sequences and pages.

        Raises
        ------
        CapacityError
            Not even one sequence fits; the message says what one needs.
        """
        layers = layer_tuple(layers)
        for name in ("max_sequences", "checkpoint_pages", "input_pages"):
            if name in options:
                raise InputError(
                    f"{name}: got {options[name]!r}; allowed nothing, the budget decides it; "
                    "use StatePool(...) to choose it"
                )
        budget = positive_int("budget", budget)
        sizing = {k: v for k, v in options.items() if k != "device"}
        one = report(settle_sizes(spec, layers, 1, **sizing))
        return cls(spec, layers, min(fit_sequences(one, budget), MAX_SLOTS), **options)

    # Layers -----------------------------------------------------------------------------------

    def bind(self, layer: int, **weights: torch.Tensor | None) -> None:
        """Give a layer its parameters; they are copied and kept in float32.

        Folds and readouts of every step use them, so bind again after a weight update.

        Parameters
        ----------
        layer : int
            A model layer index of this pool.
        **weights
            By the names of ``spec.weight_fields``. Mamba-2: ``A [heads]`` (negative), ``D
            [heads]``, ``dt_bias [heads]``; GDN with ``gate="softplus"``: ``A_log [heads]``,
            ``dt_bias [heads]``; with a convolution ``conv_weight [channels, width]``, ``conv_bias
            [channels]``. ``None`` or an omitted name means its default; any float dtype.
        """
        self._weights.bind(self.index(layer), layer, weights)

    def index(self, layer: int) -> int:
        """Position of a model layer in this pool's tensors."""
        try:
            return self.layer_index[layer]
        except (KeyError, TypeError):
            raise InputError(
                f"layer: got {layer!r}; allowed the layers of this pool, {list(self.layers)}; "
                "use the pool that holds the layer"
            ) from None

    def require_bound(self) -> None:
        """Raise `PlanError` unless every layer has its parameters."""
        self._weights.require_bound()

    # Sequences --------------------------------------------------------------------------------

    def alloc(self, count: int = 1) -> list[SequenceId]:
        """Start `count` sequences at token 0 with zero state and zero convolution window.

        Raises
        ------
        CapacityError
            Too few sequence slots, checkpoint pages, or (of a device-planned pool) input pages;
            nothing is taken.
        """
        count = positive_int("count", count)
        self.cursors.require_awake()
        owned = self.sizes.pages_per_sequence if self.on_device else 0
        self.require(count, count, count * owned)
        pages = self.checkpoint_ids.take(count)
        slots = self.slot_ids.take(count)
        self.checkpoints.zero(self.device_ids(pages))
        self.conv.zero(self.device_ids(slots))
        handles = self.cursors.open(slots)
        self.cursors.checkpoint[slots] = pages
        if self.on_device:
            inputs = self.input_ids.take(count * owned).reshape(count, owned)
            self.on_device.give(slots, pages, inputs)
            self.on_device.push(slots)
        return handles

    def seed(
        self,
        sequence: int,
        states: Mapping[int, torch.Tensor],
        *,
        tokens: int,
        conv: Mapping[int, torch.Tensor] | None = None,
        layout: Literal["vk", "kv"] = "vk",
    ) -> None:
        """Set a sequence to the final state of a prefill over `tokens` tokens.

        Parameters
        ----------
        sequence : SequenceId
        states : mapping of layer to Tensor
            Every layer of the pool. ``"vk"``: ``[heads, dim, state]``; ``"kv"``:
            ``[heads, state, dim]``. Any float dtype; float64 is rounded to fp32.
        tokens : int
            How many tokens the state covers.
        conv : mapping of layer to Tensor, optional
            ``[channels, taps]``, the newest pre-convolution row last. The last ``conv_width - 1``
            are used; fewer are zero-filled on the left. Required where the spec has a convolution.
        """
        slot = self.cursors.one(sequence)
        tokens = positive_int("tokens", tokens, minimum=0)
        state_rows, conv_rows = check_seed(self, states, conv, layout)

        cur = self.cursors
        page = cur.checkpoint[slot : slot + 1]
        if self.on_device:
            self.on_device.return_borrowed(slot, checkpoint=True)
        elif self.checkpoint_ids.refs[page[0]] > 1:
            fresh = self.checkpoint_ids.take(1)
            self.checkpoint_ids.release(page)
            cur.checkpoint[slot] = fresh[0]
        drop_shared_pages(self, slot)
        cur.base[slot] = tokens
        cur.history[slot] = 0
        cur.undo[slot] = 0
        cur.given[slot] = True
        self.push(np.array([slot]))
        target = self.device_ids(cur.checkpoint[slot : slot + 1])
        for index, (state, rows) in enumerate(zip(state_rows, conv_rows, strict=True)):
            self.checkpoints.store(index, target, state[None])
            if rows is not None:
                self.conv.write_before(index, slot, tokens, rows)

    def fork(self, sequence: int, count: int = 1, *, rows: int | None = None) -> list[SequenceId]:
        """Start `count` copies of a sequence that share its checkpoint and its full pages.

        Only the one page that is partly filled is copied, to each child; the parent keeps its own.

        Parameters
        ----------
        rows : int, optional
            Start the copies after this many of the rows after the checkpoint, as if the later ones
            had been rolled back; the limits are those of `rollback`.

        Raises
        ------
        CapacityError
            Too few slots or input pages; nothing is taken.
        """
        return fork(self, sequence, count, rows)

    def free(self, sequences: int | Sequence[int] | NDArray[np.int64]) -> None:
        """End sequences: their handles go stale, and what nobody else holds becomes free.

        Raises
        ------
        StaleHandleError
            Any of them is not live (freed before, or foreign); none is freed then.
        PlanError
            A plan holds one of them.
        """
        slots = self.cursors.resolve(sequences)
        cur = self.cursors
        if self.on_device:
            self.on_device.take_back(slots)
        else:
            self.checkpoint_ids.release(cur.checkpoint[slots])
            tables = cur.table[slots]
            self.input_ids.release(tables[tables >= 0])
        cur.close(slots)
        self.slot_ids.release(slots.astype(np.int32))
        self.push(slots)

    def rollback(self, sequence: int, rows: int) -> None:
        """Drop the last `rows` committed rows of a sequence.

        Raises
        ------
        InputError
            More rows than lie after the checkpoint, or (with ``restore="window"``) than the last
            commit added.
        CapacityError
            A shared, partly dropped page must be copied and no input page is free.
        """
        rollback(self, sequence, rows)

    # Reading ----------------------------------------------------------------------------------

    def slot(self, sequence: int) -> int:
        """The slot of a sequence: an int below 2^20 that stays the same until `free`.

        Never waits for the device. Device planners take it in place of the handle, which names the
        generation as well.
        """
        return self.cursors.peek(sequence)

    def tokens(self, sequence: int) -> int:
        """Tokens that a sequence has committed, the prefill included."""
        slot = self.cursors.peek(sequence)
        self.refresh(slot)
        return int(self.cursors.base[slot]) + int(self.cursors.history[slot])

    def history(self, sequence: int) -> int:
        """Committed rows of a sequence after its checkpoint."""
        slot = self.cursors.peek(sequence)
        self.refresh(slot)
        return int(self.cursors.history[slot])

    def conv_tail(self, sequence: int) -> torch.Tensor:
        """Pre-convolution rows before the next token: ``[layers, channels, conv_width - 1]``."""
        slot = self.cursors.peek(sequence)
        self.refresh(slot)
        return self.conv.before(slot, self.tokens(sequence)).transpose(1, 2).contiguous()

    def pages_in_use(self) -> dict[str, int]:
        """Held units by pool name."""
        return {p.name: p.used for p in (self.checkpoint_ids, self.input_ids, self.slot_ids)}

    def capacity_report(self) -> CapacityReport:
        """Exact device bytes of this pool, with the formula."""
        return report(self.sizes)

    @property
    def nbytes(self) -> int:
        """Device bytes that the pool's tensors hold; equals ``capacity_report().total_bytes``."""
        parts = (self.checkpoints.nbytes, self.inputs.nbytes, self.conv.nbytes)
        cursors = self.on_device.nbytes if self.on_device else 0
        return sum(parts) + sum(w.nbytes for w in self.weights.values()) + cursors

    def guarded(self) -> list[GuardedPages]:
        """Every allocation of pages, with its guards where ``REPLAYINFER_CHECK`` is on."""
        return [self.checkpoints.guarded, *self.inputs.guarded, self.conv.guarded]

    # Elsewhere --------------------------------------------------------------------------------

    def export(self, sequence: int) -> SequenceSnapshot:
        """Copy everything that continues a sequence to the host; see `SequenceSnapshot`."""
        return export_sequence(self, sequence)

    def import_(self, snapshot: SequenceSnapshot) -> SequenceId:
        """Start a sequence from a snapshot of a pool with the same description.

        Raises
        ------
        InputError
            Any difference in family, spec, layers, format, dtype, capacity or layout; all are
            named.
        CapacityError
            No slot or pages for it.
        """
        return import_sequence(self, snapshot)

    def sleep(self, *, keep: bool = True) -> None:
        """Free the device memory of pages and rings until `wake`; bound weights stay.

        `keep` copies the states to the host; without it every sequence is freed. Any other call is
        refused meanwhile.
        """
        self._residence.sleep(keep=keep)

    def wake(self) -> None:
        """Take the device memory again. Addresses change: capture CUDA graphs anew."""
        self._residence.wake()

    def resize(
        self,
        *,
        max_sequences: int | None = None,
        checkpoint_pages: int | None = None,
        input_pages: int | None = None,
    ) -> None:
        """Grow or shrink between steps; sequences keep their handles. Addresses change.

        Raises
        ------
        CapacityError
            More is held than would remain, or a live handle names a slot beyond the new end.
        PlanError
            A plan is in progress, or the pool sleeps.
        """
        self._residence.resize(max_sequences, checkpoint_pages, input_pages)

    # Inside -----------------------------------------------------------------------------------

    def make_tensors(self) -> None:
        """Allocate pages and rings for `sizes`, all zero."""
        s, n = self.sizes, len(self.layers)
        self.checkpoints = CheckpointPool(
            self.spec, self.format, n, s.checkpoint_pages, self.device, self._lent
        )
        self.inputs = InputPool(
            self.spec, self.format, self.dtype, n, s.input_pages, s.page_rows, self.device
        )
        self.conv = ConvPool(self.spec, self.dtype, n, s.max_sequences, s.ring, self.device)

    def device_ids(self, ids: NDArray[Any]) -> torch.Tensor:
        """Host ids as an int64 index tensor on the pool's device, without a sync."""
        return self.upload(torch.from_numpy(ids.astype(np.int64)))

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Host values on the pool's device, without a sync."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def require(self, slots: int, checkpoints: int, inputs: int) -> None:
        """Raise `CapacityError` unless so many of each are free.

        Where they are not, a device-planned pool first asks the device which shared pages its folds
        have let go: the one time that `alloc` waits.
        """
        self.slot_ids.require(slots)
        short = checkpoints > self.checkpoint_ids.free or inputs > self.input_ids.free
        if short and self.on_device:
            self.refresh()
        self.checkpoint_ids.require(checkpoints)
        self.input_ids.require(inputs)

    def push(self, slots: SlotArray) -> None:
        """Send the cursors of slots to the device, where they live there too."""
        if self.on_device:
            self.on_device.push(slots)

    def refresh(self, slots: SlotArray | int | None = None) -> None:
        """Make the host's cursors of slots (all live ones) those of the device, where it leads."""
        if self.on_device and self.on_device.ahead:
            which = self.cursors.live if slots is None else np.atleast_1d(slots)
            self.on_device.pull(which)
