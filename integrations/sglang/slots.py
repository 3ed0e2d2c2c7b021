"""Replay on state slots that SGLang allocates: our rows and cursors beside its states.

A slot of its pool is a sequence slot of ours, under the same number, and its state is our
checkpoint page. Slot 0, which SGLang's padded rows name, is never a sequence of ours, so that a
plan treats it as a pad. What SGLang does to a slot (clear, copy, move to the host and back) reaches
our part of it through the methods of its ``SlotIndexedState`` protocol.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import replayinfer
from replayinfer import (
    FORMATS,
    LayerSpec,
    Plan,
    PlanError,
    ReplayDecodeWrapper,
    StatePool,
)

from .layers import RecurrentLayers
from .options import Options

__all__ = ["SlotReplay", "row_bytes_per_slot"]

_COUNTS = ("decode rows", "folds", "folds for extend", "folds for tracking")
_VERIFY_COUNTS = ("verified windows", "accepted rows")  # of servers that speculate
_ROWS, _FOLDS, _EXTEND, _TRACK, _WINDOWS, _ACCEPTED = range(len(_COUNTS + _VERIFY_COUNTS))


def row_bytes_per_slot(
    spec: LayerSpec, layers: int, states: torch.dtype, activations: torch.dtype, options: Options
) -> int:
    """Device bytes that a state slot needs beside its state: input pages and its cursor."""
    one = torch.empty((layers, 1, *spec.state_shape), dtype=states, device="meta")
    fmt = FORMATS[options.format_for(states, activations)]
    rows = _page_rows(options.capacity)
    pages = -(-options.capacity // rows)
    row = spec.row_bytes(activations, fmt)
    return one.shape[0] * pages * rows * row + _cursor_bytes(pages) + 1


def _page_rows(capacity: int) -> int:
    return min(8, 1 << (capacity - 1).bit_length())


def _cursor_bytes(pages: int) -> int:
    return 4 * (-(-(8 + 2 * pages) // 8) * 8)


@dataclass
class _Saved:
    """A slot's part of ours on the host."""

    history: torch.Tensor
    plain: torch.Tensor
    rows: dict[str, torch.Tensor]


