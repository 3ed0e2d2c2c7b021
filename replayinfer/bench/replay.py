"""Our side of a bench: a pool in its steady state, and its decode steps as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..backends import select
from ..formats import CheckpointFormat
from ..planner import HostPlanner, Plan
from ..pools import StatePool
from ..spec import LayerSpec

__all__ = ["ReplaySteps", "bytes_per_step", "make_steps"]


@dataclass(frozen=True)
class ReplaySteps:
    """`launch` enqueues `steps` decode steps: plan upload, fold, and every layer's readout."""

    launch: Callable[[], None]
    steps: int
    backend: str
    memory_per_sequence: int


def make_steps(
    spec: LayerSpec,
    *,
    batch: int,
    layers: int,
    capacity: int,
    format: str,
    dtype: torch.dtype,
    backend: str,
    device: torch.device,
) -> ReplaySteps:
    """A pool of `batch` sequences whose histories are staggered, and one cycle of its steps.

    The cycle is `capacity` steps, in which every sequence folds once, just as an engine in its
    steady state would. Each step has its own plan, which the graph uploads from pinned memory.
    """
    pool = StatePool(
        spec, range(layers), batch, capacity=capacity, format=format, dtype=dtype, device=device
    )
    _fill(pool)
    chosen = select(backend, pool)
    handles = pool.alloc(batch)
    cur = pool.cursors
    slots = cur.resolve(handles)
    pages = pool.sizes.pages_per_sequence
    cur.table[slots] = pool.input_ids.take(batch * pages).reshape(batch, pages)
    stagger = (np.arange(batch) * capacity) // batch
    plans: list[tuple[Plan, torch.Tensor, torch.Tensor]] = []
    for step in range(capacity):
        cur.history[slots] = (stagger + step) % capacity + 1
        planner = HostPlanner(pool)  # one each: plans of one planner share their arrays
        plan = planner.plan(handles)
        planner.abort(plan)
        size = sum(a.numel() for a in vars(plan.arrays).values())
        on_device = torch.empty(size, dtype=torch.int32, device=device)
        plans.append((plan, on_device, torch.zeros_like(on_device, device="cpu").pin_memory()))
    inputs = [_inputs(pool, batch) for _ in range(layers)]
    outputs = [
        torch.empty(
            batch, 1, *(getattr(spec, n) for n in spec.output_dims), dtype=dtype, device=device
        )
        for _ in range(layers)
    ]

    def launch() -> None:
        for plan, on_device, pinned in plans:
            on_device.copy_(pinned, non_blocking=True)  # what uploading a plan costs
            chosen.fold(pool, plan)
            for layer in range(layers):
                chosen.readout(pool, plan, layer, inputs[layer], outputs[layer])

    return ReplaySteps(
        launch, capacity, chosen.name, pool.capacity_report().sequence_bytes // layers
    )


def bytes_per_step(
    spec: LayerSpec, fmt: CheckpointFormat, row: int, batch: int, capacity: int
) -> int:
    """Bytes that one layer must move in a step of the steady state, on average.

    Every sequence's readout plane and half a buffer of rows, one row written, and a fold (read and
    write of the whole checkpoint and its rows) every `capacity` steps.
    """
    state = math.prod(spec.state_shape)
    read = state * fmt.bytes_read
    fold = 2 * state * fmt.bytes_stored + capacity * row
    rows = row * ((capacity - 1) / 2 + 1)
    return round(batch * (read + fold / capacity + rows))


def _fill(pool: StatePool) -> None:
    """Random states, rows and parameters with decays of trained layers; never zeros."""
    generator = torch.Generator(device=pool.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=pool.device, generator=generator)

    every = torch.arange(pool.sizes.checkpoint_pages, device=pool.device)
    for layer in pool.layers:
        weights = {f.name: normal(*f.shape) for f in pool.spec.weight_fields}
        if "A" in weights:
            weights["A"] = -torch.exp(weights["A"])
        if "dt_bias" in weights:
            weights["dt_bias"] = weights["dt_bias"] - 4
        pool.bind(layer, **weights)
        index = pool.index(layer)
        for part in every.split(max(1, (1 << 28) // math.prod(pool.spec.state_shape))):
            pool.checkpoints.store(index, part, normal(part.numel(), *pool.spec.state_shape))
    for name, field in pool.inputs.fields.items():
        if name in ("dt", "beta", "k_scale"):
            field.uniform_(0.001, 0.1, generator=generator)
        elif name == "g":
            field.uniform_(-0.1, -0.001, generator=generator)
        else:
            field.normal_(generator=generator)


def _inputs(pool: StatePool, batch: int) -> dict[str, torch.Tensor]:
    fields = [f for f in pool.spec.input_fields if not f.optional]
    return {
        f.name: torch.randn(
            batch, 1, *(getattr(pool.spec, d) for d in f.dims), device=pool.device, dtype=pool.dtype
        )
        for f in fields
    }
