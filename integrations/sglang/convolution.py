"""Gated DeltaNet's decode from what its input projections made: one kernel before the readout.

SGLang takes a projection apart with one kernel and convolves with another. In a decode step ours
does both on the way, so the projections are handed on as they are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import replayinfer

if TYPE_CHECKING:
    from .layers import RecurrentLayers
    from .slots import SlotReplay

__all__ = ["PROJECTIONS", "decode", "hook_projections", "windows"]

# What takes projections apart: [q | k | v | z] and [b | a] of each key head, or of all together.
PROJECTIONS = {
    "sglang.srt.models.qwen3_next.fused_qkvzba_split_reshape_cat": True,
    "sglang.srt.models.qwen3_5.fused_qkvzba_split_reshape_cat_contiguous": False,
}

_SILU = ("silu", "swish")


class _Projected(NamedTuple):
    """Projections of a decode step in the place of ``mixed_qkv``; `z_out` is what the model got."""

    qkvz: torch.Tensor
    ba: torch.Tensor
    z_out: torch.Tensor
    by_head: bool


def windows(states: torch.Tensor, layers: RecurrentLayers) -> torch.dtype | None:
    """The dtype of SGLang's windows ``[layers, slots, channels, width - 1]``; None: not for us.

    A CPU with AMX has them across, and an activation of another kind is SGLang's to apply.
    """
    known = all(
        getattr(m, "activation", None) in (None, *_SILU) for m in layers.modules.values()
    )  # fmt: skip
    beside = states.stride()[-2:] == (states.shape[-1], 1)
    return states.dtype if known and beside else None


def hook_projections() -> None:
    """Around what takes them apart, in the models that were loaded."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target, by_head in PROJECTIONS.items():
        if target.rpartition(".")[0] in sys.modules:
            hooks.HookRegistry.register(target, _around(by_head), hooks.HookType.AROUND)
    hooks.HookRegistry.apply_hooks()


def _around(by_head: bool) -> Callable[..., Any]:
    def hand_on(
        original: Callable[..., Any], qkvz: torch.Tensor, ba: torch.Tensor, *sizes: int
    ) -> Any:
        from .backends import current

        replay = current()
        if replay is None or not replay.projects or not replay.convolves(qkvz):
            return original(qkvz, ba, *sizes)
        _, heads, _, dim = sizes
        projected = _project(qkvz, ba, heads, dim, by_head)
        return projected, projected.z_out, ba, ba

    return hand_on


def _project(
    qkvz: torch.Tensor, ba: torch.Tensor, heads: int, dim: int, by_head: bool
) -> _Projected:
    return _Projected(qkvz, ba, qkvz.new_empty((qkvz.shape[0], heads, dim)), by_head)


def decode(
    replay: SlotReplay, layer: Any, mixed_qkv: Any, a: torch.Tensor, b: torch.Tensor,
    states: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """One layer's outputs ``[1, batch, heads, dim]``, or None where SGLang has to convolve.

    Where the model gives both projections in the place of `mixed_qkv`, as qwen3_5 does for SGLang's
    own kernel of this kind, the outputs and ``z``.
    """
    given: dict[str, Any] = {
        "states": states, "slots": slots, "weight": layer.conv_weights, "bias": layer.bias,
        "activation": "silu" if layer.activation in _SILU else None,
    }  # fmt: skip
    spec: Any = replay.pool.spec
    wants_z = type(mixed_qkv) is tuple and replay.convolves(mixed_qkv[0])
    if wants_z:
        qkvz, ba = mixed_qkv
        mixed_qkv = _project(qkvz, ba, spec.heads, spec.dim, by_head=False)
    if isinstance(mixed_qkv, _Projected):
        qkvz, ba, z_out, by_head = mixed_qkv
        ratio = spec.heads // spec.key_heads
        values = ratio * spec.dim
        heads = (spec.key_heads, -1)
        if by_head:
            x, z = qkvz.unflatten(1, heads).split([2 * spec.state + values, values], dim=2)
            b, a = ba.unflatten(1, heads).split(ratio, dim=2)
        else:
            channels = spec.conv_channels
            x, z = qkvz[:, :channels], qkvz[:, channels:].unflatten(1, heads)
            b, a = (gate[:, None] for gate in ba.split(spec.heads, dim=1))
        given |= {"z": z, "z_out": z_out}
    elif replay.convolves(mixed_qkv):
        x = mixed_qkv
        a, b = (gate.reshape(-1, 1, spec.heads) for gate in (a, b))
    else:
        return None
    conv = replayinfer.ops.ShiftedConvolution(x=x, **given)
    out = replay.convolved_readout(layer.layer_id, conv, a=a, b=b).transpose(0, 1)
    return (out, mixed_qkv.z_out) if wants_z else out
