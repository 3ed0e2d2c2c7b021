"""Our side of a bench: a pool in its steady state, and its decode steps as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..backends import select
from ..cost import SteadyState, step_bytes
from ..errors import InputError
from ..formats import CheckpointFormat
from ..planner import HostPlanner, Plan, must_fold
from ..pools import StatePool
from ..spec import LayerSpec
from ..testing import initial_states
from .peers import Scope
from .work import Tokens, make_tokens, make_weights

__all__ = ["ReplaySteps", "bytes_per_step", "make_steps"]

_ROUNDS = 32  # of a cycle of windows, whose histories are random
_CYCLES = 64  # that are drawn, for the one nearest the mean


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
    window: int = 1,
    commit_rate: float = 1.0,
) -> ReplaySteps:
    """A pool of `batch` sequences in their steady state, and one cycle of its steps.

    In plain decode histories are staggered, and the cycle is `capacity` steps, in which every
    sequence folds once; of direct steps it is one. With a `window` the cycle is 32 rounds, each
    of whose drafts is right with probability `commit_rate` where all before it were. Each step has
    its own plan, which the graph uploads from pinned memory. `gated` and `conv_bias` are those of
    `Work`; `direct` is that of `ReplayDecodeWrapper`, and windows never go direct.
    """
    if window > 1 and direct == "always":
        raise InputError(
            f"direct: got 'always' for windows of {window}; allowed auto or never, since a state "
            "that has moved takes no draft back; leave it out"
        )
    pool = StatePool(
        spec, range(layers), batch, capacity=capacity, max_window=window, format=format,
        dtype=dtype, device=device,
    )  # fmt: skip
    generator = torch.Generator(device=device).manual_seed(0)
    chosen = select(backend, pool)
    moves = chosen.prefers_direct(pool, batch) if direct == "auto" else direct == "always"
    moves = moves and window == 1
    plans = [_uploaded(plan) for plan in _cycle(pool, batch, moves, commit_rate)]
    _fill(pool, generator, conv_bias)  # after the sequences began, which zeroes what they hold
    tokens = [make_tokens(spec, batch * window, dtype, generator, gated) for _ in range(layers)]
    dims = [getattr(spec, name) for name in spec.output_dims]
    outputs = [torch.empty(batch, window, *dims, dtype=dtype, device=device) for _ in range(layers)]
    inputs = [t.windows(window) for t in tokens]
    run = chosen.direct if moves else chosen.readout

    def convolve(plan: Plan, layer: int, token: Tokens) -> None:
        rows, out = (x.unflatten(0, (-1, window)) for x in (token.rows, token.convolved))
        chosen.conv(pool, plan, layer, rows, out)

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
    window: int = 1,
    commit_rate: float = 1.0,
) -> int:
    """Bytes that one layer must move in a step of the steady state, on average.

    Those of `step_bytes` for every sequence; a direct step reads and writes the whole checkpoint. A
    mixer also reads the rows of its convolution window and writes one per token. Inputs and outputs
    of the step, and parameters, are left out.
    """
    if direct:
        moved: float = 2 * math.prod(spec.state_shape) * fmt.bytes_stored
    else:
        moved = step_bytes(
            spec, fmt, dtype, capacity=capacity, window=window, commit_rate=commit_rate
        )
    if scope == "mixer":
        rows = spec.conv_width - 1 + window
        moved += rows * spec.conv_channels * dtype.itemsize
    return round(batch * moved)


def _cycle(pool: StatePool, batch: int, direct: bool, commit_rate: float) -> list[Plan]:
    """The plans of one cycle."""
    handles, cur, capacity = pool.alloc(batch), pool.cursors, pool.capacity
    slots = cur.resolve(handles)
    if not direct:
        pages = pool.sizes.pages_per_sequence
        cur.table[slots] = pool.input_ids.take(batch * pages).reshape(batch, pages)
    if pool.max_window > 1:
        histories = _random_histories(batch, capacity, pool.max_window, commit_rate)
    elif direct:
        histories = np.zeros((1, batch), dtype=np.int64)
    else:  # sequence `i` is ``i / batch`` of the cycle ahead
        stagger = (np.arange(batch) * capacity) // batch
        histories = (stagger + np.arange(capacity)[:, None]) % capacity + 1
    plans = []
    for history in histories:
        cur.history[slots] = history
        planner = HostPlanner(pool)  # one each: plans of one planner share their arrays
        plan = planner.plan(handles, pool.max_window, direct=direct)
        planner.abort(plan)
        plans.append(plan)
    return plans


def _random_histories(
    batch: int, capacity: int, window: int, commit_rate: float
) -> NDArray[np.int64]:
    """Histories before the folds of some rounds in a steady state, ``[rounds, batch]``.

    Of many cycles that chance allows, the one whose folds and rows are nearest their means: of a
    few sequences, some cycles fold twice as often as others.
    """
    rng = np.random.default_rng(0)
    steady = SteadyState.of(capacity, window, commit_rate)
    shape = (_CYCLES, batch)
    start = rng.integers(0, capacity - window + 1, shape)
    seen, fold_counts, rows = [], np.zeros(_CYCLES), np.zeros(_CYCLES)
    lead_in = 4 * capacity  # rounds after which nothing is left of where they began
    for turn in range(lead_in + _ROUNDS):
        right = rng.random((*shape, window - 1)) < commit_rate
        history = start + 1 + np.cumprod(right, axis=-1).sum(-1)
        folds = must_fold(history, np.full_like(history, window), capacity)
        start = np.where(folds, 0, history)
        if turn >= lead_in:
            seen.append(history)
            fold_counts += folds.sum(1)
            rows += start.sum(1)
    total = _ROUNDS * batch
    off = np.abs(fold_counts / total / steady.folds - 1)
    off += np.abs(rows / total - steady.rows) / max(steady.rows, 1)
    return np.stack(seen)[:, int(off.argmin())]


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
