"""`ReplayPrefillWrapper`: packed prompts that continue their sequences, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from . import operands
from .backends import PrefillBackend, select_prefill
from .errors import PlanError
from .planner.prefill import PrefillPlan, PrefillPlanner
from .pools import StatePool

__all__ = ["ReplayPrefillWrapper"]


class ReplayPrefillWrapper:
    """Prefills the sequences of a pool: plan, then ``conv`` and ``run`` per layer, then commit.

    Each sequence continues from its state, whatever its history, and ends as a checkpoint without
    rows. Pieces of any size give what the whole gives, within float32 rounding.

    Parameters
    ----------
    pool : StatePool
    backend : str or PrefillBackend
        ``"auto"`` takes the first that can prefill this pool; `backend.name` says which.

    Examples
    --------
    >>> import torch
    >>> from replayinfer import GDNSpec, ReplayPrefillWrapper, StatePool
    >>> spec = GDNSpec(heads=4, dim=8, state=8, key_heads=2, gate="log", conv_width=0)
    >>> pool = StatePool(spec, layers=[0], max_sequences=2)
    >>> seqs = pool.alloc(2)
    >>> prefill = ReplayPrefillWrapper(pool)
    >>> plan = prefill.plan(seqs, [0, 5, 12])
    >>> q = k = torch.randn(12, 2, 8)
    >>> g, b = -torch.rand(12, 4), torch.zeros(12, 4)
    >>> y = prefill.run(0, q=q, k=k, v=torch.randn(12, 4, 8), g=g, b=b)
    >>> prefill.commit()
    >>> y.shape, [pool.tokens(s) for s in seqs]
    (torch.Size([12, 4, 8]), [5, 7])
    """

    def __init__(self, pool: StatePool, *, backend: str | PrefillBackend = "auto") -> None:
        self.pool = pool
        self.backend = select_prefill(backend, pool)
        self.planner = PrefillPlanner(pool)
        self._plan: PrefillPlan | None = None

    def plan(
        self, sequences: Sequence[int] | NDArray[np.int64], cu_seqlens: ArrayLike
    ) -> PrefillPlan:
        """Plan the next prefill; see `PrefillPlanner.plan`."""
        if self._plan is not None:
            raise PlanError(
                "plan: got a second prefill before the first was committed or aborted; allowed one "
                "at a time; finish it"
            )
        self._plan = self.planner.plan(sequences, cu_seqlens)
        return self._plan

    @torch.no_grad()
    def conv(self, layer: int, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's causal convolution over packed rows ``[tokens, channels]``."""
        plan, index = self._current("conv"), self.pool.index(layer)
        lead = {"tokens": plan.tokens}
        operands.check_convolution(self.pool, lead, x)
        out = operands.layer_output(self.pool, lead, out, ("channels",))
        self.backend.prefill_conv(self.pool, plan, index, x, out)
        plan.layers_convolved.add(layer)
        return out

    @torch.no_grad()
    def run(
        self, layer: int, *, out: torch.Tensor | None = None, **inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Outputs of one layer over packed tokens, ``[tokens, heads, dim]``.

        Parameters
        ----------
        **inputs
            As `ReplayDecodeWrapper.run` takes them, with ``[tokens, ...]`` instead of
            ``[bucket, window, ...]``.
        """
        plan, index = self._current("run"), self.pool.index(layer)
        lead = {"tokens": plan.tokens}
        ready = operands.check_inputs(
            self.pool, lead, inputs, "pack the tokens of all sequences as cu_seqlens says"
        )
        out = operands.layer_output(self.pool, lead, out, self.pool.spec.output_dims)
        self.backend.prefill(self.pool, plan, index, ready, out)
        plan.layers_run.add(layer)
        return out

    def commit(self) -> None:
        """Make the final states the sequences' checkpoints.

        Raises
        ------
        PlanError
            A layer of the pool did not run, or was not convolved where the spec has a convolution.
        """
        plan = self._current("commit")
        layers = set(self.pool.layers)
        if plan.tokens:
            missing = sorted(layers - plan.layers_run)
            if missing:
                raise PlanError(
                    f"commit: got no run of layers {missing}; allowed after every layer of the "
                    f"pool "
                    "ran; run them, or abort"
                )
            missing = sorted(layers - plan.layers_convolved)
            if missing and self.pool.spec.conv_width:
                raise PlanError(
                    f"commit: got no conv of layers {missing}; allowed after every layer of the "
                    "pool was convolved; call conv, or make the spec with conv_width=0"
                )
        self.planner.commit(plan)
        self._plan = None

    def abort(self) -> None:
        """Drop the prefill: every sequence is where it was."""
        self.planner.abort(self._current("abort"))
        self._plan = None

    def _current(self, action: str) -> PrefillPlan:
        if self._plan is None:
            raise PlanError(
                f"{action}: got no plan; allowed between plan and commit or abort; call plan first"
            )
        return self._plan
