"""What every arm of a bench decodes: a token, or a window, of every sequence in some layers.

Tensors lie as a model leaves them: the convolution's input and the gates are slices of one packed
projection, and what the step takes (``x | B | C`` or ``q | k | v``) are slices of the
convolution's output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..spec import LayerSpec, Mamba2Spec
from ..testing import (
    conv_inputs,
    initial_states,
    layer_inputs,
    layer_weights,
    split_channels,
)

__all__ = ["Tokens", "Work", "make_tokens", "make_weights", "make_work"]

_PAST_CACHES = 512 << 20  # bytes
_EXACT = ("A", "A_log")  # kept in float32 by every model; other parameters have its dtype


@dataclass(frozen=True)
class Tokens:
    """The new tokens of every sequence in one layer, those of a window next to each other.

    Attributes
    ----------
    rows : Tensor, [tokens, channels]
        Before the convolution.
    convolved : Tensor, [tokens, channels]
        After it, contiguous.
    inputs : dict of str to Tensor, [tokens, ...]
        By the names of ``spec.input_fields``; the activations are views of `convolved`.
    """

    rows: torch.Tensor
    convolved: torch.Tensor
    inputs: dict[str, torch.Tensor]

    def windows(self, window: int) -> dict[str, torch.Tensor]:
        """The inputs as ``[batch, window, ...]``."""
        return {name: value.unflatten(0, (-1, window)) for name, value in self.inputs.items()}


@dataclass
class Work:
    """What a standard decode kernel needs: a state and a convolution window of every sequence.

    Attributes
    ----------
    spec, batch, dtype, state_dtype, device
    window : int
        Tokens of a sequence that one call takes; with more than one a kernel keeps a state per
        token, since any of them may be the last that counts.
    gated : bool
        Whether the step multiplies by ``silu(z)`` itself.
    conv_bias : bool
        Whether the convolution has a bias.
    tokens, weights : one per layer
    states : list of Tensor, [batch, heads, dim, state] of `state_dtype`
    windows : list of Tensor, [batch, channels, conv_width - 1]
        The pre-convolution rows before the token, the newest last.
    """

    spec: LayerSpec
    batch: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    device: torch.device
    gated: bool
    conv_bias: bool
    window: int = 1
    tokens: list[Tokens] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    windows: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = torch.arange(self.batch, device=self.device, dtype=torch.int32)
        self._token_states: list[torch.Tensor] = []

    @property
    def layers(self) -> int:
        return len(self.states)

    def outputs(self) -> list[torch.Tensor]:
        """New tensors for every layer's output, ``[batch, heads, dim]`` or with a window axis."""
        tokens = (self.batch,) if self.window == 1 else (self.batch, self.window)
        shape = (*tokens, self.spec.heads, self.spec.dim)
        return [torch.empty(shape, device=self.device, dtype=self.dtype) for _ in self.states]

    def inputs(self, layer: int) -> dict[str, torch.Tensor]:
        """What the step of a layer takes, ``[batch, ...]`` or ``[batch, window, ...]``."""
        tokens = self.tokens[layer]
        return tokens.inputs if self.window == 1 else tokens.windows(self.window)

    def token_states(self, layer: int) -> torch.Tensor:
        """Room for a state per token, ``[batch, window, heads, dim, state]``.

        Layers share buffers as far as these are too large for a cache to hold them.
        """
        if not self._token_states:
            shape = (self.batch, self.window, *self.spec.state_shape)
            size = math.prod(shape) * self.state_dtype.itemsize
            count = min(self.layers, -(-_PAST_CACHES // size))
            self._token_states = [
                torch.empty(shape, device=self.device, dtype=self.state_dtype) for _ in range(count)
            ]
        return self._token_states[layer % len(self._token_states)]


def make_work(
    spec: LayerSpec,
    *,
    batch: int,
    layers: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
    gated: bool = False,
    conv_bias: bool = True,
    window: int = 1,
    seed: int = 0,
) -> Work:
    """Random work with the decays of trained layers; nothing in it is zero."""
    work = Work(spec, batch, dtype, state_dtype, device, gated, conv_bias, window)
    generator = torch.Generator(device=device).manual_seed(seed)
    for _ in range(layers):
        work.weights.append(make_weights(spec, dtype, generator, conv_bias))
        work.tokens.append(make_tokens(spec, batch * window, dtype, generator, gated))
        work.states.append(initial_states(spec, batch, generator).to(state_dtype))
        taps = max(spec.conv_width - 1, 0)
        before = conv_inputs(spec, taps, batch, dtype, generator)
        work.windows.append(before.transpose(1, 2).contiguous())
    return work


def make_weights(
    spec: LayerSpec, dtype: torch.dtype, generator: torch.Generator, conv_bias: bool = True
) -> dict[str, torch.Tensor]:
    """A layer's parameters in float32, with values that `dtype` holds where a model keeps it so."""
    weights = layer_weights(spec, generator)
    if "conv_bias" in weights and not conv_bias:
        weights["conv_bias"].zero_()
    return {n: w if n in _EXACT else w.to(dtype).float() for n, w in weights.items()}


def make_tokens(
    spec: LayerSpec, tokens: int, dtype: torch.dtype, generator: torch.Generator, gated: bool
) -> Tokens:
    inputs = {n: v[:, 0] for n, v in layer_inputs(spec, 1, tokens, dtype, generator).items()}
    if gated and isinstance(spec, Mamba2Spec):
        shape = inputs["x"].shape
        inputs["z"] = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    rows = conv_inputs(spec, 1, tokens, dtype, generator)[:, 0]
    activations = split_channels(spec, rows)
    convolved = torch.cat([inputs.pop(name).flatten(1) for name in activations], dim=1)
    # What is left are gates; those of the model's dtype share a projection with the rows.
    packed = [name for name, gate in inputs.items() if gate.dtype == dtype]
    *gates, rows = _project([*(inputs[name].flatten(1) for name in packed), rows])
    for name, gate in zip(packed, gates, strict=True):
        inputs[name] = gate.view(inputs[name].shape)
    return Tokens(rows, convolved, inputs | split_channels(spec, convolved))


def _project(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values as slices of one tensor, each row of each on 16 bytes at least."""
    widths = [math.ceil(part.shape[1] / 8) * 8 for part in parts]
    whole = parts[0].new_zeros(parts[0].shape[0], sum(widths))
    slices = [
        room[:, : part.shape[1]]
        for room, part in zip(whole.split(widths, dim=1), parts, strict=True)
    ]
    for room, part in zip(slices, parts, strict=True):
        room.copy_(part)
    return slices
