"""The Triton backend: the same operations as kernels, driven by the plan's device arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...env import launch_tables
from ...planner import Plan
from ...pools import StatePool
from ..base import ShiftedConvolution
from ..convolved import why_not_convolved
from . import delta, mamba2, planner
from . import direct as direct_step
from .compact import compact_rows
from .warmup import warmup
from .workspace import config, single_fold

__all__ = ["TritonBackend"]

# Each has fold and readout, and verify where it serves windows of several tokens.
_FAMILIES: dict[str, ModuleType] = {"mamba2": mamba2, "gdn": delta, "kda": delta}
_LONGEST_WINDOW = 16


class TritonBackend:
    """Executes plans with Triton kernels on an NVIDIA GPU, or on a CPU in Triton's interpreter.

    Notes
    -----
    Launches only: no allocation but the outputs', no sync, and the same launch for every batch of a
    bucket, so a step can be captured in a CUDA graph.
    """

    name = "triton"

    def __init__(self) -> None:
        from replayinfer.kernels.launch.lookup import use_tables

        use_tables(launch_tables())

    def supports(self, pool: StatePool) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from replayinfer.kernels.launch.config import interpreting

        if pool.device.type != "cuda" and not (pool.device.type == "cpu" and interpreting()):
            return (
                f"device {pool.device}; it runs on cuda, or on a CPU with TRITON_INTERPRET=1 set "
                "before Triton is imported"
            )
        if pool.spec.family not in _FAMILIES:
            return f"family {pool.spec.family!r}; its kernels serve {', '.join(_FAMILIES)}"
        spec: Any = pool.spec
        if spec.state % 2:
            return f"state={spec.state}; its kernels read channels in pairs"
        longest = _LONGEST_WINDOW if hasattr(_FAMILIES[spec.family], "verify") else 1
        if pool.max_window > longest:
            return (
                f"max_window={pool.max_window}; its kernels serve windows of up to {longest} "
                f"for {spec.family}"
            )
        return None

    def fold(self, pool: StatePool, plan: Plan) -> None:
        ckpt = pool.checkpoints
        fold = _FAMILIES[pool.spec.family].fold
        fold(pool, slice(None), ckpt.plane, ckpt.low, plan.arrays, plan.bucket)

    def conv(
        self, pool: StatePool, plan: Plan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        from replayinfer.kernels.conv.update import conv_update

        arrays, weights = plan.arrays, pool.weights
        conv_update(
            out, x, pool.conv.rows[layer],
            weights["conv_weight"][layer], weights["conv_bias"][layer],
            arrays.slot, arrays.conv_place, arrays.window,
            arrays.ancestors if plan.window > 1 else None,
            activation=pool.spec.conv_activation,
            config=config(pool, "conv", plan.bucket),
        )  # fmt: skip

    def readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        family = _FAMILIES[pool.spec.family]
        (family.verify if plan.window > 1 else family.readout)(pool, plan, layer, inputs, out)

    def convolves(self, pool: StatePool, bucket: int) -> str | None:
        if (reason := why_not_convolved(pool)) is not None:
            return reason
        if config(pool, "fused", bucket) is not None:
            return f"a bucket of {bucket}, whose step is one kernel; it convolves in larger ones"
        return None

    convolved_readout = staticmethod(delta.convolved_readout)
    direct = staticmethod(direct_step.direct)
    prefers_direct = staticmethod(direct_step.prefers_direct)

    def compact(self, pool: StatePool, plan: Plan, nodes: NDArray[np.int32] | torch.Tensor) -> None:
        compact_rows(pool, plan, nodes)

    def recode(
        self, pool: StatePool, pages: torch.Tensor, chosen: torch.Tensor, *, split: bool
    ) -> None:
        from replayinfer.kernels.pages.recode import recode as launch

        launch(pool.checkpoints.storage, pages, chosen, split=split)

    def materialize(
        self, pool: StatePool, layer: int, page: int, table: list[int], rows: int
    ) -> torch.Tensor:
        out = torch.empty((1, 1, *pool.spec.state_shape), device=pool.device)
        _FAMILIES[pool.spec.family].fold(
            pool, slice(layer, layer + 1), out, None,
            single_fold(pool.device, page, table, rows), 1,
        )  # fmt: skip
        return out[0, 0]

    def warmup(
        self,
        pool: StatePool,
        plan: Plan,
        *,
        inputs: Sequence[Mapping[str, torch.Tensor]] | None,
        conv: Sequence[Mapping[str, torch.Tensor]] | None,
        convolved: Sequence[tuple[ShiftedConvolution, Mapping[str, torch.Tensor]]] = (),
    ) -> None:
        warmup(self, pool, plan, inputs, conv, convolved)

    plan_step = staticmethod(planner.plan_step)
    accept_paths = staticmethod(planner.accept_paths)
    fold_step = staticmethod(planner.fold_step)
    commit_step = staticmethod(planner.commit_step)
    abort_step = staticmethod(planner.abort_step)
