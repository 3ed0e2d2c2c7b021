"""Find the launch choice for an operation: a table of measured choices, else a written rule.

A table is ``tables/<device>.json``, the device's name in lower case with underscores. An entry is
for one operation, shape and format, and for batches up to its own; the largest one holds beyond.
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
    """A choice for any shape, from what held for every shape that was measured on an H200.

    - fused: only where the programs of the two other kernels would not reach every multiprocessor;
    - readout: 16 KB of state to a warp where there is enough work, else 8 KB; blocks that leave no
      more than a fifth of a program idle;
    - fold: tiles of 64 x 64 in the matrix units' own order, which needs 16 rows to a warp, and as
      many programs as the registers of a multiprocessor hold.
    """
    if op == "conv":
        return LaunchConfig(num_warps=4, rows=512 if batch >= 16 else 256)
    if op == "prepass":
        return LaunchConfig(num_warps=2 if batch * spec.heads >= 4096 else 1)
    if op == "fused":
        return LaunchConfig(num_warps=4, rows=32) if batch * spec.heads <= 128 else None
    if op == "fold":
        if spec.dim % 64 == 0:
            return LaunchConfig(rows=64, columns=64, heads=2, programs_per_sm=4, registers=128)
        return LaunchConfig(
            num_warps=1, rows=16, columns=128, heads=4, programs_per_sm=12, registers=168
        )
    many = batch * spec.heads > 4096
    rows = (16384 if many or fmt == "fp32" else 8192) // (spec.state * (4 if fmt == "fp32" else 2))
    rows = 1 << max(rows, 1).bit_length() - 1
    while rows > 16 and -(-spec.dim // rows) * rows > 1.25 * spec.dim:
        rows //= 2
    return LaunchConfig(num_warps=1, rows=rows)


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
