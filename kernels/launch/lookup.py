"""Find the launch choice for an operation: a table of measured choices, else a written rule.

A table is ``tables/<device>.json``, the device's name in lower case with underscores. An entry is
for one operation, shape and format, and for batches up to its own; the largest one holds beyond.
Beside them, ``direct_up_to`` has by shape and format the largest batch bucket at which a direct
step was measured to beat replay. Tables of a folder that `use_tables` names come first, key by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .config import LaunchConfig
from .table import Choices, Table, file_name, read_table, shape_key

__all__ = ["forced", "lookup", "prefers_direct", "rule", "shape_key", "use_tables"]

_SHIPPED = Path(__file__).parent / "tables"
_folders = [_SHIPPED]  # the first that has a key decides
_NOTHING: Mapping[str, LaunchConfig | None] = MappingProxyType({})
_forced: ContextVar[tuple[Mapping[str, LaunchConfig | None], set[str] | None]] = ContextVar(
    "forced", default=(_NOTHING, None)
)


def lookup(op: str, spec: Any, fmt: str, batch: int, device: torch.device) -> LaunchConfig | None:
    """The choice for `op` at a shape and batch bucket.

    Parameters
    ----------
    op : {"fused", "prepass", "readout", "fold", "fold32", "fold64", "conv", "direct", \
            "verify", "verify64", "verify_prepass", "compact", "conv_prepass", "conv_readout"}
    spec : LayerSpec
        A layer, or its shard: the table has both where both were measured.
    fmt : str
        Checkpoint format.

    Returns
    -------
    LaunchConfig or None
        None only for ``"fused"``: take ``"prepass"`` and ``"readout"`` instead.
    """
    forced, asked = _forced.get()
    if asked is not None:
        asked.add(op)
    if op in forced:
        return forced[op]
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for limit, config in (choices := _table(name).get(shape_key(op, spec, fmt), [])):
            if batch <= limit or limit == choices[-1][0]:
                return config
    return rule(op, spec, fmt, batch)


def prefers_direct(spec: Any, fmt: str, batch: int, device: torch.device) -> bool:
    """Whether a batch bucket of a shape is faster without replay; not where nobody measured it.

    This is apart from the launch choice of ``"direct"``, which always exists: a caller may ask for
    direct steps whether or not they pay.
    """
    if device.type != "cuda":
        return False
    limits = _direct_limits(torch.cuda.get_device_name(device))
    return batch <= limits.get(shape_key("direct", spec, fmt), 0)


def rule(op: str, spec: Any, fmt: str, batch: int) -> LaunchConfig | None:
    """A choice for any shape, from what held for every shape that was measured on an H200.

    - prepass of a delta rule: one warp, which repeats the least, except where few programs run;
    - fused: only where the programs of the two other kernels would not reach every multiprocessor;
    - readout: 16 KB of state to a warp where there is enough work or the state is float32, else
      8 KB; blocks that leave no more than a fifth of a program idle;
    - fold: tiles of 64 x 64 in the matrix units' own order, which needs 16 rows to a warp, and as
      many programs as the registers of a multiprocessor hold;
    - fold64, one of more than 32 rows (not measured): smaller tiles, that the rows may fit;
    - fold of a delta rule (fold32 is one of more than 16 rows): the same order, and as many
      programs as the registers hold without a spill; no columns: gates per channel that solve, by
      the kernel that takes all of them at once;
    - direct (not measured): 4 KB of float32 state to a warp, and two warps;
    - verify: one warp, whose operands need no shared memory, and 16 KB of state where there is
      enough work, else 8 KB; verify64, over more than 32 rows: two warps for the same, whose
      operands leave one warp too few registers;
    - verify of a delta rule (not measured): 16 KB of state to a warp where there is enough work and
      the operands leave the registers, else half;
    - compact (not measured): 8 KB of a row;
    - conv: four warps and 256 channels to a program;
    - conv_prepass: four warps to a key head of a sequence where batch x heads (of values) is at
      most 256, or (not measured) where two would not have the registers for its channels, else two;
    - conv_readout: one warp to a program and up to 8 KB of a 16-bit plane, or 16 KB of float32
      state, in any batch, since operands that arrive late leave registers for no more; at most 64
      rows, and blocks as in the readout.
    """
    if op in ("verify", "verify64", "verify_prepass") and spec.family != "mamba2":
        return _delta_verify(op, spec, fmt, batch)
    if op == "verify_prepass":
        return LaunchConfig(num_warps=1, rows=32)
    if op in ("verify", "verify64"):
        if fmt == "fp32" or spec.state > 128:
            return LaunchConfig(num_warps=1, rows=32 if spec.state <= 128 else 16)
        if spec.dim % 64 or batch * spec.heads < 4096:
            return LaunchConfig(num_warps=1, rows=32)
        return LaunchConfig(num_warps=1 if op == "verify" else 2, rows=64)
    if op == "compact":
        return LaunchConfig(num_warps=4, rows=1024)
    if op == "conv":
        return LaunchConfig(num_warps=4, rows=256)
    if op == "conv_prepass":
        few, wide = batch * spec.heads <= 256, False
        if spec.family == "gdn":  # only there it is launched
            wide = 2 * spec.state + spec.heads // spec.key_heads * spec.dim > 2048
        return LaunchConfig(num_warps=4 if few or wide else 2)
    if op == "prepass" and spec.family != "mamba2":
        if batch * spec.heads <= 256:
            return LaunchConfig(num_warps=4, rows=16)
        return LaunchConfig(num_warps=1, rows=8)  # of the history, where gates are per channel
    if op == "prepass":
        return LaunchConfig(num_warps=2 if batch * spec.heads >= 4096 else 1)
    if op == "fused":
        small = batch * spec.heads * (1 if spec.family == "mamba2" else spec.dim / 64) <= 128
        return LaunchConfig(num_warps=4, rows=32) if small else None
    if op in ("fold", "fold32") and spec.family != "mamba2":
        return _delta_fold(op, spec, fmt)
    if op == "fold64":
        if spec.dim % 64 == 0:
            return LaunchConfig(rows=64, columns=32, heads=2, programs_per_sm=4, registers=128)
        return LaunchConfig(num_warps=1, rows=16, columns=64, heads=4, programs_per_sm=8)
    if op == "fold":
        if spec.dim % 64 == 0:
            return LaunchConfig(rows=64, columns=64, heads=2, programs_per_sm=4, registers=128)
        return LaunchConfig(
            num_warps=1, rows=16, columns=128, heads=4, programs_per_sm=12, registers=168
        )
    many = batch * spec.heads > 4096 and op != "conv_readout"
    warps = 1
    rows = (16384 if many or fmt == "fp32" else 8192) // (spec.state * (4 if fmt == "fp32" else 2))
    if op == "direct":
        warps, rows = 2, 2048 // spec.state
    rows = 1 << max(rows, 1).bit_length() - 1
    if spec.family != "mamba2":
        rows = min(rows, 64)  # two sums to each row: more would not fit into registers
    while rows > 16 and -(-spec.dim // rows) * rows > 1.25 * spec.dim:
        rows //= 2
    return LaunchConfig(num_warps=warps, rows=rows)


def _delta_fold(op: str, spec: Any, fmt: str) -> LaunchConfig:
    if spec.dim % 64:
        return LaunchConfig(num_warps=1, rows=16, columns=32, programs_per_sm=8)
    if spec.family == "kda" and fmt == "fp32_split" and op == "fold" and spec.state <= 128:
        return LaunchConfig(programs_per_sm=2)
    if spec.family == "kda" or spec.state > 128:
        return LaunchConfig(rows=64, columns=32, programs_per_sm=2)
    if fmt != "fp32_split":  # nothing to solve
        programs, registers = (3, 168) if fmt == "fp32" else (4, 128)
        return LaunchConfig(rows=64, columns=64, programs_per_sm=programs, registers=registers)
    if op == "fold32":
        return LaunchConfig(rows=64, columns=32, programs_per_sm=2)
    return LaunchConfig(rows=64, columns=32, programs_per_sm=3, registers=168)


def _delta_verify(op: str, spec: Any, fmt: str, batch: int) -> LaunchConfig:
    if op == "verify_prepass":
        return LaunchConfig(num_warps=1, registers=168 if spec.family == "gdn" else 0)
    if spec.dim <= 32:
        return LaunchConfig(num_warps=1, rows=16)
    if spec.family == "gdn" and fmt in ("fp32_split", "bf16"):
        return LaunchConfig(num_warps=1, rows=64 if batch * spec.heads > 4096 else 32)
    return LaunchConfig(num_warps=2, rows=32 if fmt == "fp32" else 64)


@contextmanager
def forced(**choices: LaunchConfig | None) -> Iterator[set[str]]:
    """Within it `lookup` answers these for their operations, in this thread: a tuner tries them.

    Yields the operations that were looked up, as a set that grows.
    """
    asked: set[str] = set()
    token = _forced.set(({**_forced.get()[0], **choices}, asked))
    try:
        yield asked
    finally:
        _forced.reset(token)


def use_tables(folder: Path | None) -> None:
    """Prefer the tables of `folder` to those that are shipped; None goes back to these alone."""
    folders = [_SHIPPED] if folder is None else [folder, _SHIPPED]
    if folders == _folders:
        return
    _folders[:] = folders
    for read in (_tables, _table, _direct_limits):
        read.cache_clear()


@lru_cache
def _table(device: str) -> Choices:
    return {key: steps for table in _tables(device) for key, steps in table.choices.items()}


@lru_cache
def _direct_limits(device: str) -> dict[str, int]:
    return {key: batch for table in _tables(device) for key, batch in table.direct_up_to.items()}


@lru_cache
def _tables(device: str) -> list[Table]:
    """Those of every folder that has one for `device`; the last that has a key decides."""
    paths = (folder / file_name(device) for folder in reversed(_folders))
    return [read_table(path) for path in paths if path.exists()]
