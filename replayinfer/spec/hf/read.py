"""From a Hugging Face config, in any of its forms, to `ModelLayers`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError, UnsupportedError
from . import delta, mamba2
from .fields import Fields
from .layers import ModelLayers
from .parts import Parts

__all__ = ["MODEL_TYPES", "read_config"]

MODEL_TYPES: dict[str, Callable[[Fields], Parts]] = {
    "nemotron_h": mamba2.nemotron_h,
    "bamba": mamba2.bamba,
    "mamba2": mamba2.mamba2,
    "falcon_h1": mamba2.falcon_h1,
    "granitemoehybrid": mamba2.granitemoehybrid,
    "zamba2": mamba2.zamba2,
    "qwen3_next": delta.qwen3_next,
    "qwen3_5": delta.qwen3_5,
    "qwen3_5_text": delta.qwen3_5,
    "qwen3_5_moe": delta.qwen3_5_moe,
    "qwen3_5_moe_text": delta.qwen3_5_moe,
    "olmo_hybrid": delta.olmo_hybrid,
    "kimi_linear": delta.kimi_linear,
}
"""What `read_config` reads, by ``model_type``."""

_TEXT_CONFIGS = ("text_config", "llm_config")  # where a multimodal config keeps its text model


def read_config(config: Any) -> ModelLayers:
    """Read which layers of a model are recurrent, which attend, and with what shapes.

    Absent fields have the defaults of the model's own class in transformers 5.17, which need not be
    installed; the names that older hub configs use are understood.

    Parameters
    ----------
    config : mapping, path or configuration object
        The contents of a ``config.json``; the path of one, or of a folder that holds one; or a
        transformers configuration. A multimodal config is read for its text model.

    Raises
    ------
    UnsupportedError
        The `model_type` is none of `MODEL_TYPES`, or its layers do something that no
        `LayerSpec` says.
    InputError
        There is no such file, or a field is missing, wrong, or at odds with another.

    Examples
    --------
    >>> model = read_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"})
    >>> model.layer_map, model.spec.state_shape
    ('M-M*', (128, 64, 128))
    """
    outer = _values(config)
    values, model_type = outer, outer.get("model_type")
    for name in _TEXT_CONFIGS:
        if (inner := outer.get(name)) is not None:
            values = _values(inner, name)
            model_type = values.get("model_type") or model_type
            break
    if not isinstance(model_type, str):
        raise InputError(
            f"model_type: got {model_type!r}; allowed {', '.join(MODEL_TYPES)}; "
            "pass the config.json of a model"
        )
    reader = MODEL_TYPES.get(model_type)
    if reader is None:
        raise UnsupportedError(
            f"model_type: got {model_type!r}; allowed {', '.join(MODEL_TYPES)}; "
            "make a LayerSpec from the model's own config"
        )
    fields = Fields(values)
    parts = reader(fields)
    names = ("dtype", "torch_dtype")
    return ModelLayers(
        model_type=model_type,
        layers=len(parts.kinds),
        ssm={i: parts.ssm for i, k in enumerate(parts.kinds) if k in ("ssm", "both")},
        attention={
            i: parts.attention
            for i, k in enumerate(parts.kinds)
            if parts.attention and k in ("attention", "both")
        },
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        dtype=fields.dtype(*names) or Fields(outer).dtype(*names),
        state_dtype=parts.state_dtype,
        conv_bias=parts.conv_bias,
        gate_in_readout=parts.gate_in_readout,
        notes=(*parts.notes, *_window_note(fields)),
    )


def _window_note(fields: Fields) -> tuple[str, ...]:
    """None of the classes slides a window, whatever its config says."""
    _, window = fields.raw("sliding_window")
    if not window or fields.raw("use_sliding_window")[1] is False:
        return ()
    return (f"sliding_window={window}: not used by the model's class, and not counted here",)


def _values(config: Any, name: str = "config") -> Mapping[str, Any]:
    """The fields of a config in any of its forms."""
    if isinstance(config, (str, os.PathLike)):
        return _load(Path(config))
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    if not isinstance(config, Mapping):
        raise InputError(
            f"{name}: got {type(config).__name__}; allowed a mapping, a path or a configuration "
            "object; pass one of them"
        )
    return config


def _load(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"config: got {str(path)!r}; allowed a config.json or a folder that holds one; "
            "correct the path"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"config: got {str(file)!r}, which cannot be read ({error}); allowed a JSON file; "
            "correct it"
        ) from error
    if not isinstance(values, Mapping):
        raise InputError(
            f"config: got {str(file)!r} with a {type(values).__name__} in it; allowed a JSON "
            "object; correct it"
        )
    return values
