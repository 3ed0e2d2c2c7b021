"""The file of a launch table: one device's measured choices, as ``replayinfer tune`` writes them.

::

    {"device": "NVIDIA H200",
     "choices": {"fold mamba2:128x64x128/8 fp32": [[64, {"rows": 64}], [256, {"rows": 32}]]},
     "direct_up_to": {"direct mamba2:128x64x128/8 fp32": 2}}

A key is `shape_key`. Its choices are ``[batch, choice]`` with rising batches; a choice names the
fields of `LaunchConfig` that are not at their default, or is null: not this operation.
``direct_up_to`` has the largest batch at which a direct step was measured to beat replay.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .config import LaunchConfig

__all__ = ["Choices", "Table", "choice_fields", "file_name", "read_table", "shape_key"]

Choices = dict[str, list[tuple[int, "LaunchConfig | None"]]]

_KEY = re.compile(r"\w+ \w+:\d+x\d+x\d+/\d+ \w+")
_DEFAULT = LaunchConfig()


@dataclass(frozen=True)
class Table:
    """What a file says, by `shape_key`."""

    choices: Choices = field(default_factory=dict)
    direct_up_to: dict[str, int] = field(default_factory=dict)


def shape_key(op: str, spec: Any, fmt: str) -> str:
    """``fold mamba2:128x64x128/8 fp32``: heads, dim, state / shared heads of a layer or shard."""
    _, shared = spec.shared_heads
    return f"{op} {spec.family}:{spec.heads}x{spec.dim}x{spec.state}/{shared} {fmt}"


def file_name(device: str) -> str:
    """``nvidia_h200.json`` for a device's name as torch gives it."""
    return re.sub(r"\W+", "_", device.lower()) + ".json"


def choice_fields(choice: LaunchConfig | None) -> dict[str, int] | None:
    """What a file holds of a choice: the fields that are not at their default."""
    if choice is None:
        return None
    fields = dataclasses.asdict(choice)
    return {name: value for name, value in fields.items() if value != getattr(_DEFAULT, name)}


def read_table(path: Path) -> Table:
    """What a file says, checked.

    Raises
    ------
    ValueError
        Not a launch table; the message names the file and what is wrong with it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "choices" not in content:
            raise ValueError("an object without choices")
        return Table(
            {_key(key): _steps(key, steps) for key, steps in content["choices"].items()},
            {_key(key): int(batch) for key, batch in content.get("direct_up_to", {}).items()},
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"launch table: got {path} ({error}); allowed a file as `replayinfer tune` writes it; "
            "write it again or remove it"
        ) from None


def _key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"the key {key!r}, not one like 'fold mamba2:128x64x128/8 fp32'")
    return key


def _steps(key: str, steps: Any) -> list[tuple[int, LaunchConfig | None]]:
    parsed = [(batch, fields and LaunchConfig(**fields)) for batch, fields in steps]
    batches = [batch for batch, _ in parsed]
    chosen = [dataclasses.astuple(choice) for _, choice in parsed if choice]
    if not parsed or any(type(n) is not int for n in (*batches, *sum(chosen, ()))):
        raise ValueError(f"{key!r}, which does not list integers")
    if batches != sorted(set(batches)) or batches[0] < 1:
        raise ValueError(f"{key!r}, whose batches do not rise")
    return parsed
