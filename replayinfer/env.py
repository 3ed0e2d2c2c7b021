"""The environment variables that the library reads, each in one place."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InputError

__all__ = ["checks_enabled", "launch_tables"]

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


def launch_tables() -> Path | None:
    """``REPLAYINFER_LAUNCH_TABLES=<folder>``: launch tables to prefer to those that are shipped.

    One file per device, as ``replayinfer tune`` writes them, e.g. ``nvidia_h200.json``. Read when
    the Triton backend is made.
    """
    value = os.environ.get("REPLAYINFER_LAUNCH_TABLES", "").strip()
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"REPLAYINFER_LAUNCH_TABLES: got {value!r}; allowed a folder that exists; make it with "
            "replayinfer tune --out, or unset it"
        )
    return folder
