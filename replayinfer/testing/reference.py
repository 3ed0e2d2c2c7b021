"""Float64 oracles: each family's recurrence, one token at a time, as its definition reads.

They are the truth that every backend is compared with, so they stay plain: no chunks, no suffix
sums, no checkpoint. The computing type is an argument, because the same code in float32 tells how
far *any* float32 computation may be from the truth, and with ``state_rounding`` it is the standard
kernel that writes a 16-bit state after every token.

Mamba-2 and the convolution are here; GDN and KDA come from :mod:`.delta_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..spec import DeltaSpec, KDASpec, LayerSpec, Mamba2Spec
from .delta_rule import gdn_recurrence, kda_recurrence
from .gates import mamba2_step

__all__ = ["causal_conv", "gdn_recurrence", "kda_recurrence", "mamba2_recurrence", "recurrence"]


def mamba2_recurrence(
    state0: Tensor,
    x: Tensor,
    dt_raw: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    dtype: torch.dtype = torch.float64,
    *,
    state_rounding: torch.dtype | None = None,
    trace: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run Mamba-2 over the tokens; leading batch axes are allowed everywhere.

    Parameters
    ----------
    state0 : [..., heads, dim, state], the state before the first token
    x : [..., tokens, heads, dim]
    dt_raw : [..., tokens, heads], before bias and softplus
    A : [heads], negative
    B, C : [..., tokens, groups, state]; head ``h`` uses group ``h // (heads // groups)``
    D : [heads], optional skip weight
    z : like ``x``, optional output gate
    dt_bias, dt_softplus, dt_limit : see :func:`.gates.mamba2_step`
    dtype : type that everything is computed in
    state_rounding : type that the state is rounded to after each token, as a kernel does that keeps
        a 16-bit state; the token's own output is read before the rounding
    trace : a list to which the state after each token is appended

    Returns
    -------
    y : [..., tokens, heads, dim] in ``dtype``
    state : [..., heads, dim, state] in ``dtype``

    Notes
    -----
    The update is ``exp(A dt) * S + (dt * x) * B``, in this order of multiplication; a backend that
    is compared bit for bit has to multiply in the same order.
    """
    state, x, dt_raw, A, B, C = (t.to(dtype) for t in (state0, x, dt_raw, A, B, C))
    bias = None if dt_bias is None else dt_bias.to(dtype)
    dt_all = mamba2_step(dt_raw, bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    heads_per_group = x.shape[-2] // B.shape[-2]
    B = B.repeat_interleave(heads_per_group, dim=-2)  # [..., tokens, heads, state]
    C = C.repeat_interleave(heads_per_group, dim=-2)

    y = torch.empty_like(x)
    for t in range(x.shape[-3]):
        x_t, dt = x[..., t, :, :], dt_all[..., t, :, None]  # [..., heads, dim], [..., heads, 1]
        decay = torch.exp(A[:, None] * dt)
        state = decay[..., None] * state + (dt * x_t)[..., :, None] * B[..., t, :, None, :]
        y_t = (state * C[..., t, :, None, :]).sum(-1)
        if D is not None:
            y_t = y_t + D.to(dtype)[:, None] * x_t
        if z is not None:
            y_t = y_t * torch.nn.functional.silu(z[..., t, :, :].to(dtype))
        y[..., t, :, :] = y_t
        if state_rounding is not None:
            state = state.to(state_rounding).to(dtype)
        if trace is not None:
            trace.append(state)
    return y, state


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    history: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Run the depthwise causal convolution; leading batch axes are allowed.

    Parameters
    ----------
    x : [..., tokens, channels], before the convolution
    weight : [channels, width]; the last tap meets the newest token
    bias : [channels], optional
    activation : ``"silu"`` or None
    history : [..., taps, channels], the rows before ``x``, oldest first. Only the last
        ``width - 1`` are used; missing ones are zero.
    dtype : type that everything is computed in

    Returns
    -------
    [..., tokens, channels] in ``dtype``
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation: got {activation!r}; allowed 'silu' or None")
    width, tokens = weight.shape[1], x.shape[-2]
    zeros = x.new_zeros((*x.shape[:-2], width - 1, x.shape[-1]), dtype=dtype)
    rows = [zeros, x.to(dtype)] if history is None else [zeros, history.to(dtype), x.to(dtype)]
    padded = torch.cat(rows, dim=-2)
    newest = padded.shape[-2] - tokens  # the row of token 0

    y = torch.empty_like(x, dtype=dtype)
    for t in range(tokens):
        y_t = torch.zeros_like(y[..., t, :])
        for tap in range(width):
            row = padded[..., newest + t - (width - 1) + tap, :]
            y_t = y_t + weight[:, tap].to(dtype) * row
        if bias is not None:
            y_t = y_t + bias.to(dtype)
        y[..., t, :] = y_t if activation is None else torch.nn.functional.silu(y_t)
    return y


def recurrence(
    spec: LayerSpec,
    state0: Tensor,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor | None],
    dtype: torch.dtype = torch.float64,
    *,
    state_rounding: torch.dtype | None = None,
    trace: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the oracle of ``spec`` on what a test hands to ``wrapper.run`` and ``pool.bind``.

    Parameters
    ----------
    spec : the layer, of any family
    state0 : [..., heads, dim, state]
    inputs : the keywords of ``wrapper.run``: ``x, dt, B, C`` and perhaps ``z``; or ``q, k, v, b``
        and ``a`` or ``g``; each ``[..., tokens, ...]``
    weights : the keywords of ``pool.bind``; the convolution's are ignored
    dtype, state_rounding, trace : see :func:`mamba2_recurrence`

    Returns
    -------
    y, state : see :func:`mamba2_recurrence`
    """
    numeric: dict[str, Any] = {"dtype": dtype, "state_rounding": state_rounding, "trace": trace}
    used = {name: w for name, w in weights.items() if not name.startswith("conv_")}
    if isinstance(spec, Mamba2Spec):
        call: dict[str, Any] = {**inputs, **used}
        call["dt_raw"] = call.pop("dt")
        return mamba2_recurrence(
            state0, dt_softplus=spec.dt_softplus, dt_limit=spec.dt_limit, **call, **numeric
        )
    if not isinstance(spec, DeltaSpec):
        raise TypeError(f"spec: got {type(spec).__name__}; allowed Mamba2Spec, GDNSpec, KDASpec")
    delta: dict[str, Any] = {
        **inputs,
        **used,
        **numeric,
        "gate": spec.gate,
        "beta_rule": spec.beta,
        "norm": spec.norm,
        "norm_eps": spec.norm_eps,
        "scale": spec.scale,
    }
    if isinstance(spec, KDASpec):
        return kda_recurrence(state0, lower_bound=spec.lower_bound, **delta)
    return gdn_recurrence(state0, **delta)
