"""Attention and recurrent layers of one step, planned together, with FlashInfer's wrappers or ours.

* `StepMetadata` says what a step is: sequences, query offsets, the paged keys and values in CSR
  form, on the host and on the device. `KVPagePool` makes it; `MetadataBuffers` makes it from the
  page tables that an engine already has.
* `HybridStepPlanner` plans an attention wrapper and a replay wrapper from it.
* `PagedAttentionWrapper` attends with FlashInfer, or with torch where FlashInfer cannot run.

Importing this package does not import `flashinfer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import PagedAttentionWrapper
    from .kv import KVPagePool
    from .metadata import MetadataArrays, MetadataBuffers, StepMetadata
    from .peers import AttentionShape
    from .planner import HybridStepPlanner

__all__ = [
    "AttentionShape",
    "HybridStepPlanner",
    "KVPagePool",
    "MetadataArrays",
    "MetadataBuffers",
    "PagedAttentionWrapper",
    "StepMetadata",
]

_HOME = {
    "AttentionShape": "peers",
    "HybridStepPlanner": "planner",
    "KVPagePool": "kv",
    "MetadataArrays": "metadata",
    "MetadataBuffers": "metadata",
    "PagedAttentionWrapper": "attention",
    "StepMetadata": "metadata",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
