"""Compiles and loads the kernels of a plan of no sequences, by launching them on its pads.

Triton compiles a kernel anew for other dtypes, other constants, and for arguments that become 1,
divisible by 16 or aligned to 16 bytes, or cease to be. The launches here have the plan, the pool
and the layers of later steps, and inputs as their caller lays them out, so theirs are the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from ...planner import Plan
from ...pools import StatePool
from ..base import Backend, ShiftedConvolution
from .compact import move

__all__ = ["calls", "warmup"]

Tensors = Mapping[str, torch.Tensor]
Convolved = Sequence[tuple[ShiftedConvolution, Tensors]]


def warmup(
    backend: Backend,
    pool: StatePool,
    plan: Plan,
    inputs: Sequence[Tensors] | None,
    conv: Sequence[Tensors] | None,
    convolved: Convolved = (),
) -> None:
    """Call every operation of `backend` that a step like `plan` calls; see `Backend.warmup`."""
    for _, call in calls(backend, pool, plan, inputs, conv, convolved):
        call()


def calls(
    backend: Backend,
    pool: StatePool,
    plan: Plan,
    inputs: Sequence[Tensors] | None,
    conv: Sequence[Tensors] | None,
    convolved: Convolved = (),
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The operations of a step like `plan`, by name, in every layer.

    All layers, because one layer's part of a tensor may be aligned and the next one's not.
    """
    steps = list(_steps(pool, plan, inputs))
    convolutions = list(_convolutions(pool, plan, conv))
    both = list(_convolved(pool, plan, convolved))
    readout = "direct" if plan.direct else "readout"
    no_rows = [-1] * pool.sizes.pages_per_sequence

    yield "fold", partial(backend.fold, pool, plan)
    for layer in range(len(pool.layers)):
        for x, out in convolutions:
            yield "conv", partial(backend.conv, pool, plan, layer, x, out)
        for tokens, out in steps:
            yield readout, partial(getattr(backend, readout), pool, plan, layer, tokens, out)
        for windows, gates, out in both:
            call = partial(backend.convolved_readout, pool, plan, layer, windows, gates, out)
            yield "readout", call
        yield "materialize", partial(backend.materialize, pool, layer, 0, no_rows, 0)
    if plan.window > 1:
        no_nodes = torch.full((plan.bucket, plan.window), -1, dtype=torch.int32, device=pool.device)
        yield "compact", partial(move, pool, plan, no_nodes)


def _steps(
    pool: StatePool, plan: Plan, examples: Sequence[Tensors] | None
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Inputs and output of readouts."""
    shape = [getattr(pool.spec, d) for d in pool.spec.output_dims]
    if examples is not None:
        for example in examples:
            tokens = {name: _like(value, plan) for name, value in example.items() if name != "out"}
            out = _output(pool, plan, shape, example)
            yield tokens, out
            if plan.bucket == 1:
                yield {name: _viewed(value) for name, value in tokens.items()}, out
        return
    fields = pool.spec.input_fields
    outputs = [_zeros(plan, shape, dtype, pool.device) for dtype in _dtypes(pool)]
    gates = [f.name for f in fields if f.kind == "gate"]
    for choice in itertools.product(_dtypes(pool), repeat=len(gates)):
        dtypes = dict(zip(gates, choice, strict=True))
        every = {
            f.name: _zeros(
                plan, [getattr(pool.spec, d) for d in f.dims],
                dtypes.get(f.name, pool.dtype), pool.device,
            )
            for f in fields
        }  # fmt: skip
        required = {f.name: every[f.name] for f in fields if not f.optional}
        for tokens in (required, every) if len(every) > len(required) else (required,):
            for out in outputs:
                yield tokens, out


def _convolutions(
    pool: StatePool, plan: Plan, examples: Sequence[Tensors] | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Input and output of convolutions."""
    if not pool.spec.conv_width:
        return
    shape = [pool.spec.conv_channels]
    if examples is not None:
        for example in examples:
            rows, out = _like(example["x"], plan), _output(pool, plan, shape, example)
            yield rows, out
            if plan.bucket == 1:
                yield _viewed(rows), out
        return
    x = _zeros(plan, shape, pool.dtype, pool.device)
    for dtype in _dtypes(pool):
        yield x, _zeros(plan, shape, dtype, pool.device)


def _convolved(
    pool: StatePool, plan: Plan, examples: Convolved
) -> Iterator[tuple[ShiftedConvolution, dict[str, torch.Tensor], torch.Tensor]]:
    """Convolution, gates and output of convolved readouts; no row's windows are looked at."""
    shape = [getattr(pool.spec, d) for d in pool.spec.output_dims]
    for conv, example in examples:
        tokens = {name: value for name, value in example.items() if name != "out"}
        if conv.by_head:
            gates = {name: _of_one_token(value, plan) for name, value in tokens.items()}
        else:
            gates = {name: _like(value, plan) for name, value in tokens.items()}
        x, slots = _of_one_token(conv.x, plan), conv.slots.new_zeros(plan.bucket)
        z = z_out = None
        if conv.z is not None and conv.z_out is not None:
            z = _of_one_token(conv.z, plan)
            z_out = conv.z_out.new_zeros((plan.bucket, *conv.z_out.shape[1:]))
        conv = dataclasses.replace(conv, x=x, slots=slots, z=z, z_out=z_out)
        out = _output(pool, plan, shape, example)
        yield conv, gates, out
        if plan.bucket == 1:
            gates = {name: _viewed(value) for name, value in gates.items()}
            yield dataclasses.replace(conv, x=_viewed(x)), gates, out


def _dtypes(pool: StatePool) -> list[torch.dtype]:
    """Of gates and outputs where no example says which: the pool's and float32."""
    return list(dict.fromkeys((pool.dtype, torch.float32)))


def _output(pool: StatePool, plan: Plan, shape: Sequence[int], example: Tensors) -> torch.Tensor:
    if "out" in example:
        return _like(example["out"], plan)
    return _zeros(plan, shape, pool.dtype, pool.device)


def _zeros(
    plan: Plan, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.zeros((plan.bucket, plan.window, *shape), dtype=dtype, device=device)


def _like(example: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A tensor for `plan` with the strides and the alignment of `example`, in its own memory."""
    sizes, strides = (plan.bucket, plan.window, *example.shape[2:]), example.stride()
    offset = example.data_ptr() % 16 // example.element_size()
    extent = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    memory = torch.zeros(offset + extent + 1, dtype=example.dtype, device=example.device)
    return memory.as_strided(sizes, strides, offset)


def _of_one_token(example: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The same for a tensor without an axis for the window."""
    return _like(example[:, None], plan)[:, 0]


def _viewed(one: torch.Tensor) -> torch.Tensor:
    """As any ``view`` leaves a batch of one: its stride is free, so torch gives a dense one."""
    return one.view(one.shape)
