"""What operations are given, checked against a pool's spec before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .backends import ShiftedConvolution
from .checks import check_tensor
from .errors import InputError
from .pools import StatePool
from .spec import LayerSpec
from .spec.base import GATE_DTYPES

__all__ = [
    "check_convolution",
    "check_convolved",
    "check_convolved_example",
    "check_example",
    "check_inputs",
    "check_rows",
    "layer_output",
]


def check_inputs(
    pool: StatePool,
    lead: Mapping[str, int],
    inputs: Mapping[str, torch.Tensor | None],
    advice: str,
    only: Sequence[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The inputs of a layer, each checked against the spec; omitted optional ones left out.

    `lead` names the axes before the spec's own, e.g. ``{"bucket": 8, "window": 1}``; `only` the
    inputs to take, all if omitted.
    """
    spec = pool.spec
    fields = [f for f in spec.input_fields if only is None or f.name in only]
    _require_known(spec, inputs, [f.name for f in fields])
    ready = {}
    for field in fields:
        value = inputs.get(field.name)
        if value is None and field.optional:
            continue
        ready[field.name] = check_tensor(
            field.name,
            value,
            shape=(*lead.values(), *(getattr(spec, d) for d in field.dims)),
            dims=(*lead, *field.dims),
            dtypes=(pool.dtype,) if field.kind == "activation" else GATE_DTYPES,
            device=pool.device,
            advice=f"{advice}; for a shard use spec.shard(rank, size)",
        )
    return ready


def _require_known(spec: LayerSpec, inputs: Mapping[str, Any], names: Sequence[str]) -> None:
    if unknown := [n for n in inputs if n not in names]:
        raise InputError(
            f"inputs: got {', '.join(unknown)}; allowed {', '.join(names)} for {spec.family}; "
            "rename or drop it"
        )


def check_convolution(
    pool: StatePool, lead: Mapping[str, int], x: torch.Tensor | None
) -> torch.Tensor:
    """Pre-convolution rows, and a spec that has a convolution."""
    if not pool.spec.conv_width:
        raise InputError(
            "conv: got a spec with conv_width=0; allowed conv_width >= 2; make the spec with the "
            "layer's kernel size"
        )
    shape, dims = (*lead.values(), pool.spec.conv_channels), (*lead, "channels")
    return check_tensor("x", x, shape=shape, dims=dims, dtypes=(pool.dtype,), device=pool.device)


