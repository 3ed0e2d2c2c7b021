"""Who computes on a `RingPool`: FlashInfer's kernels or ours, on the same memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replayinfer import UnsupportedError, mamba2_walk

from .mamba import checkpointing_ssu

__all__ = ["Ours", "RingKernels", "RingMemory", "Theirs", "choose"]

_CALLS = 20
_SIXTEEN = 16


@dataclass(frozen=True)
class RingMemory:
    """A pool's tensors, all layers of each in one; see `RingPool`."""

    state: torch.Tensor  # [layers, slots, heads, dim, state]
    x: torch.Tensor  # [layers, slots, heads, ring, dim]
    B: torch.Tensor  # [layers, slots, groups, ring, state]
    dt: torch.Tensor  # float32 [layers, slots, heads, ring]
    start: torch.Tensor  # int32 [slots]
    history: torch.Tensor  # int32 [slots]
    A: torch.Tensor  # float32 [layers, heads], and so are D and the bias
    D: torch.Tensor
    dt_bias: torch.Tensor
    window: int

    @property
    def capacity(self) -> int:
        return int(self.x.shape[3]) - self.window

    def arguments(self, layer: int, tokens: dict[str, Any], slots: torch.Tensor) -> dict[str, Any]:
        """What `checkpointing_ssu` takes, FlashInfer's or ours: one value a head, expanded."""
        heads, dim, size = self.state.shape[2:]
        dt = tokens["dt"]
        return {
            "state": self.state[layer],
            "x_cache": self.x[layer],
            "B_cache": self.B[layer],
            "dt_cache": self.dt[layer],
            "ring_start": self.start,
            "prev_num_accepted_tokens": self.history,
            **tokens,
            "dt": dt[..., None].expand(*dt.shape, dim),
            "A": self.A[layer][:, None, None].expand(heads, dim, size),
            "D": self.D[layer][:, None].expand(heads, dim),
            "dt_bias": self.dt_bias[layer][:, None].expand(heads, dim),
            "state_batch_indices": slots,
            "pad_slot_id": -1,
        }


class RingKernels(Protocol):
    """One step of a layer, and the state after some of a slot's rows in another slot."""

    name: str

    def step(
        self,
        memory: RingMemory,
        layer: int,
        tokens: dict[str, Any],
        slots: torch.Tensor,
        **options: Any,
    ) -> None: ...

    def materialize(
        self, memory: RingMemory, source: int, target: int, start: int, rows: int
    ) -> None:
        """In all layers; the source slot is only read."""


class Ours:
    """Triton kernels, or torch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(
        self,
        memory: RingMemory,
        layer: int,
        tokens: dict[str, Any],
        slots: torch.Tensor,
        **options: Any,
    ) -> None:
        kernels: Any = self.name
        checkpointing_ssu(**memory.arguments(layer, tokens, slots), **options, kernels=kernels)

    def materialize(
        self, memory: RingMemory, source: int, target: int, start: int, rows: int
    ) -> None:
        if rows == 0:
            memory.state[:, target] = memory.state[:, source]
            return
        device, ring = memory.x.device, int(memory.x.shape[3])
        at = (torch.arange(rows, device=device) + start) % ring
        slots = torch.tensor([[source], [target]], device=device)
        for layer in range(memory.x.shape[0]):
            x, B = (
                m[layer, source][:, at].transpose(0, 1)[None].contiguous()
                for m in (memory.x, memory.B)
            )
            dt = memory.dt[layer, source][:, at].T[None]
            mamba2_walk(
                memory.state[layer], x, dt, B, B, A=memory.A[layer], source=slots[0],
                target=slots[1], backend=self.name,
            )  # fmt: skip


class Theirs:
    """FlashInfer's `checkpointing_ssu` and `replayssm_materialize`."""

    name = "flashinfer"

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("flashinfer.mamba")
        self._scratch: dict[int, tuple[torch.Tensor, ...]] = {}

    def step(
        self,
        memory: RingMemory,
        layer: int,
        tokens: dict[str, Any],
        slots: torch.Tensor,
        **options: Any,
    ) -> None:
        batch = int(slots.shape[0])
        if batch not in self._scratch:  # one address for each bucket, for CUDA graphs
            self._scratch[batch] = self.module.allocate_checkpointing_ssu_scratch(
                batch, memory.x.shape[2], memory.window, memory.capacity, memory.x.dtype,
                memory.x.device,
            )  # fmt: skip
        names = ("cb_scaled", "cumAdt_vec", "cb_old")
        scratch = dict(zip(names, self._scratch[batch], strict=True))
        self.module.checkpointing_ssu(
            **memory.arguments(layer, tokens, slots), **options, **scratch
        )

    def materialize(
        self, memory: RingMemory, source: int, target: int, start: int, rows: int
    ) -> None:
        layers, _, heads, dim, size = memory.state.shape

        def table(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=memory.state.device)

        def tables(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                table([tensor[i].data_ptr() for i in range(layers)]),
                table([tensor.stride(1)] * layers),
            )

        none = table([0] * layers)
        ints = torch.int32
        self.module.replayssm_materialize(
            *tables(memory.state), *tables(memory.x), *tables(memory.B), *tables(memory.dt),
            tables(memory.A)[0], none, none,
            table([source] * layers, ints)[:, None].contiguous(),
            table([target] * layers, ints)[:, None].contiguous(),
            table([start], ints), table([rows], ints), table([0], ints),
            state_dtype=memory.state.dtype, input_dtype=memory.x.dtype,
            matrixA_dtype=memory.A.dtype, dim=dim, dstate=size, num_heads=heads,
            heads_per_group=heads // memory.B.shape[2], max_window=memory.capacity,
            ring_buffer_len=memory.x.shape[3],
        )  # fmt: skip


