"""A sequence outside its pool: everything that continues it, with a header that says what it is.

A snapshot holds the checkpoint as stored (so an fp32 recurrence stays exact), the rows after it and
the pre-convolution rows, on the host. Importing it into a pool of the same description gives a
sequence that continues with the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checks import dtype_name
from ..errors import InputError
from .cursors import SequenceId

if TYPE_CHECKING:
    from .pool import StatePool

__all__ = [
    "LAYOUT_VERSION",
    "SequenceSnapshot",
    "describe_pool",
    "export_sequence",
    "import_sequence",
]

LAYOUT_VERSION = 1

_MOST_TOKENS = 1 << 62  # a cursor is an int64


@dataclass(frozen=True)
class SequenceSnapshot:
    """One sequence's state and what it belongs to.

    Attributes
    ----------
    header : dict
        Family, every field of the spec, layers, format, dtype, capacity, restore, layout version;
        and ``tokens`` (all committed), ``history`` (rows after the checkpoint).
    tensors : dict of str to Tensor
        On the CPU: ``checkpoint`` (bit patterns as stored), ``rows.<field>``
        ``[layers, history, ...]``, ``conv`` ``[layers, rows, channels]``, oldest first.
    """

    header: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def tokens(self) -> int:
        return int(self.header["tokens"])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def describe_pool(pool: StatePool) -> dict[str, Any]:
    """What must be equal in a pool for a snapshot of it to mean the same there."""
    spec = {f.name: _plain(getattr(pool.spec, f.name)) for f in dataclasses.fields(pool.spec)}
    return {
        "layout_version": LAYOUT_VERSION,
        "family": pool.spec.family,
        "spec": spec,
        "layers": list(pool.layers),
        "format": pool.format.name,
        "dtype": dtype_name(pool.dtype),
        "capacity": pool.capacity,
        "restore": pool.restore,
    }


def _plain(value: Any) -> Any:
    """As JSON has it, so that a header from a file compares equal; JSON has no infinity."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def export_sequence(pool: StatePool, sequence: int) -> SequenceSnapshot:
    """Copy everything that continues a sequence to the host; the pool is not changed."""
    slot = pool.cursors.one(sequence)
    pool.refresh(slot)
    cur = pool.cursors
    base, history = int(cur.base[slot]), int(cur.history[slot])
    row = np.arange(history)
    page, offset = (pool.device_ids(x) for x in _places(pool, slot, row))
    tensors = {f"rows.{name}": f[:, page, offset].cpu() for name, f in pool.inputs.fields.items()}
    tensors["checkpoint"] = pool.checkpoints.storage[:, int(cur.checkpoint[slot])].cpu().clone()
    tensors["conv"] = pool.conv.rows[:, slot, _ring(pool, base, history)].cpu()
    header = describe_pool(pool) | {"tokens": base + history, "history": history}
    return SequenceSnapshot(header, tensors)


def import_sequence(pool: StatePool, snapshot: SequenceSnapshot) -> SequenceId:
    """Start a sequence from a snapshot.

    Raises
    ------
    InputError
        The snapshot describes another family, size, type, format, capacity or layout, or its
        tensors do not fit its own header; the message names every difference.
    CapacityError
        The pool has no slot, checkpoint page or input pages for it.
    """
    _check(pool, snapshot)
    history = int(snapshot.header["history"])
    base = snapshot.tokens - history
    pages = -(-history // pool.sizes.page_rows)
    if not pool.on_device:  # there a sequence has them from the start
        pool.require(1, 1, pages)
    (sequence,) = pool.alloc()
    cur = pool.cursors
    slot = cur.peek(sequence)
    if not pool.on_device:
        cur.table[slot, :pages] = pool.input_ids.take(pages)
    cur.base[slot], cur.history[slot], cur.given[slot] = base, history, True
    tensors = snapshot.tensors
    page, offset = (pool.device_ids(x) for x in _places(pool, slot, np.arange(history)))
    for name, field in pool.inputs.fields.items():
        field[:, page, offset] = tensors[f"rows.{name}"].to(pool.device)
    target = int(cur.checkpoint[slot])
    pool.checkpoints.storage[:, target] = tensors["checkpoint"].to(pool.device)
    pool.conv.rows[:, slot, _ring(pool, base, history)] = tensors["conv"].to(pool.device)
    pool.push(np.array([slot]))
    return sequence


def _places(pool: StatePool, slot: int, row: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    rows = pool.sizes.page_rows
    return pool.cursors.table[slot, row // rows], row % rows


def _ring(pool: StatePool, base: int, history: int) -> torch.Tensor:
    """Ring places of the pre-convolution rows that the sequence may still need, oldest first."""
    token = base + history
    back = pool.conv.taps + (history if pool.restore == "any" else 0)
    return pool.device_ids((np.arange(back) + token - back) % pool.conv.ring)


def _check(pool: StatePool, snapshot: SequenceSnapshot) -> None:
    if not isinstance(snapshot, SequenceSnapshot) or not isinstance(snapshot.header, Mapping):
        raise InputError(
            f"snapshot: got {type(snapshot).__name__} without a header; allowed a "
            f"SequenceSnapshot; "
            "pass what export or load_sequence returned"
        )
    want, have = describe_pool(pool), snapshot.header
    flat_want, flat_have = _flat(want), _flat(have)
    wrong = [
        f"{key} is {flat_have.get(key, 'absent')!r}, here {value!r}"
        for key, value in flat_want.items()
        if flat_have.get(key) != value
    ]
    wrong += [f"{key} is unknown here" for key in flat_have if key.startswith("spec.")
              and key not in flat_want]  # fmt: skip
    history, tokens = have.get("history"), have.get("tokens")
    if not isinstance(history, int) or not 0 <= history <= pool.capacity:
        wrong.append(f"history is {history!r}, allowed 0..{pool.capacity}")
    elif not isinstance(tokens, int) or not history <= tokens < _MOST_TOKENS:
        wrong.append(f"tokens is {tokens!r}, allowed an integer >= history={history}")
    if not wrong:
        wrong = _tensor_faults(pool, snapshot, int(history or 0))
    if wrong:
        raise InputError(
            f"snapshot: got one where {'; '.join(wrong)}; allowed a snapshot of a pool with the "
            f"same "
            "description; export it again from such a pool"
        )


def _tensor_faults(pool: StatePool, snapshot: SequenceSnapshot, history: int) -> list[str]:
    layers = len(pool.layers)
    storage = pool.checkpoints.storage
    back = pool.conv.taps + (history if pool.restore == "any" else 0)
    expected = {
        "checkpoint": ((layers, *storage.shape[2:]), storage.dtype),
        "conv": ((layers, back, pool.conv.rows.shape[3]), pool.dtype),
    }
    for name, field in pool.inputs.fields.items():
        expected[f"rows.{name}"] = ((layers, history, *field.shape[3:]), field.dtype)
    faults = []
    for name, (shape, dtype) in expected.items():
        tensor = snapshot.tensors.get(name)
        if tensor is None:
            faults.append(f"tensor {name} is absent")
        elif tuple(tensor.shape) != shape or tensor.dtype != dtype:
            faults.append(
                f"tensor {name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, here "
                f"{dtype_name(dtype)} {list(shape)}"
            )
    return faults


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in header.items() if k not in ("spec", "tokens", "history")}
    spec = header.get("spec")
    return flat | {f"spec.{k}": v for k, v in (spec if isinstance(spec, dict) else {}).items()}