def check_convolved(
    pool: StatePool,
    bucket: int,
    conv: ShiftedConvolution,
    gates: Mapping[str, torch.Tensor | None],
    advice: str,
) -> dict[str, torch.Tensor]:
    """The gates of a convolved readout, its convolution checked as well.

    They are ``[bucket, 1, heads]``, or by key head where the convolution's inputs are.
    """
    spec: Any = pool.spec
    channels, values = spec.conv_channels, spec.heads // spec.key_heads * spec.dim
    check_tensor(
        "weight", conv.weight, shape=(channels, None), dims=("channels", "width"),
        dtypes=GATE_DTYPES, device=pool.device,
    )  # fmt: skip
    width = conv.weight.shape[1]
    if width < 2:
        raise InputError(
            f"weight: got a width of {width}; allowed width >= 2, the taps of a window and of the "
            "token; scale the inputs of one tap yourself, and call readout"
        )
    line: tuple[tuple[int | None, ...], tuple[str, ...]] = (
        (bucket, channels), ("bucket", "channels")
    )  # fmt: skip
    if conv.by_head:
        own = 2 * spec.state + values
        line = (bucket, spec.key_heads, own), ("bucket", "key_heads", "2 * state + ratio * dim")
    passed = (bucket, spec.key_heads, values), ("bucket", "key_heads", "ratio * dim")
    whole = (bucket, spec.heads, spec.dim), ("bucket", "heads", "dim")
    stored = (None, channels, width - 1), ("slots", "channels", "width - 1")
    checks: tuple[tuple[str, Any, Any, Any, bool], ...] = (
        ("x", conv.x, line, (pool.dtype,), False),
        ("slots", conv.slots, ((bucket,), ("bucket",)), (torch.int32, torch.int64), False),
        ("bias", conv.bias, ((channels,), ("channels",)), GATE_DTYPES, False),
        ("states", conv.states, stored, (pool.dtype,), True),
        ("z", conv.z, passed, (pool.dtype,), False),
        ("z_out", conv.z_out, whole, (pool.dtype,), True),
    )
    optional = ("bias",) if conv.z is not None or conv.z_out is not None else ("bias", "z", "z_out")
    for name, value, (shape, dims), dtypes, written in checks:
        if name not in optional or value is not None:
            check_tensor(
                name, value, shape=shape, dims=dims, dtypes=dtypes, device=pool.device,
                written=written,
            )  # fmt: skip
    if conv.weight.stride(0) != width or conv.states.stride(1) != width - 1:
        raise InputError(
            f"conv: got weights of strides {list(conv.weight.stride())} and states of "
            f"{list(conv.states.stride())}; allowed channels that are contiguous; copy the weights "
            "once, and keep the states so"
        )
    if conv.z_out is not None and not conv.z_out.is_contiguous():
        raise InputError(
            f"z_out: got strides {list(conv.z_out.stride())}; allowed a contiguous tensor; pass one"
        )
    if conv.activation not in ("silu", None):
        raise InputError(
            f"activation: got {conv.activation!r}; allowed 'silu' and None; apply others yourself"
        )
    names = [f.name for f in spec.input_fields if f.kind == "gate"]
    if not conv.by_head:
        return check_inputs(pool, {"bucket": bucket, "window": 1}, gates, advice, names)
    _require_known(spec, gates, names)
    shape = (bucket, spec.key_heads, spec.heads // spec.key_heads)
    return {
        name: check_tensor(
            name, gates.get(name), shape=shape, dims=("bucket", "key_heads", "ratio"),
            dtypes=GATE_DTYPES, device=pool.device, advice="x lies by key head: so must the gates",
        )
        for name in names
    }  # fmt: skip


def layer_output(
    pool: StatePool, lead: Mapping[str, int], out: torch.Tensor | None, dims: Sequence[str]
) -> torch.Tensor:
    """The caller's `out`, checked, or a new tensor of the pool's dtype; `dims` name spec sizes."""
    sizes = (pool.spec.conv_channels if d == "channels" else getattr(pool.spec, d) for d in dims)
    shape = (*lead.values(), *sizes)
    if out is None:
        return torch.empty(shape, dtype=pool.dtype, device=pool.device)
    dtypes = dict.fromkeys((pool.dtype, torch.float32))
    return check_tensor(
        "out", out, shape=shape, dims=(*lead, *dims), dtypes=tuple(dtypes), device=pool.device,
        written=True,
    )  # fmt: skip


def check_example(
    pool: StatePool, example: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The tensors of one readout, of any batch and window."""
    inputs = {name: value for name, value in example.items() if name != "out"}
    lead = _lead(inputs)
    ready = check_inputs(pool, lead, inputs, "give every input the same batch and window")
    if (out := example.get("out")) is not None:
        ready["out"] = layer_output(pool, lead, out, pool.spec.output_dims)
    return ready


def check_rows(
    pool: StatePool, example: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The tensors of one convolution, of any batch and window."""
    if unknown := set(example) - {"x", "out"}:
        raise InputError(
            f"conv: got {', '.join(sorted(unknown))}; allowed x and out; pass what conv gets"
        )
    lead, x = _lead(example), example.get("x")
    ready = {"x": check_convolution(pool, lead, x)}
    if (out := example.get("out")) is not None:
        ready["out"] = layer_output(pool, lead, out, ("channels",))
    return ready


def check_convolved_example(
    pool: StatePool, conv: ShiftedConvolution, example: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The gates and the output of one token's readout, of any batch."""
    gates = {name: value for name, value in example.items() if name != "out"}
    lead = {**_lead(gates), "window": 1}
    ready = check_convolved(pool, lead["batch"], conv, gates, "give every tensor the same batch")
    if (out := example.get("out")) is not None:
        ready["out"] = layer_output(pool, lead, out, pool.spec.output_dims)
    return ready


def _lead(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Batch and window of the first of `tensors`."""
    shapes = [t.shape for t in tensors.values() if isinstance(t, torch.Tensor) and t.dim() >= 2]
    batch, window = shapes[0][:2] if shapes else (1, 1)
    return {"batch": batch, "window": window}
