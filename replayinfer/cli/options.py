"""Options that several commands share: what they accept, and what they say to the rest."""

from __future__ import annotations

import shlex
import sys

from replayinfer import InputError, LayerSpec, read_config

from ..spec.hf import ModelLayers
from ..spec.presets import find_preset

__all__ = ["command_line", "integers", "one_kind", "one_spec"]


def one_spec(model: str, family: str | None) -> LayerSpec:
    """The one shape of recurrent layers of a preset or config."""
    return one_kind(model, family)[1]


def one_kind(model: str, family: str | None) -> tuple[ModelLayers, LayerSpec]:
    """The layers of a preset or config, and the one shape of those that are recurrent."""
    preset = find_preset(model)
    layers = preset.read() if preset else read_config(model)
    specs = {spec for spec in layers.ssm.values() if family in (None, spec.family)}
    if len(specs) != 1:
        kinds = sorted({s.family for s in layers.ssm.values()}) or ["none"]
        raise InputError(
            f"family: got {family!r} for {model}, whose recurrent layers are {', '.join(kinds)}; "
            "allowed one kind of layer; name it with --family"
        )
    (spec,) = specs
    return layers, spec


def integers(option: str, text: str) -> list[int]:
    """``"1,32"`` as [1, 32]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise InputError(
            f"{option}: got {text!r}; allowed integers >= 1, comma-separated; e.g. 1,32,256"
        )
    return values


def command_line(command: str) -> str:
    """How this process was called, as a report says it."""
    given = sys.argv[2:] if sys.argv[1:2] == [command] else []
    return "replayinfer " + shlex.join([command, *given])
