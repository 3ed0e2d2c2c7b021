"""Attention and recurrent layers of one step, planned together, with FlashInfer's wrappers or ours.

* `StepMetadata` says what a step is: sequences, query offsets, the paged keys and values in CSR
  form, on the host and on the device. `KVPagePool` makes it; `MetadataBuffers` makes it from the
  page tables that an engine already has.
* `HybridStepPlanner` plans an attention wrapper and a replay wrapper from it.
* `PagedAttentionWrapper` attends with FlashInfer, or with torch where FlashInfer cannot run.
* `RingPool` keeps Mamba-2 states and rows as FlashInfer does, for its kernels or ours.
* `selective_state_update`, `checkpointing_ssu`, `gated_delta_rule_decode_pretranspose` and
  `gated_delta_rule_mtp` take what FlashInfer's calls of those names take.

Importing this package does not import `flashinfer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import PagedAttentionWrapper
    from .gdn import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
    from .kv import KVPagePool
    from .mamba import checkpointing_ssu, selective_state_update
    from .metadata import MetadataArrays, MetadataBuffers, StepMetadata
    from .peers import AttentionShape
    from .planner import HybridStepPlanner
    from .ring import RingPool

__all__ = [
    "AttentionShape",
    "HybridStepPlanner",
    "KVPagePool",
    "MetadataArrays",
    "MetadataBuffers",
    "PagedAttentionWrapper",
    "RingPool",
    "StepMetadata",
    "checkpointing_ssu",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "selective_state_update",
]

_HOME = {
    "AttentionShape": "peers",
    "HybridStepPlanner": "planner",
    "KVPagePool": "kv",
    "MetadataArrays": "metadata",
    "MetadataBuffers": "metadata",
    "PagedAttentionWrapper": "attention",
    "RingPool": "ring",
    "StepMetadata": "metadata",
    "checkpointing_ssu": "mamba",
    "gated_delta_rule_decode_pretranspose": "gdn",
    "gated_delta_rule_mtp": "gdn",
    "selective_state_update": "mamba",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
