"""What a backend does: operations on a pool, and an honest answer about what it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..planner import Plan
from ..planner.prefill import PrefillPlan
from ..pools import StatePool

__all__ = ["Backend", "PrefillBackend", "ShiftedConvolution"]


@dataclass(frozen=True, kw_only=True)
class ShiftedConvolution:
    """A layer's causal convolution of one token, over windows that an engine keeps and shifts.

    ``y = activation(bias + sum_i weight_i s_i + weight_{width - 1} x)``, and ``x`` becomes the
    newest input of the window ``s``.

    Attributes
    ----------
    x : Tensor, [bucket, channels] or [bucket, key_heads, 2 * state + ratio * dim]
        Pre-convolution activations of the pool's dtype; for GDN ``q | k | v``, or those of each key
        head together with those of its ``ratio`` value heads, as Qwen3-Next projects them.
    states : Tensor, [slots, channels, width - 1]
        The last inputs of each channel of ``q | k | v``, oldest first, of the pool's dtype; those
        of a slot contiguous. Written in place.
    slots : int32 or int64 Tensor, [bucket]
        Each row's. Those of pads and of empty windows are not looked at; the others are distinct.
    weight, bias : Tensor, [channels, width] and [channels]
        Of float32, bfloat16 or float16 each, whatever the pool's dtype; ``width >= 2``.
    activation : {"silu", None}
    z, z_out : Tensor, [bucket, key_heads, ratio * dim] and [bucket, heads, dim], optional
        Part of a projection that is copied on the way, pads too: what gates the output comes out of
        it in pieces, and the norm behind the readout wants it in one.
    """

    x: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    activation: Literal["silu"] | None = "silu"
    z: torch.Tensor | None = None
    z_out: torch.Tensor | None = None

    @property
    def by_head(self) -> bool:
        """Whether `x`, and so the gates, lie by key head."""
        return isinstance(self.x, torch.Tensor) and self.x.dim() == 3


class Backend(Protocol):
    """Executes plans. Arguments are checked before they arrive; `layer` is a position in the pool.

    Implementations may be stateless: everything they work on belongs to the pool and the plan.
    """

    name: str

    def supports(self, pool: StatePool) -> str | None:
        """None if every operation works on `pool`, else the reason why not."""

    def fold(self, pool: StatePool, plan: Plan) -> None:
        """Advance the checkpoints of the plan's fold list over their rows, in all layers."""

    def conv(
        self, pool: StatePool, plan: Plan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Convolve the window, and put its pre-convolution rows into the rings."""

    def readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Append the window's rows and write its outputs; checkpoints are only read."""

    def convolves(self, pool: StatePool, bucket: int) -> str | None:
        """None if `convolved_readout` works in steps of a `bucket`, else the reason why not.

        Whether the pool has rings, which would not move, is not asked here but before.
        """

    def convolved_readout(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        conv: ShiftedConvolution,
        gates: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """`readout` of one token, after the convolution of what is not a gate."""

    def direct(
        self,
        pool: StatePool,
        plan: Plan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Move the states of a direct plan by its tokens, in place, and write the outputs.

        The recurrence is computed in fp32 on the decoded states (both planes) and encoded again;
        outputs are of the new states before that. No row is written. An exception means that no
        state was.
        """

    def prefers_direct(self, pool: StatePool, bucket: int) -> bool:
        """Whether a direct step of a `bucket` is faster than replay, as far as was measured."""

    def compact(self, pool: StatePool, plan: Plan, nodes: NDArray[np.int32] | torch.Tensor) -> None:
        """Move accepted tree nodes ``[batch, window]`` (-1: none) to where a chain's rows lie.

        Of a plan made on the device they are an int32 tensor there, ``[bucket, max_window]``.
        """

    def recode(
        self, pool: StatePool, pages: torch.Tensor, chosen: torch.Tensor, *, split: bool
    ) -> None:
        """Rewrite `pages` ``[n]`` of ``fp32_split`` where `chosen`, in place and in all layers.

        From plain float32 to planes, or back; without a sync. Negative pages are pads.
        """

    def materialize(
        self, pool: StatePool, layer: int, page: int, table: list[int], rows: int
    ) -> torch.Tensor:
        """The state after `rows` rows, float32 ``[heads, dim, state]``; nothing is written."""

    def warmup(
        self,
        pool: StatePool,
        plan: Plan,
        *,
        inputs: Sequence[Mapping[str, torch.Tensor]] | None,
        conv: Sequence[Mapping[str, torch.Tensor]] | None,
        convolved: Sequence[tuple[ShiftedConvolution, Mapping[str, torch.Tensor]]] = (),
    ) -> None:
        """Compile and load what steps like `plan` can launch; the pool stays as it is.

        `plan` has no sequences: all of its rows are pads. `inputs` are examples of what a readout
        gets, with ``out`` where the caller gives one, and `conv` of a convolution (``x``, ``out``);
        their dtypes, strides and alignment count. None: contiguous tensors, in every dtype. An
        empty list: no such call. `convolved` are examples of convolved readouts, with their gates
        and ``out``, for a plan that they can have.
        """


class PrefillBackend(Protocol):
    """Executes prefill plans. Arguments are checked before they arrive."""

    name: str

    def supports(self, pool: StatePool) -> str | None:
        """None if it can prefill `pool`, else the reason why not."""

    def prefill_conv(
        self, pool: StatePool, plan: PrefillPlan, layer: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Convolve packed rows ``[tokens, channels]``; keep each sequence's last in the plan."""

    def prefill(
        self,
        pool: StatePool,
        plan: PrefillPlan,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Write outputs ``[tokens, heads, dim]``, and final states into the plan's target pages."""
