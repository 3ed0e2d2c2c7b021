"""The gated norms behind delta-rule layers: in decode steps ours, which start behind the readout.

SGLang's own kernel is launched when the readout has ended, which at decode sizes costs about as
much as the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import replayinfer

if TYPE_CHECKING:
    from .slots import SlotReplay

__all__ = ["replace_norms"]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
_FUSED = "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated"
_PLAIN = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm"


def replace_norms(model: Any, replay: SlotReplay) -> int:
    """Put ours before the gated norms beside the replayed layers of `model`; how many there are."""
    layers = set(map(id, replay.layers.modules.values()))
    count = 0
    for module in model.modules():
        children = list(module.children())
        if any(id(child) in layers for child in children):
            for norm in filter(_serves, children):
                norm.forward = _around(norm, norm.forward, replay)
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


def _around(norm: Any, original: Callable[..., Any], replay: SlotReplay) -> Callable[..., Any]:
    activation: Any = _ACTIVATIONS[norm.activation]

    def forward(x: Any, z: Any = None, *args: Any, **kwargs: Any) -> Any:
        rows, gates = _by_head(x), _by_head(z)
        ours = replay.stepping and rows is not None and gates is not None
        if not ours or args or kwargs or (rows.shape, rows.dtype) != (gates.shape, gates.dtype):
            return original(x, z, *args, **kwargs)
        # In place: what a readout returned is nobody else's.
        replayinfer.ops.gated_norm(
            rows, gates, norm.weight, eps=norm.eps, activation=activation, out=rows
        )
        return x

    return forward


def _by_head(x: Any) -> Any:
    """``[rows, heads, dim]`` of one of the forms that models give, None for others."""
    if x is None or x.stride(-1) != 1:
        return None
    if x.dim() == 2:
        return x[:, None]
    if x.dim() == 4 and x.shape[0] == 1:
        return x[0]
    return x if x.dim() == 3 else None
