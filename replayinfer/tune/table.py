"""Launch tables as files: measured choices merged into what is there already."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .run import Measured, TuneReport

__all__ = ["file_name", "merge_table", "read_content", "render", "write_content"]


def file_name(device: str) -> str:
    """The name that the file of a device must have."""
    from replayinfer.kernels.launch.table import file_name as name_of

    return name_of(device)


def read_content(path: Path, device: str) -> dict[str, Any] | None:
    """What the table of `device` in a file holds, checked; None where there is no file.

    Raises
    ------
    InputError
        The file is something else, or the table of another device.
    """
    from replayinfer.kernels.launch.table import read_table

    if not path.exists():
        return None
    try:
        read_table(path)
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(error)) from None
    _require_device(content, device)
    return content


def merge_table(before: Mapping[str, Any] | None, report: TuneReport) -> dict[str, Any]:
    """The content of `before` with the choices of `report` in place of older ones.

    An entry is replaced where operation, shape, format and batch are the same; all others stay.

    Raises
    ------
    InputError
        `before` is the table of another device.
    """
    before = before or {}
    _require_device(before, report.device)
    runs = [*before.get("runs", ()), report.header()]
    content = {"device": report.device, **before, "runs": runs}
    content["choices"] = _merge_choices(before.get("choices", {}), report.measured)
    limits = {**before.get("direct_up_to", {}), **report.direct_up_to}
    content["direct_up_to"] = dict(sorted(limits.items()))
    return content


def _require_device(content: Mapping[str, Any], device: str) -> None:
    if content.get("device", device) != device:
        raise InputError(
            f"out: got a table of {content['device']!r}; allowed one of {device!r}, which is "
            "measured; name another file"
        )


def _merge_choices(
    before: Mapping[str, list[list[Any]]], measured: Iterable[Measured]
) -> dict[str, list[list[Any]]]:
    """Every measured batch stays an entry of its own, so that a later run can replace just it."""
    from replayinfer.kernels.launch.table import choice_fields

    merged = {key: dict(steps) for key, steps in before.items()}
    for entry in measured:
        merged.setdefault(entry.key, {})[entry.batch] = choice_fields(entry.choice)
    return {key: [[b, merged[key][b]] for b in sorted(merged[key])] for key in sorted(merged)}


def render(content: Mapping[str, Any]) -> str:
    """The text of a file: one line a key of the choices, so that changes are easy to see."""
    parts = []
    for name, value in content.items():
        if name in ("choices", "direct_up_to", "runs") and value:
            entries = value.items() if isinstance(value, Mapping) else ((None, v) for v in value)
            lines = [
                "    " + (f"{json.dumps(key)}: " if key is not None else "") + json.dumps(entry)
                for key, entry in entries
            ]
            opening, closing = "{}" if isinstance(value, Mapping) else "[]"
            text = opening + "\n" + ",\n".join(lines) + "\n  " + closing
        else:
            text = json.dumps(value)
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Write a table; a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(render(content), encoding="utf-8")
    os.replace(part, path)
