"""Gated DeltaNet and Kimi Delta Attention: plans to kernel launches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ...planner import Plan
from ...pools import StatePool
from ..base import ShiftedConvolution
from ..convolved import split_line
from ..scratch import scratch
from .delta_fold import fold
from .workspace import config, has_pdl, require_pairs

__all__ = ["convolved_readout", "fold", "readout", "verify"]


def readout(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """One token of every sequence in one layer: one kernel for small batches, else two."""
    _readout(pool, plan, layer, inputs, out, None)


def convolved_readout(
    pool: StatePool,
    plan: Plan,
    layer: int,
    conv: ShiftedConvolution,
    gates: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """The two kernels, of which the first makes ``q``, ``k`` and ``v`` as well."""
    from replayinfer.kernels.conv.shift import ShiftedWindows

    channels = conv.weight.shape[0]
    line = scratch(plan.arrays, "line", plan.bucket, channels, dtype=conv.x.dtype)
    windows = ShiftedWindows(
        conv.x, conv.states, conv.slots, conv.weight, conv.bias, conv.activation == "silu",
        conv.z, conv.z_out,
    )  # fmt: skip
    if conv.by_head:
        gates = {name: gate[:, None] for name, gate in gates.items()}
    _readout(pool, plan, layer, {**split_line(pool, line), **gates}, out, windows)


def _readout(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    conv: Any,
) -> None:
    from replayinfer.kernels.delta.channel_prepass import channel_prepass
    from replayinfer.kernels.delta.fused import fused
    from replayinfer.kernels.delta.prepass import prepass
    from replayinfer.kernels.delta.readout import readout as stream

    spec: Any = pool.spec
    arrays = plan.arrays
    raw, per_channel = spec.gate != "log", "state" in spec.gate_dims
    y, plane = out[:, 0], pool.checkpoints.plane[layer]
    q, k, v, gate, beta = (inputs[n][:, 0] for n in ("q", "k", "v", "a" if raw else "g", "b"))
    a_log, dt_bias = (pool.weights[n][layer] if raw else None for n in ("A_log", "dt_bias"))
    rows = {name: field[layer] for name, field in pool.inputs.fields.items()}
    row_k, row_g, row_u = (rows[n] for n in ("k", "g", "u"))
    row_scale, row_beta, row_v = (rows.get(n) for n in ("k_scale", "beta", "v"))
    rules: dict[str, Any] = {
        "gate_kind": spec.gate, "beta_rule": spec.beta,
        "query_scale": spec.query_scale, "norm_eps": spec.norm_eps, "pdl": has_pdl(pool.device),
    }  # fmt: skip
    if per_channel:
        rules["lower_bound"] = spec.lower_bound

    if conv is None and (whole := config(pool, "fused", plan.bucket)) is not None:
        fused(
            y, plane, q, k, v, gate, beta, a_log, dt_bias,
            row_k, row_scale, row_g, row_u, row_v, row_beta,
            arrays.page, arrays.history, arrays.window, arrays.table,
            capacity=pool.capacity, **rules, config=whole,
        )  # fmt: skip
        return
    if not per_channel:
        require_pairs(q=q, k=k)
    depth = max(16, 1 << (pool.capacity - 1).bit_length())
    own = partial(scratch, arrays)
    weight = own("weight", plan.bucket, spec.heads, 2, depth)
    scale = own("scale", plan.bucket, spec.heads, 4)
    first = config(pool, "prepass" if conv is None else "conv_prepass", plan.bucket)
    rest = (
        q, k, gate, beta, a_log, dt_bias, row_k, row_scale, row_g, row_beta,
        arrays.history, arrays.window, arrays.table,
    )  # fmt: skip
    if per_channel:
        decayed = own("decayed", plan.bucket, spec.heads, 2, spec.state)
        pairs = plane.element_size() == 2
        channel_prepass(weight, scale, decayed, *rest, **rules, pairs=pairs, config=first)
        q, k = decayed[:, :, 0], decayed[:, :, 1]
    else:
        prepass(weight, scale, *rest, **rules, config=first, conv=conv, dim=spec.dim)
    stream(
        y, plane, weight, scale, q, k, v, row_u, row_v,
        arrays.page, arrays.history, arrays.window, arrays.table,
        per_channel=per_channel, convolved=conv is not None, pdl=has_pdl(pool.device),
        config=config(pool, "readout" if conv is None else "conv_readout", plan.bucket),
    )  # fmt: skip


def verify(
    pool: StatePool,
    plan: Plan,
    layer: int,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """A window of tokens of every sequence in one layer, chains or draft trees, by two kernels."""
    from replayinfer.kernels.delta.channel_verify_prepass import channel_verify_prepass
    from replayinfer.kernels.delta.verify import block_of_tokens
    from replayinfer.kernels.delta.verify import verify as stream
    from replayinfer.kernels.delta.verify_prepass import verify_prepass

    spec: Any = pool.spec
    arrays = plan.arrays
    raw, per_channel = spec.gate != "log", "state" in spec.gate_dims
    plane = pool.checkpoints.plane[layer]
    q, k, v, gate, beta = (inputs[n] for n in ("q", "k", "v", "a" if raw else "g", "b"))
    a_log, dt_bias = (pool.weights[n][layer] if raw else None for n in ("A_log", "dt_bias"))
    rows = {name: field[layer] for name, field in pool.inputs.fields.items()}
    rules: dict[str, Any] = {
        "gate_kind": spec.gate, "beta_rule": spec.beta,
        "query_scale": spec.query_scale, "norm_eps": spec.norm_eps, "pdl": has_pdl(pool.device),
        "config": config(pool, "verify_prepass", plan.bucket),
    }  # fmt: skip

    depth = max(16, 1 << (pool.capacity - 1).bit_length())
    width = block_of_tokens(plan.window)
    own = partial(scratch, arrays)
    weight = own("weight", plan.bucket, spec.heads, depth, width, 2)
    scale = own("scale", plan.bucket, spec.heads, 3 * width)
    pairs = own("pairs", plan.bucket, spec.heads, 2, width, width)
    rest = (
        q, k, gate, beta, a_log, dt_bias,
        rows["k"], rows.get("k_scale"), rows["g"], rows.get("beta"),
        arrays.ancestors, arrays.history, arrays.window, arrays.table,
    )  # fmt: skip
    if per_channel:
        decayed = own("decayed", plan.bucket, spec.heads, width, 2, spec.state)
        channel_verify_prepass(
            weight, scale, pairs, decayed, *rest, **rules, lower_bound=spec.lower_bound
        )
        q = k = decayed
    else:
        verify_prepass(weight, scale, pairs, *rest, **rules)
    stream(
        out, plane, weight, scale, pairs, q, k, v, rows["u"], rows.get("v"),
        arrays.page, arrays.history, arrays.window, arrays.table,
        capacity=pool.capacity, per_channel=per_channel, pdl=has_pdl(pool.device),
        config=config(pool, "verify", plan.bucket),
    )  # fmt: skip
