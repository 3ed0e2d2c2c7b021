"""Importing `transformers`: which versions are served, and a namesake to keep it away from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from replayinfer import UnsupportedError

__all__ = ["load"]

_OLDEST = (5, 17)


def load() -> ModuleType:
    """The `transformers` module.

    Raises
    ------
    UnsupportedError
        It is missing or too old; the message says what to install.
    """
    hidden = _shadows_hub_package()
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        peer = importlib.import_module("transformers")
        if hidden:
            # Asked once and remembered by the peer: the hub package is not there.
            importlib.import_module("transformers.utils").is_kernels_available()
    except ImportError:
        raise UnsupportedError(
            "transformers: got no installation; allowed 5.17 or newer; "
            "pip install 'replayinfer[transformers]'"
        ) from None
    finally:
        if hidden:
            del sys.modules["kernels"]
    parts = tuple(int(p) for p in peer.__version__.split(".")[:2] if p.isdigit())
    if parts < _OLDEST:
        raise UnsupportedError(
            f"transformers: got {peer.__version__}; allowed 5.17 or newer; "
            "pip install 'replayinfer[transformers]'"
        )
    return peer


def _shadows_hub_package() -> bool:
    """Whether ``import kernels`` would find this library's own folder of that name.

    It does where the repository's root is on ``sys.path`` (``python -m …`` there). The peer then
    takes the folder for the hub's package `kernels`, which it probes for.
    """
    if "kernels" in sys.modules:
        return False
    ours = importlib.util.find_spec("replayinfer.kernels")
    found = importlib.util.find_spec("kernels")
    if ours is None or found is None or not ours.origin or not found.origin:
        return False
    return Path(ours.origin).resolve() == Path(found.origin).resolve()
