"""Which layers recur and which attend: the spellings of a config, old and new."""

from __future__ import annotations

from typing import Literal

from ...errors import InputError
from .fields import Fields

__all__ = ["Kind", "all_of", "check_count", "every_nth_attends", "from_pattern", "listed"]

Kind = Literal["ssm", "attention", "both", "neither"]

# The present names of transformers, and the ones before them that hub configs still carry.
_WORDS: dict[str, Kind] = {
    "linear_attention": "ssm",
    "mamba": "ssm",
    "full_attention": "attention",
    "attention": "attention",
    "hybrid": "both",
    "moe": "neither",
    "mlp": "neither",
}
_PATTERN: dict[str, Kind] = {"M": "ssm", "*": "attention", "E": "neither", "-": "neither"}


def listed(fields: Fields, *names: str, allowed: tuple[Kind, ...]) -> tuple[Kind, ...] | None:
    """The list of layer types under any of `names`, or None where there is none."""
    found, value = fields.raw(*names)
    if value is None:
        return None
    words = [word for word, kind in _WORDS.items() if kind in allowed]
    if not isinstance(value, (list, tuple)) or not value:
        raise InputError(
            f"{found}: got {value!r}; allowed a list of one string a layer; correct the config"
        )
    for layer, word in enumerate(value):
        if word not in words:
            raise InputError(
                f"{found}: got {word!r} for layer {layer}; allowed {', '.join(words)}; "
                "correct the config, or serve this model without replay"
            )
    return tuple(_WORDS[word] for word in value)


def from_pattern(fields: Fields, name: str) -> tuple[Kind, ...] | None:
    """A letter a layer, as Nemotron-H writes its stack."""
    _, value = fields.raw(name)
    if value is None:
        return None
    letters = isinstance(value, str) and value
    strange = sorted(set(value) - set(_PATTERN)) if letters else [value]
    if strange:
        raise InputError(
            f"{name}: got {strange[0]!r}; allowed a string of M (Mamba-2), * (attention), "
            "E (experts) and - (MLP); correct the config"
        )
    return tuple(_PATTERN[letter] for letter in value)


def all_of(kind: Kind, layers: int) -> tuple[Kind, ...]:
    return (kind,) * layers


def every_nth_attends(layers: int, interval: int) -> tuple[Kind, ...]:
    """Attention in layers ``interval - 1``, ``2 interval - 1`` and so on."""
    return tuple("ssm" if (i + 1) % interval else "attention" for i in range(layers))


def check_count(fields: Fields, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Refuse a list of layers that another field contradicts."""
    declared = fields.optional_integer("num_hidden_layers")
    if declared is not None and declared != len(kinds):
        raise InputError(
            f"num_hidden_layers: got {declared} beside a list of {len(kinds)} layers; allowed "
            "their number; correct either"
        )
    return kinds
