"""Which models are served: one table entry per architecture, read by everything else here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from replayinfer import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, UnsupportedError

from . import peer

__all__ = ["FAMILIES", "Family", "Kind", "ModelBinding", "describe", "unsupported_reason"]


@dataclass(frozen=True)
class Kind:
    """What all models of one recurrence share.

    Attributes
    ----------
    spec, weights
        Read a mixer module: its `LayerSpec`, and the tensors that `StatePool.bind` takes.
    routes : mapping of str to str
        Function that the mixer looks up in its module, and the route of `dispatch` that stands in.
    layout : {"vk", "kv"}
        Order of the last two dimensions of the state that the peer's functions take and return.
    """

    spec: Callable[[Any], LayerSpec]
    weights: Callable[[Any], dict[str, torch.Tensor | None]]
    routes: Mapping[str, str]
    layout: Literal["vk", "kv"]


@dataclass(frozen=True)
class Family:
    """One architecture of the peer.

    Attributes
    ----------
    model_type : str
        ``config.model_type`` of the text model.
    mixer : str
        Class of its recurrent layers.
    kind : Kind
        Their recurrence.
    mixes_rows : str
        A flag of the mixer with which the peer's own decode mixes the sequences of a batch; such a
        model is served one sequence at a time.
    """

    model_type: str
    mixer: str
    kind: Kind
    mixes_rows: str = ""


@dataclass(frozen=True)
class ModelBinding:
    """A model that can be served, taken apart.

    Attributes
    ----------
    model : torch.nn.Module
    family : Family
    spec : LayerSpec
        Shared by all recurrent layers.
    mixers : dict of int to torch.nn.Module
        By model layer index, in the order in which a forward reaches them.
    module : ModuleType
        Where the mixers look their functions up.
    cache_argument : str
        What the model calls its cache; pass it to ``generate`` by this name.
    """

    model: Any
    family: Family
    spec: LayerSpec
    mixers: dict[int, Any]
    module: ModuleType
    cache_argument: str

    @property
    def layers(self) -> list[int]:
        return list(self.mixers)

    def check_batch(self, sequences: int) -> None:
        """Refuse several sequences where the peer would mix them."""
        flag = self.family.mixes_rows
        if sequences > 1 and flag and any(getattr(m, flag) for m in self.mixers.values()):
            raise UnsupportedError(
                f"sequences: got {sequences} for {self.family.model_type} with {flag}=True; "
                "allowed 1, since transformers mixes the rows of a batch there when it decodes; "
                "serve one at a time (batch=1, max_sequences=1)"
            )


def _mamba2_spec(mixer: Any) -> Mamba2Spec:
    return Mamba2Spec(
        heads=mixer.num_heads,
        dim=mixer.head_dim,
        state=mixer.ssm_state_size,
        groups=mixer.n_groups,
        # The peer clamps dt in its chunked prefill; its decode step, which this replaces, does not.
        dt_limit=(0.0, float("inf")),
        conv_width=mixer.conv_kernel_size,
    )


def _mamba2_weights(mixer: Any) -> dict[str, torch.Tensor | None]:
    return {
        "A": -torch.exp(mixer.A_log.detach().float()),
        "D": mixer.D.detach(),
        "dt_bias": mixer.dt_bias.detach(),
        **_conv_weights(mixer),
    }


def _gdn_spec(mixer: Any) -> GDNSpec:
    return GDNSpec(
        heads=mixer.num_v_heads,
        key_heads=mixer.num_k_heads,
        dim=mixer.head_v_dim,
        state=mixer.head_k_dim,
        # The mixer forms the gate and beta itself and leaves the normalisation to the function.
        gate="log",
        beta="given",
        norm="l2",
        norm_eps=1e-6,
        conv_width=mixer.conv_kernel_size,
    )


def _kda_spec(mixer: Any) -> KDASpec:
    return KDASpec(
        heads=mixer.num_heads,
        key_heads=mixer.num_heads,
        dim=mixer.head_dim,
        state=mixer.head_dim,
        # As above; its softplus is exactly 0 below -16.6, where ours is not.
        gate="log",
        beta="given",
        norm="l2",
        norm_eps=1e-6,
        conv_width=mixer.conv_kernel_size,
    )


def _conv_weights(mixer: Any) -> dict[str, torch.Tensor | None]:
    bias = mixer.conv1d.bias
    return {
        "conv_weight": mixer.conv1d.weight.detach().squeeze(1),
        "conv_bias": None if bias is None else bias.detach(),
    }


_MAMBA2 = Kind(
    spec=_mamba2_spec,
    weights=_mamba2_weights,
    routes={
        "causal_conv1d_update": "conv_step",
        "causal_conv1d_fn": "conv_window",
        "mamba2_selective_state_update": "mamba2_step",
        "mamba2_chunk_scan": "mamba2_chunk",
    },
    layout="vk",
)
_GDN = Kind(
    spec=_gdn_spec,
    weights=_conv_weights,
    routes={
        "causal_conv1d_update": "conv_step",
        "causal_conv1d_fn": "conv_window",
        "torch_recurrent_gated_delta_rule": "delta_step",
        "torch_chunk_gated_delta_rule": "delta_chunk",
    },
    layout="kv",
)
_KDA = Kind(
    spec=_kda_spec,
    weights=_conv_weights,
    routes={
        "causal_conv1d_update": "conv_step",
        "causal_conv1d_fn": "conv_window",
        "recurrent_kimi_delta_attention": "delta_step",
        "chunk_kimi_delta_attention": "delta_chunk",
    },
    layout="kv",
)

FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("nemotron_h", "NemotronHMamba2Mixer", _MAMBA2),
        Family("bamba", "BambaMixer", _MAMBA2),
        Family("mamba2", "Mamba2Mixer", _MAMBA2),
        Family("falcon_h1", "FalconH1Mixer", _MAMBA2, mixes_rows="mamba_rms_norm"),
        Family("granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA2),
        Family("zamba2", "Zamba2MambaMixer", _MAMBA2),
        Family("qwen3_next", "Qwen3NextGatedDeltaNet", _GDN),
        Family("qwen3_5_text", "Qwen3_5GatedDeltaNet", _GDN),
        Family("qwen3_5_moe_text", "Qwen3_5MoeGatedDeltaNet", _GDN),
        Family("olmo_hybrid", "OlmoHybridGatedDeltaNet", _GDN),
        Family("kimi_linear", "KimiLinearDeltaAttention", _KDA),
    )
}
"""Served architectures by ``config.model_type``."""

# Mamba2 has a name of its own, and newer versions of the peer a shorter one for all.
_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "cache")


def describe(model: Any) -> ModelBinding:
    """Take a model apart for replay.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model of one of `FAMILIES`.

    Raises
    ------
    UnsupportedError
        The installed version, the architecture, or something about this model cannot be served.
    """
    peer.load()
    config = _text_config(model)
    model_type = getattr(config, "model_type", type(model).__name__)
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(
            f"model: got model_type={model_type!r}; allowed {', '.join(FAMILIES)}; "
            "use the model's own cache, or add an entry to FAMILIES"
        )
    found = [m for m in model.modules() if type(m).__name__ == family.mixer]
    mixers = {int(m.layer_idx): m for m in sorted(found, key=lambda m: int(m.layer_idx))}
    if not mixers:
        raise UnsupportedError(
            f"model: got {model_type} without a {family.mixer}; allowed at least one recurrent "
            "layer; use the model's own cache"
        )
    for layer, mixer in mixers.items():
        if mixer.activation not in ("silu", "swish"):
            raise UnsupportedError(
                f"activation: got {mixer.activation!r} in layer {layer}; allowed 'silu' after the "
                "convolution; use the model's own cache"
            )
    specs = {layer: family.kind.spec(mixer) for layer, mixer in mixers.items()}
    spec = next(iter(specs.values()))
    if other := [layer for layer, s in specs.items() if s != spec]:
        raise UnsupportedError(
            f"model: got recurrent layers {other} of another shape; allowed one shape for all; "
            "use the model's own cache"
        )
    module = sys.modules[type(next(iter(mixers.values()))).__module__]
    return ModelBinding(model, family, spec, mixers, module, _cache_argument(model))


def unsupported_reason(model: Any) -> str | None:
    """Why `describe` would refuse `model`, or None where it would not."""
    try:
        describe(model)
    except UnsupportedError as error:
        return str(error)
    return None


def _cache_argument(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), _CACHE_ARGUMENTS[0])


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    reader = getattr(config, "get_text_config", None)
    return reader(decoder=True) if reader else config
