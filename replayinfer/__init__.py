"""Composable attention + SSM serving primitives: decode recurrent layers by replay.

Start with `StatePool`, `ReplayDecodeWrapper` and a layer specification (`Mamba2Spec`, `GDNSpec`).
Public names load on first use; importing the package loads neither triton nor any extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import backends, ops
    from .errors import (
        CapacityError,
        CheckError,
        InputError,
        NonFiniteStateError,
        PlanError,
        ReplayError,
        StaleHandleError,
        UnsupportedError,
    )
    from .formats import FORMATS, CheckpointFormat
    from .metrics import StepCounters
    from .ops import materialize
    from .planner import DevicePlanner, HostPlanner, Plan
    from .pools import CapacityReport, PageAllocator, SequenceId, SequenceSnapshot, StatePool
    from .prefill import ReplayPrefillWrapper
    from .spec import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
    from .spec.hf import ModelLayers, read_config
    from .speculation import (
        Draft,
        Drafter,
        NGramDrafter,
        ReplayTarget,
        SpeculationCounters,
        SpeculativeSession,
        Target,
        accepted_path,
        accepted_paths,
        accepted_prefix,
        sampled_path,
    )
    from .tensors import delta_walk, mamba2_ring, mamba2_walk
    from .wrapper import ReplayDecodeWrapper

_MODULES = {
    "errors": (
        "CapacityError",
        "CheckError",
        "InputError",
        "NonFiniteStateError",
        "PlanError",
        "ReplayError",
        "StaleHandleError",
        "UnsupportedError",
    ),
    "formats": ("FORMATS", "CheckpointFormat"),
    "metrics": ("StepCounters",),
    "ops": ("materialize",),
    "prefill": ("ReplayPrefillWrapper",),
    "planner": ("DevicePlanner", "HostPlanner", "Plan"),
    "pools": ("CapacityReport", "PageAllocator", "SequenceId", "SequenceSnapshot", "StatePool"),
    "spec": ("GDNSpec", "KDASpec", "LayerSpec", "Mamba2Spec"),
    "spec.hf": ("ModelLayers", "read_config"),
    "speculation": (
        "Draft",
        "Drafter",
        "NGramDrafter",
        "ReplayTarget",
        "SpeculationCounters",
        "SpeculativeSession",
        "Target",
        "accepted_path",
        "accepted_paths",
        "accepted_prefix",
        "sampled_path",
    ),
    "tensors": ("delta_walk", "mamba2_ring", "mamba2_walk"),
    "wrapper": ("ReplayDecodeWrapper",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("backends", "ops")

__all__ = [
    "FORMATS",
    "CapacityError",
    "CapacityReport",
    "CheckError",
    "CheckpointFormat",
    "DevicePlanner",
    "Draft",
    "Drafter",
    "GDNSpec",
    "HostPlanner",
    "InputError",
    "KDASpec",
    "LayerSpec",
    "Mamba2Spec",
    "ModelLayers",
    "NGramDrafter",
    "NonFiniteStateError",
    "PageAllocator",
    "Plan",
    "PlanError",
    "ReplayDecodeWrapper",
    "ReplayError",
    "ReplayPrefillWrapper",
    "ReplayTarget",
    "SequenceId",
    "SequenceSnapshot",
    "SpeculationCounters",
    "SpeculativeSession",
    "StaleHandleError",
    "StatePool",
    "StepCounters",
    "Target",
    "UnsupportedError",
    "__version__",
    "accepted_path",
    "accepted_paths",
    "accepted_prefix",
    "backends",
    "delta_walk",
    "mamba2_ring",
    "mamba2_walk",
    "materialize",
    "ops",
    "read_config",
    "sampled_path",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
