"""Fresh random inputs and weights with the distributions that layers see, and their extremes.

Everything comes from the ``torch.Generator`` that is passed, on its device. ``gates`` says how fast
the state forgets, in the weights and the inputs alike (pass the same to both):

- ``"realistic"``: as models are initialised, steps of 1e-3 to 1e-1, decay rates of 1 to 16;
- ``"near_one"``: decays within 1e-6 to 1e-3 of 1, so that an error made once stays;
- ``"strong"``: a few tokens of memory, log decays of about -0.5 to -20;
- ``"extreme"``: raw steps from -80 to 80, log decays from -0 over -1280 to beyond float32's exp (a
  bounded gate: from 0 to its bound).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..spec import DeltaSpec, KDASpec, LayerSpec, Mamba2Spec
from .gates import beta_value, l2_normalise, softplus, softplus_gate

Gates = Literal["realistic", "near_one", "strong", "extreme"]

# Every fourth token takes one of these as its raw step, so that the edges occur in short runs too.
EDGE_STEPS = (80.0, -80.0, 20.0, -20.0, 0.0, -16.0, 16.0, -40.0)
# Head h takes entry h modulo the length. log(16) with a step of 80 is the log decay -1280.
EDGE_A_LOGS = (math.log(16.0), -20.0, 0.0, 8.0, -6.0, 20.0)
EDGE_BETAS = (30.0, -30.0, 0.0, 80.0, -80.0)


def mamba2_weights(
    spec: Mamba2Spec, generator: torch.Generator, gates: Gates = "realistic"
) -> dict[str, Tensor]:
    """Return what ``pool.bind`` takes for a Mamba-2 layer, all of it in float32.

    Without ``dt_softplus`` there is no bias either: ``dt`` is then a step already.
    """
    A_log, dt_bias = _log_rates(spec.heads, generator, gates), _biases(spec.heads, generator, gates)
    weights = {"A": -torch.exp(A_log), "D": _normal(generator, spec.heads)}
    if spec.dt_softplus:
        weights["dt_bias"] = dt_bias
    return weights | conv_weights(spec, generator)


def delta_weights(
    spec: DeltaSpec, generator: torch.Generator, gates: Gates = "realistic"
) -> dict[str, Tensor]:
    """Return what ``pool.bind`` takes for a GDN or KDA layer, all of it in float32."""
    weights = {}
    if spec.gate != "log":
        weights["A_log"], weights["dt_bias"] = _gate_weights(spec, generator, gates)
    return weights | conv_weights(spec, generator)


def conv_weights(spec: LayerSpec, generator: torch.Generator) -> dict[str, Tensor]:
    """Return ``conv_weight`` [channels, width] and ``conv_bias``; nothing for ``conv_width=0``."""
    if not spec.conv_width:
        return {}
    weight = _normal(generator, spec.conv_channels, spec.conv_width) * spec.conv_width**-0.5
    return {"conv_weight": weight, "conv_bias": 0.1 * _normal(generator, spec.conv_channels)}


def mamba2_inputs(
    spec: Mamba2Spec,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    gates: Gates = "realistic",
    *,
    with_z: bool = False,
) -> dict[str, Tensor]:
    """Return what ``wrapper.run`` takes for a Mamba-2 layer, each ``[batch, tokens, ...]``.

    ``x``, ``B`` and ``z`` are normal, ``C`` smaller by ``state ** -0.5`` so that the extremes fit
    float16; ``dt`` is raw, or a step where the spec has no softplus. All are in ``dtype``.
    """
    heads, lead = spec.heads, (batch, tokens)
    dt = _raw_steps(generator, (*lead, heads), gates)
    if not spec.dt_softplus:
        dt = softplus(dt + _biases(heads, generator, gates))
    inputs = {
        "x": _normal(generator, *lead, heads, spec.dim),
        "dt": dt,
        "B": _normal(generator, *lead, spec.groups, spec.state),
        "C": _normal(generator, *lead, spec.groups, spec.state) * spec.state**-0.5,
    }
    if with_z:
        inputs["z"] = _normal(generator, *lead, heads, spec.dim)
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


def delta_inputs(
    spec: DeltaSpec,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    gates: Gates = "realistic",
) -> dict[str, Tensor]:
    """Return what ``wrapper.run`` takes for a GDN or KDA layer, each ``[batch, tokens, ...]``.

    ``q``, ``k``, ``v`` are normal, in ``dtype``; where the spec does not normalise, ``q`` and ``k``
    have norms just below 1, since longer keys make the delta rule grow without bound. ``a`` and
    ``b`` are raw, in ``dtype``; ``g`` (for ``gate="log"``) and a given beta are float32.
    """
    lead = (batch, tokens)
    q, k = (_normal(generator, *lead, spec.key_heads, spec.state) for _ in range(2))
    if spec.norm == "none":
        q, k = 0.99 * l2_normalise(q, 1e-6), 0.99 * l2_normalise(k, 1e-6)
    inputs = {"q": q, "k": k, "v": _normal(generator, *lead, spec.heads, spec.dim)}
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}

    shape = _gate_shape(spec)
    a = _raw_steps(generator, (*lead, math.prod(shape)), gates).reshape(*lead, *shape)
    if spec.gate == "log":
        A_log, dt_bias = _gate_weights(spec, generator, gates)
        inputs["g"] = softplus_gate(a, A_log.reshape(-1, *[1] * (len(shape) - 1)), dt_bias)
    else:
        inputs["a"] = a.to(dtype)

    b = _normal(generator, *lead, spec.heads)
    if gates == "extreme":
        b = _with_edges(b * 4, EDGE_BETAS)
    inputs["b"] = beta_value(b, "sigmoid") if spec.beta == "given" else b.to(dtype)
    return inputs


def conv_inputs(
    spec: LayerSpec, tokens: int, batch: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return rows before the convolution, ``[batch, tokens, channels]``, normal."""
    return _normal(generator, batch, tokens, spec.conv_channels).to(dtype)


