"""`RingPool`: Mamba-2 states and rows in FlashInfer's layout, for its kernels and for ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from replayinfer import CapacityError, InputError, Mamba2Spec, PlanError, UnsupportedError

from .ring_kernels import RingMemory, choose

__all__ = ["RingPool"]


class RingPool:
    """Slots of a state and a ring of rows in every layer, and their cursors on the host.

    A smaller pool than `StatePool`, without pages, shared prefixes or a convolution, whose memory
    FlashInfer's ``checkpointing_ssu`` and ``replayssm_materialize`` use as it is. A step is `plan`,
    `run` in every layer, `commit`. A fold happens inside `run`, in the sequences whose window would
    no longer fit behind the next one's.

    Parameters
    ----------
    spec : Mamba2Spec
        Without limits to the step sizes, which FlashInfer's kernels do not have.
    layers : sequence of int
    slots : int
    window : int
        Tokens of every step, drafts included.
    capacity : int
        Rows that are replayed at most; the rings have `window` more. FlashInfer's kernels replay
        up to 16.
    dtype, state_dtype : torch.dtype
        Of activations and rows, and of states.
    backend : {"auto", "flashinfer", "triton", "torch"}
        ``"auto"`` on a GPU: the faster of the first two here, measured with all slots and half a
        ring of rows; on a CPU torch.

    Attributes
    ----------
    backend : str
        What was taken.
    timings : dict of str to float
        Microseconds of a layer's step, as measured.
    skipped : dict of str to str
        Why another one was not measured.

    Examples
    --------
    >>> import torch
    >>> from replayinfer import Mamba2Spec
    >>> from replayinfer.integrations.flashinfer import RingPool
    >>> spec = Mamba2Spec(heads=4, dim=8, state=16, groups=1, conv_width=0)
    >>> pool = RingPool(spec, [0], slots=3, window=2, capacity=4, device="cpu")
    >>> pool.bind(0, A=-torch.rand(4), D=torch.ones(4), dt_bias=torch.zeros(4))
    >>> where = pool.alloc(2)
    >>> pool.plan(where)
    >>> x, B = torch.randn(2, 2, 4, 8).bfloat16(), torch.randn(2, 2, 1, 16).bfloat16()
    >>> y = pool.run(0, x=x, dt=torch.randn(2, 2, 4), B=B, C=B)
    >>> pool.commit([1, 2])  # of two tokens, one and both were right
    >>> pool.backend, y.shape, [pool.tokens(slot) for slot in where]
    ('torch', torch.Size([2, 2, 4, 8]), [1, 2])
    """

    def __init__(
        self,
        spec: Mamba2Spec,
        layers: Sequence[int],
        slots: int,
        *,
        window: int = 1,
        capacity: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cuda",
        backend: str = "auto",
    ) -> None:
        if not isinstance(spec, Mamba2Spec) or tuple(spec.dt_limit) != (0.0, math.inf):
            raise UnsupportedError(
                f"spec: got {spec}; allowed Mamba2Spec without dt_limit; use StatePool"
            )
        if min(len(layers), slots, window) < 1 or capacity < window:
            raise InputError(
                f"capacity: got {capacity} for {len(layers)} layers, {slots} slots, windows of "
                f"{window}; allowed at least one of each and the window; change them"
            )
        self.spec, self.layers = spec, list(layers)
        ring, lead = capacity + window, (len(layers), slots)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.memory = RingMemory(
            state=zeros(*lead, *spec.state_shape, dtype=state_dtype),
            x=zeros(*lead, spec.heads, ring, spec.dim, dtype=dtype),
            B=zeros(*lead, spec.groups, ring, spec.state, dtype=dtype),
            dt=zeros(*lead, spec.heads, ring),
            start=zeros(slots, dtype=torch.int32),
            history=zeros(slots, dtype=torch.int32),
            A=zeros(len(layers), spec.heads),
            D=zeros(len(layers), spec.heads),
            dt_bias=zeros(len(layers), spec.heads),
            window=window,
        )
        self._kernels, self.timings, self.skipped = choose(backend, self.memory, spec.dt_softplus)
        self.backend = self._kernels.name
        self._start = np.zeros(slots, np.int32)
        self._history = np.zeros(slots, np.int32)
        self._tokens = np.zeros(slots, np.int64)
        self._free = list(range(slots))[::-1]
        self._planned: NDArray[np.int64] | None = None
        self._slots: dict[int, torch.Tensor] = {}  # by bucket, at an address that stays
        self._bucket = 0
        self._ran: set[int] = set()

    def bind(self, layer: int, *, A: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor) -> None:
        """Set a layer's weights, ``[heads]`` each."""
        index = self._layer(layer)
        for name, value in (("A", A), ("D", D), ("dt_bias", dt_bias)):
            if tuple(value.shape) != (self.spec.heads,):
                raise InputError(
                    f"{name}: got {list(value.shape)}; allowed [heads={self.spec.heads}]; one "
                    "value a head"
                )
            getattr(self.memory, name)[index] = value

    def alloc(self, count: int) -> list[int]:
        """Slots at the zero state."""
        if count > len(self._free):
            raise CapacityError("slots", count, len(self._free), "free sequences")
        slots = [self._free.pop() for _ in range(count)]
        self.memory.state[:, slots] = 0
        for cursor in (self._start, self._history, self._tokens):
            cursor[slots] = 0
        return slots

    def free(self, slots: Sequence[int]) -> None:
        self._require_live(slots, "free")
        if self._planned is not None and set(slots) & set(self._planned.tolist()):
            raise PlanError(f"free: got {list(slots)} in a step; allowed after commit; finish it")
        self._free += [int(slot) for slot in slots]

    def tokens(self, slot: int) -> int:
        """Committed tokens of a slot."""
        self._require_live([slot], "tokens")
        return int(self._tokens[slot])

    def plan(self, slots: Sequence[int], *, bucket: int | None = None) -> None:
        """Say which slots the next step moves; the rest of `bucket` rows are pads.

        A step of a bucket may be captured in a CUDA graph: it reads slots and cursors at addresses
        that stay, and this call writes them. After a replay call `replayed`.
        """
        if self._planned is not None:
            raise PlanError("plan: got a second plan; allowed after commit or abort; finish it")
        self._require_live(slots, "plan")
        size = len(slots) if bucket is None else bucket
        if size < max(len(slots), 1):
            raise InputError(f"bucket: got {size} for {len(slots)} slots; allowed as many or more")
        rows = np.full(size, -1, np.int32)
        rows[: len(slots)] = slots
        device = self.memory.start.device
        if size not in self._slots:
            self._slots[size] = torch.empty(size, dtype=torch.int32, device=device)
        _send(rows, self._slots[size])
        _send(self._start, self.memory.start)
        _send(self._history, self.memory.history)
        self._planned, self._bucket = np.array(slots, np.int64), size
        self._ran.clear()

    @torch.no_grad()
    def run(
        self,
        layer: int,
        *,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        z: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of one layer, ``[bucket, window, heads, dim]``; of pads they mean nothing.

        Once a layer and step: a second call would fold again.
        """
        self._require_planned("run")
        index = self._layer(layer)
        if layer in self._ran:
            raise PlanError(
                f"run: got layer {layer} a second time; allowed once a step, since it may fold; "
                "keep its output"
            )
        lead = (self._bucket, self.memory.window)
        if tuple(x.shape[:2]) != lead:
            raise InputError(
                f"x: got {list(x.shape)}; allowed {list(lead)} tokens, as planned; pad it"
            )
        out = torch.empty_like(x) if out is None else out
        tokens: dict[str, Any] = {"x": x, "dt": dt, "B": B, "C": C, "out": out}
        self._kernels.step(
            self.memory, index, tokens, self._slots[self._bucket],
            z=z, dt_softplus=self.spec.dt_softplus,
        )  # fmt: skip
        self._ran.add(layer)
        return out

    def replayed(self) -> None:
        """Say that a CUDA graph in which `run` of every layer was captured ran for this plan."""
        self._require_planned("replayed")
        self._ran = set(self.layers)

    def commit(self, accepted: ArrayLike | None = None) -> None:
        """Keep the first `accepted` tokens of each window, by default all of it."""
        slots = self._require_planned("commit")
        if missing := sorted(set(self.layers) - self._ran):
            raise PlanError(f"commit: got no run of layers {missing}; allowed after all; run them")
        window = self.memory.window
        counts = np.full(slots.shape, window) if accepted is None else np.asarray(accepted)
        if counts.shape != slots.shape or ((counts < 0) | (counts > window)).any():
            raise InputError(
                f"accepted: got {counts.tolist()}; allowed 0 to {window} for each of {len(slots)} "
                "sequences; clamp them"
            )
        self._folded(slots)
        self._history[slots] += counts.astype(np.int32)
        self._tokens[slots] += counts
        self._planned = None

    def abort(self) -> None:
        """Drop the window; a fold that ran stands, as it changes no state that anyone sees."""
        slots = self._require_planned("abort")
        if self._ran and self._ran != set(self.layers):
            raise PlanError(
                f"abort: got a step of which layers {sorted(self._ran)} ran; allowed before the "
                "first or after the last, since layers that ran may have folded; run the others"
            )
        if self._ran:
            self._folded(slots)
        self._planned = None

    def fork(self, slot: int, rows: int | None = None) -> int:
        """A new slot with the state after the first `rows` of its committed rows, by default all.

        Rows are those since the last fold. The parent is only read.
        """
        self._require_live([slot], "fork")
        if self._planned is not None and slot in self._planned:
            raise PlanError(f"fork: got slot {slot} in a step; allowed after commit; finish it")
        have = int(self._history[slot])
        rows = have if rows is None else rows
        if not 0 <= rows <= have:
            raise InputError(f"rows: got {rows}; allowed 0 to {have}, rows since the last fold")
        (child,) = self.alloc(1)
        self._kernels.materialize(self.memory, slot, child, int(self._start[slot]), rows)
        self._tokens[child] = self._tokens[slot] - have + rows
        return child

    def _folded(self, slots: NDArray[np.int64]) -> None:
        """Move the cursors of the slots in which `run` folded, by FlashInfer's rule."""
        full = slots[self._history[slots] + self.memory.window > self.memory.capacity]
        ring = self.memory.capacity + self.memory.window
        self._start[full] = (self._start[full] + self._history[full]) % ring
        self._history[full] = 0

    def _layer(self, layer: int) -> int:
        if layer not in self.layers:
            raise InputError(f"layer: got {layer}; allowed {self.layers}; pick one")
        return self.layers.index(layer)

    def _require_planned(self, action: str) -> NDArray[np.int64]:
        if self._planned is None:
            raise PlanError(f"{action}: got no plan; allowed after plan; call plan first")
        return self._planned

    def _require_live(self, slots: Sequence[int], action: str) -> None:
        given = [int(slot) for slot in slots]
        size = len(self._history)
        bad = [s for s in given if not 0 <= s < size or s in self._free]
        if bad or len(set(given)) != len(given):
            raise InputError(
                f"{action}: got slots {given}; allowed live ones, each once; alloc gives them"
            )


def _send(values: NDArray[np.int32], target: torch.Tensor) -> None:
    """Copy to the device without a wait."""
    host = torch.from_numpy(values)
    if target.is_cuda:
        host = host.pin_memory()  # a copy, which torch keeps until the device has read it
    target.copy_(host, non_blocking=True)
