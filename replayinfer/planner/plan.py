"""The plan of one step: device arrays at fixed addresses, and the host's record of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..pools import StatePool
from ..pools.pages import IdArray

__all__ = ["Plan", "PlanArrays", "PlanBuffer"]

# Uploads in flight before a host buffer is written again. Three cover two steps ahead of the
# device.
_STAGES = 3


@dataclass(frozen=True)
class PlanArrays:
    """The arrays that kernels read, int32; one entry per row of the padded bucket.

    A pad row has ``slot``, ``page`` and table entries of -1 and zeros elsewhere. The fold list is
    dense: its first ``fold_count[0]`` entries are valid, the others are pads.

    Attributes
    ----------
    slot : [bucket]
        Sequence slot, which is also the convolution ring's.
    page : [bucket]
        Checkpoint page that the readout reads: the fold's destination where the sequence folds.
    history : [bucket]
        Rows before the window, after the folds of this step.
    window : [bucket]
        New tokens of the sequence, 0..T.
    conv_place : [bucket]
        Ring position of the window's first token.
    table : [bucket, pages]
        Input pages, after the folds of this step.
    fold_count : [1]
    fold_source, fold_target, fold_rows : [bucket]
        Pages and row counts of the folds.
    fold_table : [bucket, pages]
        Input pages that hold the folded rows, as they were before this step.
    ancestors : [bucket, max_window]
        Bit ``s`` of entry ``t``: node ``s`` of the window is ``t``, or leads to it. A chain is a
        tree without branches, so that kernels know no difference. No columns where windows have one
        token, or more than an int32 has bits for.
    """

    slot: torch.Tensor
    page: torch.Tensor
    history: torch.Tensor
    window: torch.Tensor
    conv_place: torch.Tensor
    table: torch.Tensor
    fold_count: torch.Tensor
    fold_source: torch.Tensor
    fold_target: torch.Tensor
    fold_rows: torch.Tensor
    fold_table: torch.Tensor
    ancestors: torch.Tensor


# Name, columns (one, or as many as there are "pages" or "nodes"), pad value; fold_count stands
# alone at the front.
_LAYOUT: tuple[tuple[str, str, int], ...] = (
    ("slot", "one", -1),
    ("page", "one", -1),
    ("history", "one", 0),
    ("window", "one", 0),
    ("conv_place", "one", 0),
    ("fold_source", "one", -1),
    ("fold_target", "one", -1),
    ("fold_rows", "one", 0),
    ("table", "pages", -1),
    ("fold_table", "pages", -1),
    ("ancestors", "nodes", 0),
)
_ALIGN = 4  # ints; every array starts on 16 bytes, so kernels see one alignment in any bucket


class PlanBuffer:
    """One int32 allocation per bucket that holds every array of a plan.

    The device side never moves, so a CUDA graph captured on it stays valid. On a CPU the host side
    is the device side. Elsewhere pinned host buffers rotate, each reused only once its upload is
    done.
    """

    def __init__(self, bucket: int, pages: int, nodes: int, device: torch.device) -> None:
        self.bucket = bucket
        self.columns = {"pages": pages, "nodes": nodes}
        size = self._spans()[-1][2]
        self._device = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._events: list[torch.cuda.Event | None] = []
        if device.type == "cpu":
            hosts = [self._device]
        else:
            pin = device.type == "cuda"
            hosts = [torch.empty(size, dtype=torch.int32, pin_memory=pin) for _ in range(_STAGES)]
            self._events = [None] * _STAGES
        self._stages = [(h, self._views(h.numpy())) for h in hosts]
        self._current = 0
        views = {
            name: torch.narrow(self._device, 0, start, stop - start).view(shape)
            for name, start, stop, shape in self._spans()
        }
        self.arrays = PlanArrays(**views)

    def begin(self) -> dict[str, NDArray[np.int32]]:
        """Host views of the next buffer to fill, all pads."""
        self._current = (self._current + 1) % len(self._stages)
        if self._events and (event := self._events[self._current]) is not None:
            event.synchronize()  # done long ago unless the host runs three steps ahead
        views = self._stages[self._current][1]
        for name, _, pad in _LAYOUT:
            views[name].fill(pad)
        views["fold_count"].fill(0)
        return views

    def upload(self) -> None:
        """Send the filled buffer to the device, without waiting for it."""
        if not self._events:
            return
        self._device.copy_(self._stages[self._current][0], non_blocking=True)
        if self._device.device.type == "cuda":
            event = self._events[self._current] or torch.cuda.Event()
            event.record()
            self._events[self._current] = event

    def _spans(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        spans: list[tuple[str, int, int, tuple[int, ...]]] = [("fold_count", 0, 1, (1,))]
        stop = 1
        for name, kind, _ in _LAYOUT:
            columns = self.columns.get(kind)
            shape = (self.bucket,) if columns is None else (self.bucket, columns)
            start = -(-stop // _ALIGN) * _ALIGN
            stop = start + self.bucket * (1 if columns is None else columns)
            spans.append((name, start, stop, shape))
        return spans

    def _views(self, flat: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        return {n: flat[a:b].reshape(shape) for n, a, b, shape in self._spans()}


@dataclass
class Plan:
    """What one step does, from plan to commit or abort.

    Attributes
    ----------
    pool : StatePool
        The pool whose sequences and pages it speaks of.
    batch, bucket, window : int
        Sequences, rows of the padded batch, and tokens per row of the step's tensors (T).
    arrays : PlanArrays
        What kernels read; the same addresses in every plan of this bucket.
    windows, starts : int32 [batch]
        New tokens per sequence, and rows before them after the folds.
    fold : bool [batch]
        The sequences that fold before the readouts.
    fold_rows : int32 [batch]
        Rows that a folding sequence folds (its whole history at plan time; none where a direct step
        only moves it to a page of its own).
    parents : int32 [batch, window] or None
        Parent of every node where the windows are draft trees; None where they are chains.
    forced : int
        Folds that ``force_fold`` or a direct step asked for and nothing else did.
    early : int
        Folds that the policy added.
    direct : bool
        Whether the step moves the states themselves, in place, instead of writing rows. Windows are
        0 or 1, and a sequence that takes a token has no rows and a checkpoint page of its own.
    layers_run : set of int
        Layers whose readout, or direct step, was enqueued.
    layers_convolved : set of (int, bool)
        Layers whose convolved readout was enqueued, and whether into a CUDA graph.
    """

    pool: StatePool = field(repr=False)
    batch: int
    bucket: int
    window: int
    arrays: PlanArrays
    handles: NDArray[np.int64]
    slots: NDArray[np.int64]
    windows: NDArray[np.int32]
    starts: NDArray[np.int32]
    fold: NDArray[np.bool_]
    fold_rows: NDArray[np.int32]
    forced: int
    early: int
    # The fold list, and what changes hands when it has run.
    fold_index: NDArray[np.int64]
    pages: IdArray
    table: IdArray
    taken_checkpoints: IdArray
    taken_inputs: IdArray
    released_checkpoints: IdArray
    released_inputs: IdArray
    parents: NDArray[np.int32] | None = None
    direct: bool = False
    state: Literal["planned", "folded", "committed", "aborted"] = "planned"
    layers_run: set[int] = field(default_factory=set)
    layers_convolved: set[tuple[int, bool]] = field(default_factory=set)

    @property
    def fold_count(self) -> int:
        """Sequences that fold before the readouts of this step."""
        return int(self.fold_index.size)

    def ring_places(self) -> NDArray[np.int64]:
        """Ring positions of the windows' first tokens ``[batch]``; a fold does not move them."""
        cur = self.pool.cursors
        tokens: NDArray[np.int64] = cur.base[self.slots] + cur.history[self.slots]
        return tokens % self.pool.conv.ring

    @property
    def tree(self) -> bool:
        """Whether the windows are draft trees, so that commit takes paths."""
        return self.parents is not None

    @property
    def moved(self) -> bool:
        """Whether a direct step has begun to move states, so that no token can be dropped."""
        return self.direct and bool(self.layers_run) and bool(self.windows.any())
