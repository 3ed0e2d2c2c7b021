"""Find the launch choice for an operation: a table of measured choices, else a written rule.

A table is ``tables/<device>.json``, the device's name in lower case with underscores. An entry holds for
one operation, shape and format, and for batches up to its own; the largest one holds beyond.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .config import LaunchConfig

__all__ = ["lookup", "rule", "shape_key"]

_Table = dict[str, list[tuple[int, "LaunchConfig | None"]]]


def lookup(op: str, spec: Any, fmt: str, batch: int, device: torch.device) -> LaunchConfig | None:
    """The choice for `op` at a shape and batch bucket.

    Parameters
    ----------
    op : {"fused", "prepass", "readout", "fold", "conv"}
    spec : LayerSpec
        A layer, or its shard: the table has both where both were measured.
    fmt : str
        Checkpoint format.

    Returns
    -------
    LaunchConfig or None
        None only for ``"fused"``: take ``"prepass"`` and ``"readout"`` instead.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower().replace(" ", "_")
        for limit, config in (choices := _table(name).get(shape_key(op, spec, fmt), [])):
            if batch <= limit or limit == choices[-1][0]:
                return config
    return rule(op, spec, fmt, batch)


def rule(op: str, spec: Any, fmt: str, batch: int) -> LaunchConfig | None:
    """A choice that is good, if not best, for any shape on an NVIDIA GPU of the last years."""
    if op == "conv":
        return LaunchConfig(num_warps=4, rows=512 if batch >= 16 else 256)
    if op == "prepass":
        return LaunchConfig(num_warps=2)
    # A thread of a tile holds 128 bytes of state: enough in flight, and few enough registers.
    tile_bytes = spec.state * (4 if fmt == "fp32" else 2)
    if op == "fold":
        return LaunchConfig(num_warps=4, rows=64, programs_per_sm=3, registers=168)
    if op == "fused":
        # Until the programs of the two kernels would fill the machine once.
        return LaunchConfig(num_warps=4, rows=16) if batch * spec.heads <= 1024 else None
    rows = max(1, 8192 // tile_bytes)
    return LaunchConfig(num_warps=2, rows=1 << (rows.bit_length() - 1))


def shape_key(op: str, spec: Any, fmt: str) -> str:
    groups = getattr(spec, "groups", None)
    return f"{op} {spec.heads}x{spec.dim}x{spec.state}/{groups} {fmt}"


@lru_cache
def _table(device: str) -> _Table:
    path = Path(__file__).parent / "tables" / f"{device}.json"
    if not path.exists():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))["choices"]
    return {
        key: [(int(limit), c and LaunchConfig(**c)) for limit, c in choices]
        for key, choices in entries.items()
    }
