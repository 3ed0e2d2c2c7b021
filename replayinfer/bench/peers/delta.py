"""Standard decode kernels of the delta-rule families: SGLang, flash-linear-attention, FlashInfer.

All keep a state as ``[heads, V, K]``, or are asked to. With a window, those of SGLang and
FlashInfer leave the state as it is and write one per token.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...spec import DeltaSpec, KDASpec, LayerSpec
from ..work import Work
from .base import Bound, Peer, Variant, last_state
from .retile import Retile, retiled
from .sglang import convolution

__all__ = ["GDN", "GDN_VERIFIERS", "KDA", "KDA_VERIFIERS", "MIXERS"]

# (rows of a tile, warps) that a Triton kernel is tried with, beside its own choice.
_TILES = ((8, 1), (16, 1), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4))


def _retiled(kernel: str) -> Iterator[Retile | None]:
    yield None
    for rows, warps in _TILES:
        yield Retile(kernel, "BV", rows, warps, extent="V")


def _delta(work: Work) -> DeltaSpec:
    assert isinstance(work.spec, DeltaSpec)
    return work.spec


def _lower_bound(spec: DeltaSpec) -> float | None:
    return spec.lower_bound if isinstance(spec, KDASpec) and spec.gate == "bounded" else None


def _refuses(
    spec: LayerSpec, betas: tuple[str, ...], norms: tuple[str, ...] = ("l2", "none")
) -> str | None:
    assert isinstance(spec, DeltaSpec)
    if spec.gate == "log":
        return "gate='log'; it is called with the raw gate"
    if spec.beta not in betas:
        return f"beta={spec.beta!r}; its kernel has {', '.join(betas)}"
    return None if spec.norm in norms else f"norm={spec.norm!r}; its kernel has {', '.join(norms)}"


# SGLang ---------------------------------------------------------------------------------------


def _sglang_refuses(spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> str | None:
    return _refuses(spec, ("sigmoid",))


def _sglang(spec: LayerSpec, *, mixer: bool = False) -> Iterator[Variant]:
    module = importlib.import_module("sglang.kernels.ops.attention.fla.fused_recurrent")
    if mixer:
        importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
    name = "kda" if isinstance(spec, KDASpec) else "gated_delta_rule"
    function = f"fused_recurrent_{name}_packed_decode"
    for choice in _retiled(f"{function}_kernel"):
        label = f"sglang ({choice})" if choice else "sglang"
        bind = functools.partial(_bind_sglang, module, function, choice, mixer)
        yield Variant(label, bind)


def _bind_sglang(
    module: Any, function: str, choice: Retile | None, mixer: bool, work: Work
) -> Bound:
    spec, out = _delta(work), [o[:, None] for o in work.outputs()]
    decode = getattr(module, function)
    kda = isinstance(spec, KDASpec)
    extra = {"lower_bound": _lower_bound(spec)} if kda else {}
    convolve = convolution(work, channels_last=kda) if mixer else None
    cuda_kernel: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    if kda and choice:
        other = importlib.import_module("sglang.kernels.ops.attention.kda_packed_decode")
        cuda_kernel = functools.partial(_triton_only, other)

    def step(layer: int) -> torch.Tensor:
        tokens, weights = work.tokens[layer], work.weights[layer]
        rows = tokens.convolved if convolve is None else convolve(layer)
        with retiled(module, choice), cuda_kernel():
            decode(
                rows, tokens.inputs["a"].flatten(1), tokens.inputs["b"], weights["A_log"],
                weights["dt_bias"].flatten(), spec.query_scale, work.states[layer], out[layer],
                work.slots, use_qk_l2norm_in_kernel=spec.norm == "l2", **extra,
            )  # fmt: skip
        return out[layer][:, 0]

    return Bound(step, lambda layer: work.states[layer])


def _sglang_verify(spec: LayerSpec) -> Iterator[Variant]:
    path = "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"
    module = importlib.import_module(path)
    for choice in _retiled("fused_sigmoid_gating_delta_rule_update_kernel"):
        label = f"sglang ({choice})" if choice else "sglang"
        yield Variant(label, functools.partial(_bind_sglang_verify, module, choice))


def _bind_sglang_verify(module: Any, choice: Retile | None, work: Work) -> Bound:
    spec = _delta(work)
    kda = isinstance(spec, KDASpec)
    extra = {"is_kda": kda, "lower_bound": _lower_bound(spec)} if kda else {}

    def step(layer: int) -> torch.Tensor:
        token, weights = work.inputs(layer), work.weights[layer]
        with retiled(module, choice):
            y: torch.Tensor = module.fused_sigmoid_gating_delta_rule_update(
                A_log=weights["A_log"], a=token["a"], dt_bias=weights["dt_bias"].flatten(),
                softplus_beta=1.0, softplus_threshold=20.0, q=token["q"], k=token["k"],
                v=token["v"], b=token["b"], initial_state_source=work.states[layer],
                initial_state_indices=work.slots, scale=spec.query_scale,
                use_qk_l2norm_in_kernel=spec.norm == "l2", disable_state_update=True,
                intermediate_states_buffer=work.token_states(layer),
                intermediate_state_indices=work.slots, cache_steps=work.window, **extra,
            )  # fmt: skip
        # It makes its own output, with an axis for parts of K, of which there is one.
        return y.view(work.batch, work.window, spec.heads, spec.dim)

    return Bound(step, functools.partial(last_state, work))


@contextlib.contextmanager
def _triton_only(module: Any) -> Iterator[None]:
    """Keep SGLang's KDA on its Triton kernel: by itself it takes a CUDA kernel where it can."""
    covered = module.covered
    module.covered = lambda *args: False
    try:
        yield
    finally:
        module.covered = covered


