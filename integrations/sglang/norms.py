"""The gated norms behind delta-rule layers: in decode steps ours, which start behind the readout.

SGLang's own kernel is launched when the readout has ended, which at decode sizes costs about as
much as the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch

import replayinfer

if TYPE_CHECKING:
    from .slots import SlotReplay

__all__ = ["replace_norms"]

_ACTIVATIONS: dict[str, Literal["silu", "sigmoid"]] = {
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
}
_FUSED = "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated"
_PLAIN = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm"


def replace_norms(model: Any, replay: SlotReplay) -> int:
    """Put ours before the gated norms beside the replayed layers of `model`; how many there are."""
    layers = set(map(id, replay.layers.modules.values()))
    forward, count = _decoding(replay), 0
    for module in model.modules():
        children = list(module.children())
        if any(id(child) in layers for child in children):
            for norm in filter(_serves, children):
                norm.forward = MethodType(forward, norm)  # once more: the latest replay's
                count += 1
    return count


def _serves(norm: Any) -> bool:
    """Whether a module is a norm by head, before its gate, as `replayinfer.ops.gated_norm` is."""
    name = f"{type(norm).__module__}.{type(norm).__qualname__}"
    if name == _PLAIN and not (norm.group_size is None and norm.norm_before_gate):
        return False
    return (
        name in (_FUSED, _PLAIN)
        and norm.weight is not None
        and norm.bias is None
        and norm.activation in _ACTIVATIONS
    )


def _decoding(replay: SlotReplay) -> Callable[..., Any]:
    """A norm's ``forward``: a method, so that a copy of the norm norms by its own weight."""

    def forward(norm: Any, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        ours = replay.stepping and len(more) == 1 and not named
        if ours and not torch.compiler.is_compiling():
            rows, gates = _by_head(x), _by_head(more[0])
            if rows is not None and gates is not None and _alike(rows, gates):
                # In place: what a readout returned is nobody else's.
                replayinfer.ops.gated_norm(
                    rows, gates, norm.weight, eps=norm.eps,
                    activation=_ACTIVATIONS[norm.activation], out=rows,
                )  # fmt: skip
                return x
        return type(norm).forward(norm, x, *more, **named)

    return forward


def _alike(x: torch.Tensor, z: torch.Tensor) -> bool:
    return (x.shape, x.dtype) == (z.shape, z.dtype)


def _by_head(x: Any) -> torch.Tensor | None:
    """``[rows, heads, dim]`` of one of the forms that models give, None for others."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.stride(-1) != 1:
        return None
    if x.dim() == 2:
        return x[:, None]
    if x.dim() == 4 and x.shape[0] == 1:
        return x[0]
    return x if x.dim() == 3 else None
