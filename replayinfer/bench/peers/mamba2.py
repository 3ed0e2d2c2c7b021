"""Standard Mamba-2 decode kernels: the state updates of SGLang, mamba-ssm and FlashInfer.

With a window, those of SGLang and FlashInfer leave the state as it is and write one per token.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...spec import LayerSpec, Mamba2Spec
from ...testing import split_channels
from ..work import Work
from .base import Bound, Peer, Variant, last_state
from .retile import Retile, retiled
from .sglang import convolution

__all__ = ["MIXERS", "STEPS", "VERIFIERS"]

# (rows of a tile, warps) that a Triton kernel is tried with, beside its own choice.
_TILES = ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4))
_RETILED = [Retile("_selective_scan_update_kernel", "BLOCK_SIZE_M", *t) for t in _TILES]
_ALGORITHMS = ("auto", "simple", "vertical", "horizontal")  # FlashInfer's

_Arguments = dict[str, Any]
_Update = Callable[[int, _Arguments], torch.Tensor]


def _serves_all(spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> str | None:
    return None


def _one_token(spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> str | None:
    return "windows; its kernel takes one token"


def _serves_16_bit(spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> str | None:
    return "dtype=float32; its kernel takes 16-bit" if dtype is torch.float32 else None


def _sglang(spec: LayerSpec, *, mixer: bool = False) -> Iterator[Variant]:
    module = importlib.import_module("sglang.kernels.ops.mamba.triton_ops.mamba_ssm")
    if mixer:
        importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
    for choice in (None, *_RETILED):
        name = f"sglang ({choice})" if choice else "sglang"
        yield Variant(name, functools.partial(_bind_sglang, module, choice, mixer))


def _bind_sglang(module: Any, choice: Retile | None, mixer: bool, work: Work) -> Bound:
    out = work.outputs()

    def update(layer: int, arguments: _Arguments) -> torch.Tensor:
        with retiled(module, choice):
            module.selective_state_update(
                work.states[layer], **arguments, state_batch_indices=work.slots, out=out[layer],
                **_per_token(work, layer),
            )  # fmt: skip
        return out[layer]

    return _bound(work, work.dtype, update, convolution(work) if mixer else None)


def _mamba_ssm(spec: LayerSpec) -> Iterator[Variant]:
    module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    for choice in (None, *_RETILED):
        name = f"mamba_ssm ({choice})" if choice else "mamba_ssm"
        yield Variant(name, functools.partial(_bind_mamba_ssm, module, choice))


def _bind_mamba_ssm(module: Any, choice: Retile | None, work: Work) -> Bound:
    def update(layer: int, arguments: _Arguments) -> torch.Tensor:
        with retiled(module, choice):  # it makes its own output
            out: torch.Tensor = module.selective_state_update(
                work.states[layer], **arguments, state_batch_indices=work.slots
            )
        return out

    return _bound(work, torch.float32, update)


def _flashinfer(spec: LayerSpec) -> Iterator[Variant]:
    module = importlib.import_module("flashinfer.mamba")
    for algorithm in _ALGORITHMS:
        name = "flashinfer" if algorithm == "auto" else f"flashinfer ({algorithm})"
        yield Variant(name, functools.partial(_bind_flashinfer, module, algorithm))


def _bind_flashinfer(module: Any, algorithm: str, work: Work) -> Bound:
    out = work.outputs()

    def update(layer: int, arguments: _Arguments) -> torch.Tensor:
        module.selective_state_update(
            work.states[layer], **arguments, state_batch_indices=work.slots, out=out[layer],
            algorithm=algorithm, **_per_token(work, layer),
        )  # fmt: skip
        return out[layer]

    # It wants D and the bias in the type of dt.
    return _bound(work, work.tokens[0].inputs["dt"].dtype, update)


def _bound(
    work: Work,
    parameters: torch.dtype,
    update: _Update,
    convolve: Callable[[int], torch.Tensor] | None = None,
) -> Bound:
    """Calls of `update`, on the convolution's output where there is one."""
    ready = [_arguments(work, layer, parameters) for layer in range(work.layers)]

    def step(layer: int) -> torch.Tensor:
        if convolve is None:
            return update(layer, ready[layer])
        return update(layer, ready[layer] | split_channels(work.spec, convolve(layer)))

    return Bound(step, functools.partial(last_state, work))


def _per_token(work: Work, layer: int) -> _Arguments:
    """What makes an update one of a window, of which any token may turn out to be the last."""
    if work.window == 1:
        return {}
    return {
        "disable_state_update": True,
        "intermediate_states_buffer": work.token_states(layer),
        "intermediate_state_indices": work.slots,
        "cache_steps": work.window,
    }


def _arguments(work: Work, layer: int, parameters: torch.dtype) -> _Arguments:
    """What all three take alike. Stride 0 over a head tells them that its scalar is one."""
    spec, weights = work.spec, work.weights[layer]
    assert isinstance(spec, Mamba2Spec)
    heads, dim, state = spec.state_shape
    inputs = work.inputs(layer)
    bias = weights.get("dt_bias", torch.zeros(heads, device=work.device))
    return {
        "x": inputs["x"],
        "dt": inputs["dt"][..., None].expand(*inputs["dt"].shape, dim),
        "A": weights["A"][:, None, None].expand(heads, dim, state),
        "B": inputs["B"],
        "C": inputs["C"],
        "D": weights["D"].to(parameters)[:, None].expand(heads, dim),
        "z": inputs.get("z"),
        "dt_bias": bias.to(parameters)[:, None].expand(heads, dim),
        "dt_softplus": spec.dt_softplus,
    }


STEPS = (
    Peer("sglang", "sglang", _serves_all, _sglang),
    Peer("mamba_ssm", "mamba-ssm", _serves_all, _mamba_ssm),
    Peer("flashinfer", "flashinfer-python", _serves_16_bit, _flashinfer),
)
VERIFIERS = (
    Peer("sglang", "sglang", _serves_all, _sglang),
    Peer("mamba_ssm", "mamba-ssm", _one_token, _mamba_ssm),
    Peer("flashinfer", "flashinfer-python", _serves_16_bit, _flashinfer),
)
MIXERS = (Peer("sglang", "sglang", _serves_all, functools.partial(_sglang, mixer=True)),)