def initial_states(spec: LayerSpec, batch: int, generator: torch.Generator) -> Tensor:
    """Return float32 states ``[batch, heads, dim, state]`` as a prefill might leave them."""
    return _normal(generator, batch, *spec.state_shape)


def layer_weights(
    spec: LayerSpec, generator: torch.Generator, gates: Gates = "realistic"
) -> dict[str, Tensor]:
    """Return the weights of a layer of any family."""
    if isinstance(spec, Mamba2Spec):
        return mamba2_weights(spec, generator, gates)
    return delta_weights(_as_delta(spec), generator, gates)


def layer_inputs(
    spec: LayerSpec,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    gates: Gates = "realistic",
) -> dict[str, Tensor]:
    """Return the inputs of a layer of any family."""
    if isinstance(spec, Mamba2Spec):
        return mamba2_inputs(spec, tokens, batch, dtype, generator, gates)
    return delta_inputs(_as_delta(spec), tokens, batch, dtype, generator, gates)


def split_channels(spec: LayerSpec, rows: Tensor) -> dict[str, Tensor]:
    """Split convolved rows [..., channels] into ``x``, ``B``, ``C`` or ``q``, ``k``, ``v``."""
    if isinstance(spec, Mamba2Spec):
        shapes = {
            "x": (spec.heads, spec.dim),
            "B": (spec.groups, spec.state),
            "C": (spec.groups, spec.state),
        }
    else:
        key = (_as_delta(spec).key_heads, spec.state)
        shapes = {"q": key, "k": key, "v": (spec.heads, spec.dim)}
    parts = torch.split(rows, [math.prod(shape) for shape in shapes.values()], dim=-1)
    return {
        name: part.reshape(*rows.shape[:-1], *shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _as_delta(spec: LayerSpec) -> DeltaSpec:
    if not isinstance(spec, DeltaSpec):
        raise TypeError(f"spec: got {type(spec).__name__}; allowed Mamba2Spec, GDNSpec, KDASpec")
    return spec


def _gate_shape(spec: DeltaSpec) -> tuple[int, ...]:
    return (spec.heads, spec.state) if isinstance(spec, KDASpec) else (spec.heads,)


def _gate_weights(
    spec: DeltaSpec, generator: torch.Generator, gates: Gates
) -> tuple[Tensor, Tensor]:
    """Return ``A_log`` [heads] and ``dt_bias``, [heads] or [heads, state]."""
    shape = _gate_shape(spec)
    count = math.prod(shape)
    if not isinstance(spec, KDASpec) or spec.gate != "bounded" or gates == "extreme":
        A_log = _log_rates(spec.heads, generator, gates)
        return A_log, _biases(count, generator, gates).reshape(shape)
    # Here exp(A_log) is a slope; the bias alone says how large the decay is.
    decays = {"realistic": (1e-3, 0.5), "near_one": (1e-6, 1e-3), "strong": (1.0, 2.0)}[gates]
    low, high = (min(decay, 0.8 * -spec.lower_bound) for decay in decays)
    part = _log_uniform(generator, count, low, high).reshape(shape) / -spec.lower_bound
    slope = _log_uniform(generator, spec.heads, 0.5, 1.5)
    return torch.log(slope), torch.logit(part) / slope[:, None]


def _log_rates(heads: int, generator: torch.Generator, gates: Gates) -> Tensor:
    """Return ``A_log``, [heads]: the log of the decay per unit step."""
    if gates == "extreme":
        rates = [EDGE_A_LOGS[h % len(EDGE_A_LOGS)] for h in range(heads)]
        return torch.tensor(rates, device=generator.device)
    low, high = (0.01, 0.1) if gates == "near_one" else (1.0, 16.0)
    return torch.log(_log_uniform(generator, heads, low, high))


def _biases(count: int, generator: torch.Generator, gates: Gates) -> Tensor:
    """Return ``dt_bias``, [count], such that softplus of it is the step."""
    if gates == "extreme":
        return torch.zeros(count, device=generator.device)  # raw steps reach +-80 as drawn
    steps = {"realistic": (1e-3, 1e-1), "near_one": (1e-4, 1e-2), "strong": (0.5, 1.25)}[gates]
    return torch.log(torch.expm1(_log_uniform(generator, count, *steps)))


def _raw_steps(generator: torch.Generator, shape: tuple[int, int, int], gates: Gates) -> Tensor:
    """Return raw steps [batch, tokens, heads] (``dt`` or ``a``), before the bias."""
    if gates == "extreme":
        uniform = torch.rand(shape, generator=generator, device=generator.device)
        return _with_edges(160.0 * uniform - 80.0, EDGE_STEPS)
    return _normal(generator, *shape) * {"realistic": 1.0, "near_one": 0.1, "strong": 0.2}[gates]


def _with_edges(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """Put an edge value at every fourth token (from token 1) of [batch, tokens, heads]."""
    _, tokens, heads = values.shape
    for t in range(1, tokens, 4):
        for h in range(heads):
            values[:, t, h] = edges[(t // 4 + h // len(EDGE_A_LOGS)) % len(edges)]
    return values


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _log_uniform(generator: torch.Generator, count: int, low: float, high: float) -> Tensor:
    uniform = torch.rand(count, generator=generator, device=generator.device)
    return torch.exp(math.log(low) + uniform * math.log(high / low))
