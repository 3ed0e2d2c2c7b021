"""Who executes a step on a caller's own states: the kernels, or torch."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch

from ..errors import UnsupportedError

__all__ = ["select_walks"]

_NAMES = ("auto", "triton", "torch")


@lru_cache
def select_walks(name: str, device: torch.device) -> ModuleType:
    """``mamba2_walk``, ``mamba2_ring`` and ``delta_walk`` for tensors of a device.

    ``"auto"`` takes the kernels on a GPU and torch elsewhere.

    Raises
    ------
    UnsupportedError
        An unknown name, or kernels where they cannot run.
    """
    if name not in _NAMES:
        raise UnsupportedError(f"backend: got {name!r}; allowed {', '.join(_NAMES)}; pick one")
    installed = importlib.util.find_spec("triton") is not None
    if name == "auto":
        name = "triton" if device.type == "cuda" and installed else "torch"
    if name == "torch":
        return importlib.import_module(".torch.walks", __package__)
    module = importlib.import_module(".triton.walks", __package__)
    reason = module.why_not(device) if installed else "triton is not installed"
    if reason is not None:
        raise UnsupportedError(
            f"backend: got 'triton'; allowed where its kernels run; refused: {reason}"
        )
    return module
