"""The environment variables that the library reads, each in one place."""

from __future__ import annotations

import os

from .errors import InputError

__all__ = ["checks_enabled"]

_YES, _NO = ("1", "true", "on"), ("", "0", "false", "off")


def checks_enabled() -> bool:
    """``REPLAYINFER_CHECK=1``: guard pages around every pool, and every plan and state checked.

    Read when a pool or wrapper is made. It costs syncs and copies: for finding faults, not for
    serving.
    """
    value = os.environ.get("REPLAYINFER_CHECK", "").strip().lower()
    if value not in _YES + _NO:
        raise InputError(
            f"REPLAYINFER_CHECK: got {value!r}; allowed 1 or 0; set it to one of them or unset it"
        )
    return value in _YES
