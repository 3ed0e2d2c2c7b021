"""A sequence in a file: safetensors, with the snapshot's header as metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError, UnsupportedError
from ..pools import SequenceSnapshot

__all__ = ["load_sequence", "save_sequence"]

_KEY = "replayinfer_sequence"


def save_sequence(snapshot: SequenceSnapshot, path: str | os.PathLike[str]) -> None:
    """Write a snapshot to a ``.safetensors`` file, whole or not at all.

    Raises
    ------
    UnsupportedError
        The safetensors package is not installed (extra ``offload``).
    """
    save_file = _safetensors().save_file
    target = Path(path)
    partial = target.with_name(target.name + f".{os.getpid()}.part")
    tensors = {name: t.contiguous() for name, t in snapshot.tensors.items()}
    try:
        save_file(tensors, str(partial), metadata={_KEY: json.dumps(dict(snapshot.header))})
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_sequence(path: str | os.PathLike[str]) -> SequenceSnapshot:
    """Read a snapshot; `StatePool.import_` checks whether it fits a pool.

    Raises
    ------
    InputError
        No such file, not a safetensors file, or one without a sequence's header.
    UnsupportedError
        The safetensors package is not installed (extra ``offload``).
    """
    safe_open = _safetensors_package().safe_open
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            if not isinstance(header, dict):
                raise KeyError(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except KeyError:
        raise InputError(
            f"path: got {path}, which holds no sequence; allowed a file that save_sequence wrote; "
            "pass another"
        ) from None
    except Exception as error:  # safetensors raises its own type, OSError or ValueError
        raise InputError(
            f"path: got {path}, which cannot be read ({error}); allowed a file that save_sequence "
            "wrote; pass another"
        ) from error
    return SequenceSnapshot(header, tensors)


def _safetensors_package() -> Any:
    try:
        import safetensors
    except ImportError:
        raise UnsupportedError(
            "safetensors: got no installation; allowed any; pip install 'replayinfer[offload]'"
        ) from None
    return safetensors


def _safetensors() -> Any:
    _safetensors_package()
    import safetensors.torch

    return safetensors.torch
