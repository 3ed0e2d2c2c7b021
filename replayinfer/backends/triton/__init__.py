"""The Triton backend: the same operations as kernels, driven by the plan's device arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...planner import Plan
from ...pools import StatePool

__all__ = ["TritonBackend"]


class TritonBackend:
    """Executes plans with Triton kernels on an NVIDIA GPU, or on a CPU in Triton's interpreter.

    Notes
    -----
    Launches only: no allocation but the outputs', no sync, and the same launch for every batch of a
    bucket, so a step can be captured in a CUDA graph.
    """

    name = "triton"

    def __init__(self) -> None:
        self._workspaces: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def supports(self, pool: StatePool) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from replayinfer.kernels.launch.config import interpreting

        if pool.device.type != "cuda" and not (pool.device.type == "cpu" and interpreting()):
            return (
                f"device {pool.device}; it runs on cuda, or on a CPU with TRITON_INTERPRET=1 set "
                "before Triton is imported"
            )
        if pool.spec.family != "mamba2":
            return f"family {pool.spec.family!r}; its kernels serve mamba2"
        spec: Any = pool.spec
        if spec.state % 2:
            return f"state={spec.state}; its kernels read channels in pairs"
        if pool.max_window != 1:
            return f"max_window={pool.max_window}; its kernels decode one token a step"
        return None

    def fold(self, pool: StatePool, plan: Plan) -> None:
        arrays = plan.arrays
        ckpt = pool.checkpoints
        self._fold(
            pool, slice(None), ckpt.plane, ckpt.low, arrays.fold_source, arrays.fold_target,
            arrays.fold_rows, arrays.fold_table, arrays.fold_count, plan.bucket,
        )  # fmt: skip

    def conv(
        self, pool: StatePool, plan: Plan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        from replayinfer.kernels.conv.update import conv_update

        arrays, weights = plan.arrays, pool.weights
        conv_update(
            out, x, pool.conv.rows[layer],
            weights["conv_weight"][layer], weights["conv_bias"][layer],
            arrays.slot, arrays.conv_place, arrays.window,
            activation=pool.spec.conv_activation,
            config=self._config(pool, "conv", plan.bucket),
        )  # fmt: skip

    def readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        from replayinfer.kernels.mamba2.fused import fused
        from replayinfer.kernels.mamba2.prepass import prepass
        from replayinfer.kernels.mamba2.readout import readout

        spec: Any = pool.spec
        arrays, weights, rows = plan.arrays, pool.weights, pool.inputs.fields
        y, plane = out[:, 0], pool.checkpoints.plane[layer]
        x, dt, b, c = (inputs[name][:, 0] for name in ("x", "dt", "B", "C"))
        z = inputs["z"][:, 0] if "z" in inputs else None
        a, d_skip, dt_bias = (weights[name][layer] for name in ("A", "D", "dt_bias"))
        row_x, row_b, row_dt = (rows[name][layer] for name in ("x", "B", "dt"))
        gate = {"dt_limit": spec.dt_limit, "dt_softplus": spec.dt_softplus}
        pdl = _has_pdl(pool.device)

        if (whole := self._config(pool, "fused", plan.bucket)) is not None:
            fused(
                y, plane, x, dt, b, c, z, a, d_skip, dt_bias, row_x, row_b, row_dt,
                arrays.page, arrays.history, arrays.window, arrays.table,
                capacity=pool.capacity, **gate, pdl=pdl, config=whole,
            )  # fmt: skip
            return
        weight, scale = self._workspace(pool, plan.bucket)
        prepass(
            weight, scale, dt, b, c, a, d_skip, dt_bias, row_b, row_dt,
            arrays.history, arrays.window, arrays.table,
            **gate, pdl=pdl, config=self._config(pool, "prepass", plan.bucket),
        )  # fmt: skip
        readout(
            y, plane, weight, scale, x, c, z, row_x,
            arrays.page, arrays.history, arrays.window, arrays.table,
            pdl=pdl, config=self._config(pool, "readout", plan.bucket),
        )  # fmt: skip

    def compact(self, pool: StatePool, plan: Plan, nodes: NDArray[np.int32]) -> None:
        """Nothing moves: the one node of a one-token window lies where a chain's row does."""

    def materialize(
        self, pool: StatePool, layer: int, page: int, table: list[int], rows: int
    ) -> torch.Tensor:
        def ints(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=pool.device)

        out = torch.empty((1, 1, *pool.spec.state_shape), device=pool.device)
        self._fold(
            pool, slice(layer, layer + 1), out, None, ints([page]), ints([0]),
            ints([rows]), ints([table]), ints([1]), 1,
        )  # fmt: skip
        return out[0, 0]

    def _config(self, pool: StatePool, op: str, bucket: int) -> Any:
        from replayinfer.kernels.launch import lookup as launch

        return launch.lookup(op, pool.spec, pool.format.name, bucket, pool.device)

    def _workspace(self, pool: StatePool, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a prepass hands to its readout; one per bucket, at an address that never moves."""
        spec: Any = pool.spec
        rows = max(16, 1 << (pool.capacity - 1).bit_length())
        key = (pool.device, bucket, spec.heads, rows)
        if key not in self._workspaces:
            self._workspaces[key] = (
                torch.empty((bucket, spec.heads, rows), device=pool.device),
                torch.empty((bucket, spec.heads, 2), device=pool.device),
            )
        return self._workspaces[key]

    def _fold(
        self,
        pool: StatePool,
        layers: slice,
        out: torch.Tensor,
        out_low: torch.Tensor | None,
        source: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        table: torch.Tensor,
        number: torch.Tensor,
        bucket: int,
    ) -> None:
        from replayinfer.kernels.mamba2.fold import fold

        ckpt, rows = pool.checkpoints, pool.inputs.fields
        plane, low = ckpt.plane[layers], ckpt.low
        if low is not None:
            plane, low = plane.view(torch.int16), low[layers]
        if out_low is not None:
            out = out.view(torch.int16)
        config = self._config(pool, "fold", bucket)
        fold(
            out, out_low, plane, low, pool.weights["A"][layers],
            rows["x"][layers], rows["B"][layers], rows["dt"][layers],
            source, target, counts, table, number,
            capacity=pool.capacity,
            programs=_processors(pool.device) * config.programs_per_sm,
            config=config,
        )  # fmt: skip


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
