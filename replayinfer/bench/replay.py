"""Our side of a bench: a pool in its steady state, and its decode steps as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ..backends import select
from ..formats import CheckpointFormat
from ..planner import HostPlanner, Plan
from ..pools import StatePool
from ..spec import LayerSpec
from ..testing import initial_states
from .peers import Scope
from .work import Tokens, make_tokens, make_weights

__all__ = ["ReplaySteps", "bytes_per_step", "make_steps"]


@dataclass(frozen=True)
class ReplaySteps:
    """`launch` enqueues `steps` decode steps: plan upload, fold, and every layer's step.

    Attributes
    ----------
    direct : bool
        Whether the backend moves the states in place at this batch, which it says is faster there.
    memory_per_sequence : int
        Bytes that the pool holds for a sequence in one layer.
    """

    launch: Callable[[], None]
    steps: int
    backend: str
    direct: bool
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
    scope: Scope = "ssm",
    gated: bool = False,
    conv_bias: bool = True,
    direct: Literal["auto", "never", "always"] = "auto",
) -> ReplaySteps:
    """A pool of `batch` sequences whose histories are staggered, and one cycle of its steps.

    The cycle is `capacity` steps, in which every sequence folds once, just as an engine in its
    steady state would; of direct steps it is one. Each step has its own plan, which the graph
    uploads from pinned memory. `gated` and `conv_bias` are those of `Work`; `direct` is that of
    `ReplayDecodeWrapper`.
    """
    pool = StatePool(
        spec, range(layers), batch, capacity=capacity, format=format, dtype=dtype, device=device
    )
    generator = torch.Generator(device=device).manual_seed(0)
    chosen = select(backend, pool)
    moves = chosen.prefers_direct(pool, batch) if direct == "auto" else direct == "always"
    plans = [_uploaded(plan) for plan in _cycle(pool, batch, moves)]
    _fill(pool, generator, conv_bias)  # after the sequences began, which zeroes what they hold
    tokens = [make_tokens(spec, batch, dtype, generator, gated) for _ in range(layers)]
    dims = [getattr(spec, name) for name in spec.output_dims]
    outputs = [torch.empty(batch, 1, *dims, dtype=dtype, device=device) for _ in range(layers)]
    inputs = [{name: value[:, None] for name, value in t.inputs.items()} for t in tokens]
    run = chosen.direct if moves else chosen.readout

    def convolve(plan: Plan, layer: int, token: Tokens) -> None:
        chosen.conv(pool, plan, layer, token.rows[:, None], token.convolved[:, None])

    def launch() -> None:
        for plan, upload in plans:
            upload()
            chosen.fold(pool, plan)
            for layer in range(layers):
                if scope == "mixer":
                    convolve(plan, layer, tokens[layer])
                run(pool, plan, layer, inputs[layer], outputs[layer])

    memory = pool.capacity_report().sequence_bytes // layers
    return ReplaySteps(launch, len(plans), chosen.name, moves, memory)


def bytes_per_step(
    spec: LayerSpec,
    fmt: CheckpointFormat,
    dtype: torch.dtype,
    *,
    batch: int,
    capacity: int,
    direct: bool = False,
    scope: Scope = "ssm",
) -> int:
    """Bytes that one layer must move in a step of the steady state, on average.

    Every sequence's readout plane and half a buffer of rows, one row written, and a fold (read and
    write of the whole checkpoint and its rows) every `capacity` steps; a direct step reads and
    writes the whole checkpoint. A mixer also reads the rows of its convolution window and writes
    one. Inputs and outputs of the step, and parameters, are left out.
    """
    state, row = math.prod(spec.state_shape), spec.row_bytes(dtype, fmt)
    if direct:
        moved: float = 2 * state * fmt.bytes_stored
    else:
        fold = 2 * state * fmt.bytes_stored + capacity * row
        moved = state * fmt.bytes_read + fold / capacity + row * ((capacity - 1) / 2 + 1)
    if scope == "mixer":
        moved += spec.conv_width * spec.conv_channels * dtype.itemsize
    return round(batch * moved)


def _cycle(pool: StatePool, batch: int, direct: bool) -> list[Plan]:
    """The plans of one cycle; sequence `i` of `batch` is ``i / batch`` of the cycle ahead."""
    handles, cur, capacity = pool.alloc(batch), pool.cursors, pool.capacity
    slots = cur.resolve(handles)
    if not direct:
        pages = pool.sizes.pages_per_sequence
        cur.table[slots] = pool.input_ids.take(batch * pages).reshape(batch, pages)
    stagger = (np.arange(batch) * capacity) // batch
    plans = []
    for step in range(1 if direct else capacity):
        if not direct:
            cur.history[slots] = (stagger + step) % capacity + 1
        planner = HostPlanner(pool)  # one each: plans of one planner share their arrays
        plan = planner.plan(handles, direct=direct)
        planner.abort(plan)
        plans.append(plan)
    return plans


def _uploaded(plan: Plan) -> tuple[Plan, Callable[[], None]]:
    """A plan, and what its upload costs in a step: a copy of its size from pinned memory."""
    size = sum(array.numel() for array in vars(plan.arrays).values())
    device = plan.pool.device
    on_device = torch.empty(size, dtype=torch.int32, device=device)
    on_host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")

    def upload() -> None:
        on_device.copy_(on_host, non_blocking=True)

    return plan, upload


def _fill(pool: StatePool, generator: torch.Generator, conv_bias: bool) -> None:
    """Random states, rows and parameters with decays of trained layers; never zeros."""
    spec = pool.spec
    every = torch.arange(pool.sizes.checkpoint_pages, device=pool.device)
    for layer in pool.layers:
        pool.bind(layer, **make_weights(spec, pool.dtype, generator, conv_bias))
        for part in every.split(max(1, (1 << 28) // math.prod(spec.state_shape))):
            states = initial_states(spec, part.numel(), generator)
            pool.checkpoints.store(pool.index(layer), part, states)
    for name, rows in pool.inputs.fields.items():
        if name in ("dt", "beta", "k_scale"):
            rows.uniform_(0.001, 0.1, generator=generator)
        elif name == "g":
            rows.uniform_(-0.1, -0.001, generator=generator)
        else:
            rows.normal_(generator=generator)
    pool.conv.rows.normal_(generator=generator)
