"""Run an unmodified `transformers` hybrid model with replay in place of its own state update.

Ways in:

* `ReplayCache` is a `transformers` cache: pass it to ``model.generate`` or ``model(...)``.
* `ReplayEngine` serves many sequences with one model: prefill, step, fork, preempt, resume, free,
  and verify windows of drafts, as a `replayinfer.SpeculativeSession` wants it.
* `assisted_generate` is ``model.generate`` with drafts by a small model.

Both leave the prefill to the model and seed a `replayinfer.StatePool` with its final state. The
seams are those of the peer: its cache classes, and the functions that its mixers look up in their
own module (`install` and `uninstall` say what is replaced there). Importing this package does not
import `transformers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assisted import CroppingDrafter, ModelDrafter, assisted_decoding, assisted_generate
    from .cache import ReplayCache
    from .dispatch import install, uninstall
    from .engine import ParkedSequence, ReplayEngine
    from .families import FAMILIES, Family, ModelBinding, describe, unsupported_reason

__all__ = [
    "FAMILIES",
    "CroppingDrafter",
    "Family",
    "ModelBinding",
    "ModelDrafter",
    "ParkedSequence",
    "ReplayCache",
    "ReplayEngine",
    "assisted_decoding",
    "assisted_generate",
    "describe",
    "install",
    "uninstall",
    "unsupported_reason",
]

_HOME = {
    "CroppingDrafter": "assisted",
    "FAMILIES": "families",
    "Family": "families",
    "ModelBinding": "families",
    "ModelDrafter": "assisted",
    "ParkedSequence": "engine",
    "ReplayCache": "cache",
    "ReplayEngine": "engine",
    "assisted_decoding": "assisted",
    "assisted_generate": "assisted",
    "describe": "families",
    "install": "dispatch",
    "uninstall": "dispatch",
    "unsupported_reason": "families",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