class SlotReplay:
    """The pool, the planner and the step of one model's recurrent layers.

    Parameters
    ----------
    layers : RecurrentLayers
    order : list of int
        Layer index of each layer of `states`.
    states : Tensor, [layers, slots, heads, dim, state]
        SGLang's states, which become our checkpoint pages in place. They are zeroed.
    activations : torch.dtype
        Of the layers' inputs.
    options : Options
    window : int
        Tokens of a sequence in a verify step: 1 + drafts. 1 where the server does not speculate.
    windows : torch.dtype, optional
        Of SGLang's convolution windows; None: whoever they belong to convolves.
    backend : str
        As in `ReplayDecodeWrapper`.

    Notes
    -----
    Between `begin` and `finish` a decode step is planned; nothing of it waits for the device, and
    all of it can be captured in a CUDA graph. The cursors of a slot are on the device alone.

    A verify step goes from `begin` to `pause`: the rows of its windows are written, and belong to
    nobody. `accept`, which comes when the tokens were judged and is never part of a graph, takes
    the first of them. What is not taken is overwritten by the next step.
    """

    def __init__(
        self,
        layers: RecurrentLayers,
        order: list[int],
        states: torch.Tensor,
        activations: torch.dtype,
        options: Options,
        *,
        window: int = 1,
        windows: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        slots = int(states.shape[1])
        self.layers = layers
        self.options = options
        self.window = window
        self.windows = windows
        self.stepping = False  # whether layers run for a decode or a verify
        self.projects = True  # whether a model's layers reach us with nothing in between
        self.pool = StatePool(
            layers.spec, order, slots, max_window=window,
            capacity=options.capacity, page_rows=_page_rows(options.capacity),
            format=options.format_for(states.dtype, activations), dtype=activations,
            checkpoints=states, planner="device", device=states.device,
        )  # fmt: skip
        wrapper = ReplayDecodeWrapper(
            self.pool, backend=backend, policy=options.policy, direct="never"
        )
        self.backend = wrapper.backend
        self.planner: Any = wrapper.planner  # of tensors on the device
        # Folds that somebody asks for: of those sequences alone, whatever the policy.
        self._forcing: Any = ReplayDecodeWrapper(
            self.pool, backend=self.backend, policy="full", direct="never"
        ).planner
        # Slots and pages of a fresh pool come in order, so that a slot's number is its page's.
        handles = self.pool.alloc(slots)
        self.pool.free(handles[0])
        assert self.pool.on_device is not None
        self._records = self.pool.on_device.records
        self._history = self._records.history
        self._splits = self.pool.checkpoints.low is not None
        # Whether a slot's page holds plain float32 though the format has planes; zeros are both.
        self._plain = torch.zeros(slots, dtype=torch.bool, device=states.device)
        kinds = len(_COUNTS + _VERIFY_COUNTS)
        self._counts = torch.zeros(kinds, dtype=torch.int64, device=states.device)
        self._pages = self.pool.sizes.pages_per_sequence
        self._plan: Plan | None = None
        self._verified: dict[int, Any] = {}  # device arrays of a verify step, by bucket
        self.last_layer = order[-1]
        self._slots = slots
        self._bound = False
        self.bind()

    def bind(self) -> None:
        """Take the layers' parameters, again after the model's weights were updated.

        Rows that are pending were made with the old ones, which fold them.
        """
        if self._bound:
            self._drop()
            self.fold_now(torch.arange(1, self._slots, device=self._plain.device))
        self._bound = True
        for layer in self.pool.layers:
            self.pool.bind(layer, **self.layers.weights(layer))

    @property
    def nbytes(self) -> int:
        """Device bytes beside SGLang's states, weights apart."""
        weights = sum(w.nbytes for w in self.pool.weights.values())
        lent = self.pool.checkpoints.nbytes
        return self.pool.nbytes - lent - weights + self._plain.nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes that kernels hold so far between their launches, for each batch size."""
        return sum(map(replayinfer.ops.scratch_bytes, (self.planner, self._forcing)))

    # A decode step ----------------------------------------------------------------------------

    def begin(self, slots: torch.Tensor, *, verify: bool = False) -> None:
        """Plan a step of `slots` ``[batch]`` (0 and negative ones are pads), and fold.

        One token of each, or the window of a `verify` step.
        """
        self._drop()
        self.stepping = True
        window = self.window if verify else 1
        plan = self.planner.plan(slots, window, bucket=slots.shape[0], window=window)
        replayinfer.ops.fold(self.planner, plan, backend=self.backend)
        self._count_folds(plan, _FOLDS)
        if verify:
            self._counts[_WINDOWS].add_((plan.arrays.window > 0).sum())
        else:
            self._counts[_ROWS].add_(plan.arrays.window.sum())
        self._plan = plan

    def readout(
        self, layer: int, *, out: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """One layer's outputs ``[batch, window, heads, dim]``; see `ops.readout`."""
        return replayinfer.ops.readout(
            self.pool, self._planned(layer), layer, out=out, backend=self.backend, **inputs
        )

    def convolves(self, x: Any) -> bool:
        """Whether `x` ``[batch, ...]`` is of a decode step that `convolved_readout` serves."""
        plan = self._plan
        if plan is None or plan.window > 1 or not isinstance(x, torch.Tensor):
            return False
        if x.shape[0] != plan.bucket or not x.dtype == self.pool.dtype == self.windows:
            return False
        return replayinfer.ops.convolves(self.pool, plan.bucket, backend=self.backend)

    def convolved_readout(
        self, layer: int, conv: replayinfer.ops.ShiftedConvolution, **gates: torch.Tensor
    ) -> torch.Tensor:
        """One layer's outputs ``[batch, 1, heads, dim]``; see `ops.convolved_readout`."""
        return replayinfer.ops.convolved_readout(
            self.pool, self._planned(layer), layer, conv, backend=self.backend, **gates
        )

    def finish(self) -> None:
        """Commit the step, after its last layer."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self.planner.commit(plan)

    def pause(self) -> None:
        """Leave a verify step after its last layer, for `accept` to come back to.

        Its arrays stay on the device as they are. The host keeps no plan, since a graph that is
        replayed makes none.
        """
        plan: Any = self._plan
        if plan is not None:
            self._verified[plan.bucket] = plan.step
            self._drop()

    def accept(
        self,
        bucket: int,
        last: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracked: torch.Tensor | None = None,
    ) -> None:
        """Take the tokens of the last verify step of `bucket` rows that were accepted.

        Parameters
        ----------
        last : int32 or int64 [batch]
            The last accepted token of each window, from 0; -1 for none.
        targets, tracked : int64 [batch], optional
            Slots to write states into, and after which tokens of the windows; -1 for none.
        """
        step = self._verified.get(bucket)
        if step is None:
            raise PlanError(
                f"verify: got accepted tokens of {bucket} rows, of which no step was made; allowed "
                "after its last layer; serve with another decode backend"
            )
        if targets is not None and tracked is not None and targets.shape[0]:
            self._write_to(step, targets, tracked)
        counts = torch.nn.functional.pad(last + 1, (0, bucket - last.shape[0]))
        self.planner.kernels.commit_step(self.pool, step, counts)
        self._counts[_ACCEPTED].add_(step.counts.sum())

    def _write_to(self, step: Any, targets: torch.Tensor, tracked: torch.Tensor) -> None:
        """Fold slots, up to a token of their windows, into the states of others.

        For the moment of a fold a target has the pages of its source and that many rows, as a fork
        has. The fold leaves it on its own.
        """
        arrays, records, batch = step.arrays, self._records, targets.shape[0]
        chosen = (tracked >= 0) & (targets > 0) & (arrays.slot[:batch] > 0)
        at = torch.where(chosen, targets, 0).long()  # slot 0 is nobody's
        records.checkpoint[at] = arrays.page[:batch]
        records.table[at] = arrays.table[:batch]
        records.history[at] = (arrays.history[:batch] + tracked + 1).int()
        self._plain.index_fill_(0, at, False)
        self._fold(torch.where(chosen, targets, -1), chosen, _power(batch), _TRACK)

    # What reads or writes states directly -----------------------------------------------------

    def fold_now(self, slots: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
        """Fold every pending row of `slots`, or of those that are `chosen` (bool ``[batch]``)."""
        if chosen is None:
            chosen = torch.ones(slots.shape[0], dtype=torch.bool, device=slots.device)
            self._fold(slots, chosen, _power(slots.shape[0]), _EXTEND)
        else:
            self._fold(slots, chosen, slots.shape[0], _TRACK)  # the bucket as captured

    def before_extend(self, slots: torch.Tensor) -> None:
        """Make the states of `slots` plain and whole, for SGLang's own prefill to go on from."""
        self._drop()
        self.stepping = False
        if not slots.shape[0]:
            return
        slots = _unpadded(slots)
        self.fold_now(slots)
        if self._splits:
            at = slots.clamp_min(0).long()
            replayinfer.ops.join_pages(
                self.pool, slots, ~self._plain[at] & (slots > 0), backend=self.backend
            )
            self._plain.index_fill_(0, at, True)

    def after_extend(self, slots: torch.Tensor) -> None:
        """Take back the states that SGLang's prefill has left in `slots`."""
        if self._splits and slots.shape[0]:
            slots = _unpadded(slots)
            at = slots.clamp_min(0).long()
            replayinfer.ops.split_pages(
                self.pool, slots, self._plain[at] & (slots > 0), backend=self.backend
            )
            self._plain.index_fill_(0, at, False)

    def written(self, slots: torch.Tensor, chosen: torch.Tensor, *, plain: bool) -> None:
        """States were written into `slots` where `chosen`, whole ones without rows."""
        at = torch.where(chosen & (slots > 0), slots, 0).long()
        self._history.index_fill_(0, at, 0)
        self._plain.index_fill_(0, at, plain and self._splits)

    # SGLang's SlotIndexedState ----------------------------------------------------------------

    def reset_slots(self, indices: torch.Tensor) -> None:
        """Slots whose states are being zeroed."""
        at = indices.long()
        self._history.index_fill_(0, at, 0)
        self._plain.index_fill_(0, at, False)

    def copy_slots(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """Slots whose states are copied: their pending rows go along."""
        source, target = src_index.long(), dst_index.long()
        self._history[target] = self._history[source]
        self._plain[target] = self._plain[source]
        source, target = self._input_pages(source), self._input_pages(target)
        for field in self.pool.inputs.fields.values():
            field[:, target] = field[:, source]

    def get_cpu_slots(self, indices: torch.Tensor) -> _Saved:
        """Our part of slots that go to the host."""
        at = indices.long().reshape(-1)  # SGLang gives one slot without an axis
        pages = self._input_pages(at)
        fields = self.pool.inputs.fields.items()
        return _Saved(
            self._history[at].cpu(),
            self._plain[at].cpu(),
            {n: f[:, pages].cpu() for n, f in fields},
        )

    def load_cpu_slots(self, data: _Saved, indices: torch.Tensor) -> None:
        """The inverse of `get_cpu_slots`, into other slots perhaps."""
        at = indices.long().reshape(-1)
        pages = self._input_pages(at)
        self._history[at] = data.history.to(at.device)
        self._plain[at] = data.plain.to(at.device)
        for name, field in self.pool.inputs.fields.items():
            field[:, pages] = data.rows[name].to(at.device)

    def iter_transfer_state_entries(self) -> Iterator[Any]:
        """Nothing: what transfers states to other machines is refused at the start."""
        return iter(())

    # Counters ---------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Totals since the start, and the bytes of state traffic that replay saved; waits."""
        kinds = _COUNTS + (_VERIFY_COUNTS if self.window > 1 else ())
        counts = dict(zip(kinds, self._counts.tolist(), strict=False))
        pool = self.pool
        state = math.prod(pool.spec.state_shape) * len(pool.layers)
        row = pool.spec.row_bytes(pool.dtype, pool.format) * len(pool.layers)
        folds = sum(counts[name] for name in _COUNTS[_FOLDS:])
        rows, windows = counts["decode rows"], counts.get("verified windows", 0)
        # Half of the capacity is what a slot holds on average between two folds.
        half = self.options.capacity // 2
        moved = rows * (state * pool.format.bytes_read + row * (1 + half))
        moved += windows * (state * pool.format.bytes_read + row * (self.window + half))
        moved += folds * (2 * state * pool.format.bytes_stored + row * self.options.capacity)
        # A decode step reads and writes a state. A verify reads it, writes one for each token, and
        # the last accepted one is read and written once more.
        standard = (rows * 2 + windows * (self.window + 3)) * state * pool.format.standard_bytes
        counts["bytes saved"] = standard - moved
        return counts

    # Inside -----------------------------------------------------------------------------------

    def _planned(self, layer: int) -> Plan:
        if self._plan is None:
            raise PlanError(
                f"decode: got layer {layer} in a step that was not planned; allowed after the "
                "attention metadata of a decode batch was made; serve with another decode backend"
            )
        return self._plan

    def _fold(self, slots: torch.Tensor, chosen: torch.Tensor, bucket: int, cause: int) -> None:
        plan = self._forcing.plan(slots, 0, bucket=bucket, force_fold=chosen)
        replayinfer.ops.fold(self._forcing, plan, backend=self.backend)
        self._count_folds(plan, cause)
        self._forcing.commit(plan)

    def _drop(self) -> None:
        """Give up a step: its layers did not all run, as after an error, or its windows wait."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self.planner.abort(plan)

    def _count_folds(self, plan: Plan, cause: int) -> None:
        self._counts[cause].add_(plan.arrays.fold_count[0])

    def _input_pages(self, slots: torch.Tensor) -> torch.Tensor:
        each = torch.arange(self._pages, device=slots.device)
        return (slots[:, None] * self._pages + each).flatten()


def _power(batch: int) -> int:
    """The least power of two that holds a batch."""
    return 1 << (batch - 1).bit_length()


def _unpadded(slots: torch.Tensor) -> torch.Tensor:
    """Slot 0 as -1, which may occur more than once."""
    return torch.where(slots > 0, slots, -1)