# flash-linear-attention -----------------------------------------------------------------------


def _fla_refuses(spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> str | None:
    if not isinstance(spec, KDASpec) and state_dtype is not torch.float32:
        return "state_dtype other than float32; its final states are float32"
    return _refuses(spec, ("sigmoid", "sigmoid2"))


def _fla(spec: LayerSpec) -> Iterator[Variant]:
    kda = isinstance(spec, KDASpec)
    path = "fla.ops.kda" if kda else "fla.ops.gated_delta_rule"
    module = importlib.import_module(f"{path}.fused_recurrent")
    name = "kda" if kda else "gated_delta_rule"
    for choice in _retiled(f"fused_recurrent_{name}_fwd_kernel"):
        label = f"fla ({choice})" if choice else "fla"
        yield Variant(label, functools.partial(_bind_fla, module, choice))


def _bind_fla(module: Any, choice: Retile | None, work: Work) -> Bound:
    spec, out = _delta(work), [o[:, None] for o in work.outputs()]
    after = list(work.states)
    # It copies what is not contiguous, in every call; that is not the kernel's time.
    tokens = [{n: v[:, None].contiguous() for n, v in t.inputs.items()} for t in work.tokens]

    def options(layer: int) -> dict[str, Any]:
        token, weights = tokens[layer], work.weights[layer]
        return {
            "q": token["q"], "k": token["k"], "v": token["v"], "g": token["a"], "beta": token["b"],
            "A_log": weights["A_log"], "dt_bias": weights["dt_bias"].flatten(),
            "scale": spec.query_scale, "initial_state": work.states[layer],
            "output_final_state": True, "use_qk_l2norm_in_kernel": spec.norm == "l2",
            "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": spec.beta == "sigmoid2", "state_v_first": True,
        }  # fmt: skip

    def gdn(layer: int) -> torch.Tensor:
        y, after[layer] = module.fused_recurrent_gated_delta_rule(**options(layer))
        return y[:, 0]  # type: ignore[no-any-return]

    def kda(layer: int) -> torch.Tensor:
        module.fused_recurrent_kda_fwd(
            **options(layer), lower_bound=_lower_bound(spec), inplace_final_state=True,
            ssm_state_indices=work.slots, out=out[layer],
        )  # fmt: skip
        return out[layer][:, 0]

    def step(layer: int) -> torch.Tensor:
        with retiled(module, choice):
            return (kda if isinstance(spec, KDASpec) else gdn)(layer)

    return Bound(step, lambda layer: after[layer])


# FlashInfer -----------------------------------------------------------------------------------


def _flashinfer_refuses(
    spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype
) -> str | None:
    if dtype is torch.float32:
        return "dtype=float32; its kernel takes 16-bit activations"
    if state_dtype is torch.float16:
        return "state_dtype=float16; its kernel keeps float32 or bfloat16"
    if min(spec.dim, spec.state) < 128:
        return f"dim={spec.dim}, state={spec.state}; its kernel serves 128 and more"
    return _refuses(spec, ("sigmoid",))


def _flashinfer(spec: LayerSpec) -> Iterator[Variant]:
    module = importlib.import_module("flashinfer.gdn_decode")
    yield Variant("flashinfer", functools.partial(_bind_flashinfer, module))


def _bind_flashinfer(module: Any, work: Work) -> Bound:
    spec, out = _delta(work), [o[:, None] for o in work.outputs()]
    tokens = [{n: v[:, None] for n, v in t.inputs.items()} for t in work.tokens]

    def step(layer: int) -> torch.Tensor:
        token, weights = tokens[layer], work.weights[layer]
        module.gated_delta_rule_decode_pretranspose(
            token["q"], token["k"], token["v"], None, weights["A_log"], token["a"],
            weights["dt_bias"], token["b"], scale=spec.query_scale, output=out[layer],
            use_qk_l2norm=spec.norm == "l2", initial_state=work.states[layer],
            initial_state_indices=work.slots,
        )  # fmt: skip
        return out[layer][:, 0]

    return Bound(step, lambda layer: work.states[layer])


def _flashinfer_verify(spec: LayerSpec) -> Iterator[Variant]:
    module = importlib.import_module("flashinfer.gdn_decode")
    yield Variant("flashinfer", functools.partial(_bind_flashinfer_verify, module))


def _bind_flashinfer_verify(module: Any, work: Work) -> Bound:
    spec, out = _delta(work), work.outputs()
    wide = work.state_dtype is torch.float32  # its kernels for the two have different names

    def step(layer: int) -> torch.Tensor:
        token, weights = work.inputs(layer), work.weights[layer]
        options = {
            "q": token["q"], "k": token["k"], "v": token["v"], "A_log": weights["A_log"],
            "a": token["a"], "dt_bias": weights["dt_bias"], "b": token["b"],
            "scale": spec.query_scale, "output": out[layer], "use_qk_l2norm": spec.norm == "l2",
            "initial_state": work.states[layer], "initial_state_indices": work.slots,
            "intermediate_states_buffer": work.token_states(layer), "disable_state_update": True,
        }  # fmt: skip
        if wide:
            module.gated_delta_rule_mtp(**options)
        else:
            module.gated_delta_rule_decode_pretranspose(**options, state=None)
        return out[layer]

    return Bound(step, functools.partial(last_state, work))


def _no_states(spec: LayerSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> str | None:
    return "windows; its kernel writes the last token's state alone, so no draft can be dropped"


_SGLANG = Peer("sglang", "sglang", _sglang_refuses, _sglang)
_FLA = Peer("fla", "fla-core", _fla_refuses, _fla)
GDN = (_SGLANG, _FLA, Peer("flashinfer", "flashinfer-python", _flashinfer_refuses, _flashinfer))
KDA = (_SGLANG, _FLA)
_VERIFY = (
    Peer("sglang", "sglang", _sglang_refuses, _sglang_verify),
    Peer("fla", "fla-core", _no_states, _fla),
)
GDN_VERIFIERS = (
    *_VERIFY,
    Peer("flashinfer", "flashinfer-python", _flashinfer_refuses, _flashinfer_verify),
)
KDA_VERIFIERS = _VERIFY
MIXERS = (Peer("sglang", "sglang", _sglang_refuses, functools.partial(_sglang, mixer=True)),)
