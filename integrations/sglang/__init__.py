"""Decode the recurrent layers of an SGLang server by replay, with one flag and no patched file.

``sglang serve --model-path … --linear-attn-decode-backend replayinfer``

`register` is the entry point that SGLang's plugin loader calls in each of its processes. It adds
the choice and one hook; everything else happens only where the flag says ``replayinfer``:

* `arguments` refuses what is not served, before a process is started;
* `layers` reads the recurrent layers of a loaded model;
* `slots.SlotReplay` keeps input pages and cursors beside SGLang's state slots, which are our
  checkpoint pages;
* `backends` are subclasses of SGLang's own GDN, KDA and Mamba-2 backends.

Importing this package does not import `sglang`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import Options
    from .plugin import SUPPORTED_VERSION, register
    from .slots import SlotReplay

__all__ = ["SUPPORTED_VERSION", "Options", "SlotReplay", "register"]

_HOME = {
    "Options": "options",
    "SUPPORTED_VERSION": "plugin",
    "SlotReplay": "slots",
    "register": "plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