def refuses(memory: RingMemory) -> str | None:
    """Why FlashInfer's kernels do not run on this memory, before they are even imported."""
    if memory.x.device.type != "cuda":
        return f"device {memory.x.device}; its kernels run on cuda"
    if memory.x.dtype is not torch.bfloat16:
        return f"dtype={memory.x.dtype}; its kernels take bfloat16 rows"
    if memory.capacity > _SIXTEEN:
        return f"capacity={memory.capacity}; its kernels replay up to {_SIXTEEN} rows"
    return None


def choose(
    wanted: str, memory: RingMemory, softplus: bool
) -> tuple[RingKernels, dict[str, float], dict[str, str]]:
    """The kernels of that name, or for ``"auto"`` the fastest here.

    Returns
    -------
    kernels : RingKernels
    timings : dict
        Microseconds of a layer's step, where they were measured.
    skipped : dict
        Why the others were not.

    Notes
    -----
    Runs steps on the memory, which must be nobody's yet, and leaves it zero.
    """
    names = ("auto", "flashinfer", "triton", "torch")
    if wanted not in names:
        raise UnsupportedError(f"backend: got {wanted!r}; allowed {', '.join(names)}; pick one")
    if wanted == "auto" and memory.x.device.type != "cuda":
        return Ours("torch"), {}, {}
    candidates = ("flashinfer", "triton") if wanted == "auto" else (wanted,)
    timings: dict[str, float] = {}
    skipped: dict[str, str] = {}
    made: dict[str, RingKernels] = {}
    for name in candidates:
        reason = refuses(memory) if name == "flashinfer" else None
        if reason is None:
            try:
                made[name] = Theirs() if name == "flashinfer" else Ours(name)
                timings[name] = _time(made[name], memory, softplus)
            except Exception as error:
                if name != "flashinfer":
                    raise
                # Not installed, or it has no kernel for these sizes.
                lines = str(error).strip().splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0][:200]}"
                made.pop(name, None)
        if reason is not None:
            skipped[name] = reason
    for tensor in (memory.state, memory.x, memory.B, memory.dt, memory.start, memory.history):
        tensor.zero_()
    if not made:
        raise UnsupportedError(
            f"backend: got {wanted!r}; allowed one that runs on these rings; refused: "
            + "; ".join(f"{name} ({reason})" for name, reason in skipped.items())
        )
    best = min(made, key=lambda name: timings[name])
    return made[best], timings, skipped


def _time(kernels: RingKernels, memory: RingMemory, softplus: bool) -> float:
    """Microseconds of one step of every slot with half a ring of rows; no state is folded."""
    device, window = memory.x.device, memory.window
    slots = torch.arange(memory.x.shape[1], dtype=torch.int32, device=device)
    heads, dim, size = memory.state.shape[2:]
    groups = memory.B.shape[2]
    memory.history.fill_(max(memory.capacity - window, 0) // 2)
    lead = (len(slots), window)
    zeros: Callable[..., torch.Tensor] = torch.zeros
    options = {"dtype": memory.x.dtype, "device": device}
    tokens: dict[str, Any] = {
        "x": zeros(*lead, heads, dim, **options),
        "dt": zeros(*lead, heads, device=device),
        "B": zeros(*lead, groups, size, **options),
        "C": zeros(*lead, groups, size, **options),
        "out": zeros(*lead, heads, dim, **options),
    }

    def step() -> None:
        kernels.step(memory, 0, tokens, slots, dt_softplus=softplus)

    step()
    if device.type != "cuda":
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    start.record()
    for _ in range(_CALLS):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _CALLS * 1e3
