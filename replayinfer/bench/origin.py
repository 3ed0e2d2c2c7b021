"""Of which code, and when, a result was measured."""

from __future__ import annotations

import datetime
import subprocess

__all__ = ["commit", "now"]


def commit() -> str:
    """Of the repository that the command ran in; ``unknown`` outside of one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def now() -> str:
    """ISO 8601, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
