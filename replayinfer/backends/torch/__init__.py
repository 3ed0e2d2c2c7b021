"""The reference backend: plain torch, any device, float32 arithmetic. Readable first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...planner import Plan
from ...planner.prefill import PrefillPlan
from ...pools import StatePool
from ..base import ShiftedConvolution
from ..convolved import join_heads, split_line, why_not_convolved
from . import delta, mamba2
from .conv import conv_update, shift_update
from .planner import abort_step, accept_paths, commit_step, fold_step, plan_step
from .prefill import prefill_conv_one, prefill_one
from .rows import Window, compact_rows

__all__ = ["TorchBackend"]

# Each has advance, readout, step and prefill_chunk.
_FAMILIES: dict[str, ModuleType] = {"mamba2": mamba2, "gdn": delta, "kda": delta}


class TorchBackend:
    """Executes plans with torch operators.

    Notes
    -----
    It reads the host's record of the plan rather than the device arrays, so it neither syncs for
    the fold count nor fits into a CUDA graph.
    """

    name = "torch"

    def supports(self, pool: StatePool) -> str | None:
        if pool.spec.family not in _FAMILIES:
            return f"family {pool.spec.family!r}; it serves {', '.join(_FAMILIES)}"
        return None

    def fold(self, pool: StatePool, plan: Plan) -> None:
        count = plan.fold_count
        if not count:
            return
        advance = _FAMILIES[pool.spec.family].advance
        arrays = plan.arrays
        source = arrays.fold_source[:count].long()
        target = arrays.fold_target[:count].long()
        table = arrays.fold_table[:count].long()
        rows = arrays.fold_rows[:count].long()
        for layer in range(len(pool.layers)):
            state = pool.checkpoints.load(layer, source)
            state = advance(pool, pool.spec, layer, state, table, rows)
            pool.checkpoints.store(layer, target, state)

    def conv(
        self, pool: StatePool, plan: Plan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        window = Window.of(pool, plan)
        window.put(out, conv_update(pool, plan, layer, window, x))

    def readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        n = plan.batch
        window = Window.of(pool, plan)
        arrays = plan.arrays
        state = pool.checkpoints.read(layer, arrays.page[:n].long())
        y = _FAMILIES[pool.spec.family].readout(
            pool, pool.spec, layer, window, inputs, state,
            arrays.table[:n].long(), arrays.history[:n].long(),
        )  # fmt: skip
        window.put(out, y)

    def convolves(self, pool: StatePool, bucket: int) -> str | None:
        return why_not_convolved(pool)

    def convolved_readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        conv: ShiftedConvolution,
        gates: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        if conv.by_head:
            conv = dataclasses.replace(conv, x=join_heads(pool, conv.x))
        line = shift_update(conv, plan.arrays.window[: plan.bucket])
        if conv.z is not None and conv.z_out is not None:
            conv.z_out.copy_(conv.z.reshape(conv.z_out.shape))
        gates = {name: gate.reshape(plan.bucket, 1, -1) for name, gate in gates.items()}
        self.readout(pool, plan, layer, {**split_line(pool, line), **gates}, out)

    def direct(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        live = np.flatnonzero(plan.windows)
        pages, which = pool.device_ids(plan.pages[live]), pool.device_ids(live)
        tokens = {name: value[which] for name, value in inputs.items()}
        state = pool.checkpoints.load(layer, pages)
        y, state = _FAMILIES[pool.spec.family].step(pool, pool.spec, layer, state, tokens)
        out.zero_()
        out[which] = y.to(out.dtype)
        pool.checkpoints.store(layer, pages, state)

    def prefers_direct(self, pool: StatePool, bucket: int) -> bool:
        """Never: it is the reference, and no faster either way."""
        return False

    def compact(self, pool: StatePool, plan: Plan, nodes: NDArray[np.int32] | torch.Tensor) -> None:
        compact_rows(pool, plan, nodes)

    def recode(
        self, pool: StatePool, pages: torch.Tensor, chosen: torch.Tensor, *, split: bool
    ) -> None:
        which = pages[chosen & (pages >= 0)].long()  # waits for the count, where on a device
        for layer in range(len(pool.layers)):
            plain = pool.checkpoints.storage[layer].view(torch.float32)  # a head's two planes
            if split:
                state = plain[which].flatten(2).view(-1, *pool.spec.state_shape)
                pool.checkpoints.store(layer, which, state)
            else:
                state = pool.checkpoints.load(layer, which)
                plain[which] = state.reshape(-1, *plain.shape[1:])

    def materialize(
        self, pool: StatePool, layer: int, page: int, table: list[int], rows: int
    ) -> torch.Tensor:
        def row(values: Any) -> torch.Tensor:
            return torch.tensor([values], dtype=torch.int64, device=pool.device)

        state = pool.checkpoints.load(layer, row(page))
        family = _FAMILIES[pool.spec.family]
        states: torch.Tensor = family.advance(pool, pool.spec, layer, state, row(table), row(rows))
        return states[0]

    def warmup(
        self,
        pool: StatePool,
        plan: Plan,
        *,
        inputs: Sequence[Mapping[str, torch.Tensor]] | None,
        conv: Sequence[Mapping[str, torch.Tensor]] | None,
        convolved: Sequence[tuple[ShiftedConvolution, Mapping[str, torch.Tensor]]] = (),
    ) -> None:
        """Nothing to compile."""

    plan_step = staticmethod(plan_step)
    accept_paths = staticmethod(accept_paths)
    fold_step = staticmethod(fold_step)
    commit_step = staticmethod(commit_step)
    abort_step = staticmethod(abort_step)

    def prefill_conv(
        self, pool: StatePool, plan: PrefillPlan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        cur, cu = pool.cursors, plan.cu_seqlens.tolist()
        for i, slot in enumerate(plan.slots.tolist()):
            token = int(cur.base[slot] + cur.history[slot])
            before = pool.conv.before(slot, token)[layer]
            part = slice(cu[i], cu[i + 1])
            plan.tails[layer, i] = prefill_conv_one(pool, layer, before, x[part], out[part])

    def prefill(
        self,
        pool: StatePool,
        plan: PrefillPlan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        chunk = _FAMILIES[pool.spec.family].prefill_chunk
        cu = plan.cu_seqlens.tolist()
        for i, slot in enumerate(plan.slots.tolist()):
            part = slice(cu[i], cu[i + 1])
            if part.start == part.stop:
                continue
            if plan.source[i] == plan.target[i]:
                # At token 0; zero even if this layer ran before and was overwritten.
                state = torch.zeros(pool.spec.state_shape, device=pool.device)
            else:
                table = pool.cursors.table[slot].tolist()
                rows = int(plan.rows[i])
                state = self.materialize(pool, layer, int(plan.source[i]), table, rows)
            tokens = {name: value[part] for name, value in inputs.items()}
            final = prefill_one(pool, layer, chunk, state[None], tokens, out[part])
            pool.checkpoints.store(layer, pool.device_ids(plan.target[i : i + 1]), final)
