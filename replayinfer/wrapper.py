"""`ReplayDecodeWrapper`: plan once, fold once, run per layer, commit once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from . import debug, ops
from .backends import Backend, select
from .env import checks_enabled
from .errors import InputError, PlanError
from .metrics import StepCounters
from .planner import DevicePlan, DevicePlanner, HostPlanner, Plan, Policy
from .pools import StatePool

__all__ = ["ReplayDecodeWrapper"]


class ReplayDecodeWrapper:
    """Decodes the sequences of a pool, one step at a time.

    Parameters
    ----------
    pool : StatePool
    backend : str or Backend
        ``"auto"`` takes the first that supports the pool; `backend.name` says which.
    policy : {"full", "spread", "deadline:FOLDS"} or Policy
        When sequences fold early. ``"full"``: never, so that the bits of a sequence do not depend
        on its batch. ``"spread"``: just enough to level the folds of a step.
    buckets : sequence of int, optional
        Padded batch sizes. Without it the batch is not padded.
    direct : {"auto", "never", "always"} or int
        Which steps move the states in place, as a kernel without replay does, and write no rows: it
        pays for small batches. ``"auto"``: the buckets for which the backend measured it to be
        faster. An int: buckets up to that. Both only where every window is 0 or 1, the step is no
        tree, and the checkpoint pages that sharers need are free; other steps are replayed.
        ``"always"``: every step, and one that cannot is refused. ``plan.direct`` says what was
        chosen. A token whose layer ran in a direct step cannot be dropped again; see `commit` and
        `abort`, and `DevicePlanner` for counts that only the device knows: where it may be told to
        drop the one token of a window, ask for ``"never"``.
    planner : {"auto", "host", "device"}
        Who plans. ``"device"``: a kernel, from cursors on the device, so that a step needs neither
        the accepted counts of the one before it nor any other value on the host, and `plan`,
        `fold`, `run` of every layer and `commit` can be captured in one CUDA graph; see
        `DevicePlanner` for what its calls take and promise. ``"auto"``: as the pool was made.

    Attributes
    ----------
    counters : StepCounters
        Of steps planned on the device only their numbers as they were enqueued.

    Examples
    --------
    >>> import torch
    >>> from replayinfer import GDNSpec, ReplayDecodeWrapper, StatePool
    >>> spec = GDNSpec(heads=4, dim=8, state=8, key_heads=2, gate="log", conv_width=0)
    >>> pool = StatePool(spec, layers=[0], max_sequences=2)
    >>> wrapper = ReplayDecodeWrapper(pool)
    >>> seqs = pool.alloc(2)
    >>> plan = wrapper.plan(seqs)
    >>> wrapper.fold()
    >>> q = k = torch.randn(2, 1, 2, 8)
    >>> g, b = -torch.rand(2, 1, 4), torch.zeros(2, 1, 4)
    >>> y = wrapper.run(0, q=q, k=k, v=torch.randn(2, 1, 4, 8), g=g, b=b)
    >>> y.shape, wrapper.commit().tolist()
    (torch.Size([2, 1, 4, 8]), [1, 1])
    """

    def __init__(
        self,
        pool: StatePool,
        *,
        backend: str | Backend = "auto",
        policy: str | Policy = "full",
        buckets: Sequence[int] | None = None,
        direct: Literal["auto", "never", "always"] | int = "auto",
        planner: Literal["auto", "host", "device"] = "auto",
    ) -> None:
        self.pool = pool
        self.backend = select(backend, pool)
        self._direct = _direct_steps(direct, pool, self.backend)
        if _on_device(planner, pool):
            self.planner: HostPlanner = DevicePlanner(
                pool, cast(Any, self.backend), policy=policy, buckets=buckets
            )
        else:
            self.planner = HostPlanner(pool, policy=policy, buckets=buckets)
        self.counters = StepCounters()
        self._plan: Plan | None = None
        self._checks = checks_enabled()

    def plan(
        self,
        sequences: Sequence[int] | NDArray[np.int64] | torch.Tensor,
        windows: ArrayLike | torch.Tensor | None = None,
        *,
        bucket: int | None = None,
        window: int | None = None,
        force_fold: ArrayLike | torch.Tensor | None = None,
        parents: ArrayLike | torch.Tensor | None = None,
        direct: bool | None = None,
    ) -> Plan:
        """Plan the next step; see `HostPlanner.plan`. The last one must be committed or aborted.

        `direct` decides for this step alone; without it the wrapper's own choice holds. Tensors are
        for steps planned on the device; see `DevicePlanner.plan`.
        """
        if self._plan is not None:
            raise PlanError(
                f"plan: got a second plan while one is {self._plan.state}; allowed after commit or "
                "abort; finish the step first"
            )
        self.pool.require_bound()
        planner: Any = self.planner  # tensors are refused by the host's
        self._plan = planner.plan(
            sequences,
            windows,
            bucket=bucket,
            window=window,
            force_fold=force_fold,
            parents=parents,
            direct=self._direct if direct is None else direct,
        )
        plan: Plan = self._plan
        if self._checks and isinstance(plan, DevicePlan):
            debug.check_device_plan(self.pool, plan)
        elif self._checks:
            debug.check_plan(self.pool, plan)
        return plan

    def fold(self) -> None:
        """Fold the sequences that the plan selected; once a step, before the first `run`."""
        plan = self._current("fold")
        ops.fold(self.planner, plan, backend=self.backend)
        if self._checks:
            debug.check_guards(self.pool)
            debug.check_finite_states(self.pool, plan)

    def conv(self, layer: int, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's convolution over the window; see `ops.conv_update`."""
        return ops.conv_update(
            self.pool, self._current("conv"), layer, x, out=out, backend=self.backend
        )

    def run(
        self, layer: int, *, out: torch.Tensor | None = None, **inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Append the window's rows in one layer and return its outputs; see `ops.readout`.

        In a direct step the layer's states move instead, so it may run only once.
        """
        plan = self._current("run")
        y = ops.readout(self.pool, plan, layer, out=out, backend=self.backend, **inputs)
        if self._checks:
            debug.check_guards(self.pool)
            if plan.direct:
                debug.check_finite_states(self.pool, plan, layer)
            debug.check_finite_outputs(plan, layer, y)
        return y

    def commit(
        self,
        accepted: ArrayLike | torch.Tensor | None = None,
        *,
        paths: Sequence[ArrayLike] | torch.Tensor | None = None,
    ) -> NDArray[np.int32] | torch.Tensor:
        """Advance every sequence by its accepted tokens, by default all of its window.

        A plan of draft trees takes `paths` instead; see `ops.commit`. Returns the counts, int32
        ``[batch]``, or ``[bucket]`` on the device where the step was planned there.

        Raises
        ------
        PlanError
            A layer of the pool did not run, so its rows would be missing.
        InputError
            A count outside 0..window; of a direct step, any count but the window.
        """
        plan = self._current("commit")
        missing = [layer for layer in self.pool.layers if layer not in plan.layers_run]
        some = isinstance(plan, DevicePlan) or plan.windows.any()
        if missing and plan.state == "folded" and some:
            raise PlanError(
                f"commit: got no run of layers {missing} in this step; allowed after every layer "
                f"of the pool ran; run them, or abort{'(free=True)' if plan.moved else ''}"
            )
        counts = ops.commit(self.planner, plan, accepted, paths=paths, backend=self.backend)
        self._plan = None
        self._count(plan, counts)
        return counts

    def abort(self, *, free: bool = False) -> None:
        """Drop the window; see `HostPlanner.abort`.

        A direct step of which a layer ran can only be aborted with `free`, which ends the sequences
        whose states have moved.
        """
        plan = self._current("abort")
        folded = plan.state == "folded"
        self.planner.abort(plan, free=free)
        self._plan = None
        self.counters.aborted += 1
        if folded:
            self._count_folds(plan)

    def materialize(self, sequence: int, rows: int | None = None) -> torch.Tensor:
        """The full state of a sequence; see `ops.materialize`.

        Raises
        ------
        PlanError
            A direct step has moved the sequence in some layers and is not committed.
        """
        plan = self._plan
        if plan is not None and plan.moved:
            slot = self.pool.cursors.peek(sequence)
            if slot in plan.slots[plan.windows > 0]:
                raise PlanError(
                    f"materialize: got {self.pool.cursors.describe(sequence)}, which a direct step "
                    "is moving; allowed before its first layer and after commit; commit first"
                )
        return ops.materialize(self.pool, sequence, rows, backend=self.backend)

    def warmup(
        self,
        buckets: Sequence[int] | None = None,
        *,
        windows: Sequence[int] | None = None,
        direct: bool | None = None,
        inputs: Sequence[Mapping[str, torch.Tensor | None]] | None = None,
        conv: bool | Sequence[Mapping[str, torch.Tensor | None]] = True,
    ) -> None:
        """Compile and load every kernel that later steps launch, so that none waits for a compiler.

        Before the first step, or before CUDA graphs are captured. Sequences may be alive; nothing
        of the pool changes. Again after `StatePool.resize`.

        Parameters
        ----------
        buckets : sequence of int, optional
            Padded batch sizes; those of the wrapper if omitted.
        windows : sequence of int, optional
            Tokens per row; 1 to the pool's `max_window` if omitted.
        direct : bool, optional
            Whether steps may be direct ones; if omitted, where the wrapper's own choice is that.
        inputs, conv
            Examples of the tensors that `run` and `conv` will get, where they are not contiguous
            or of other dtypes than the pool's and float32; see `ops.warmup`. ``conv=False``: the
            caller convolves.

        Raises
        ------
        PlanError
            Between plan and commit or abort.
        """
        if self._plan is not None:
            raise PlanError(
                f"warmup: got a plan that is {self._plan.state}; allowed after commit or abort; "
                "finish the step first"
            )
        sizes = self.planner.buckets if buckets is None else buckets
        if not sizes:
            raise InputError(
                "buckets: got none, and the wrapper has none; allowed integers >= 1; list the "
                "batch sizes of later steps"
            )
        rows = None if conv is True else conv or []
        for bucket in sizes:
            for window in windows or range(1, self.pool.max_window + 1):
                ops.warmup(
                    self.planner, bucket, window=window, inputs=inputs, conv=rows,
                    backend=self.backend,
                )  # fmt: skip
            if self._may_go_direct(bucket) if direct is None else direct:
                ops.warmup(
                    self.planner, bucket, direct=True, inputs=inputs, conv=rows,
                    backend=self.backend,
                )  # fmt: skip

    def _may_go_direct(self, bucket: int) -> bool:
        return self._direct if isinstance(self._direct, bool) else self._direct(bucket)

    def _current(self, action: str) -> Plan:
        if self._plan is None:
            raise PlanError(
                f"{action}: got no plan; allowed between plan and commit or abort; call plan first"
            )
        return self._plan

    def _count(self, plan: Plan, counts: NDArray[np.int32] | torch.Tensor) -> None:
        pool, total = self.pool, self.counters
        if isinstance(plan, DevicePlan):
            total.steps += 1
            total.direct_steps += plan.direct
            return
        layers = len(pool.layers)
        state = pool.spec.heads * pool.spec.dim * pool.spec.state * layers
        row = pool.spec.row_bytes(pool.dtype, pool.format) * layers
        windows = plan.windows
        active = int(np.count_nonzero(windows))
        tokens = int(windows.sum())
        accepted = int(counts.sum())
        rows = int(plan.starts[windows > 0].sum()) + tokens
        total.steps += 1
        total.tokens += accepted
        total.rows_rejected += tokens - accepted
        if plan.direct:
            total.direct_steps += 1
            total.state_bytes += active * state * 2 * pool.format.bytes_stored
        else:
            total.state_bytes += active * state * pool.format.bytes_read + rows * row
        total.state_bytes_standard += (active + tokens) * state * pool.format.standard_bytes
        self._count_folds(plan)

    def _count_folds(self, plan: Plan) -> None:
        if isinstance(plan, DevicePlan):
            return
        pool, total = self.pool, self.counters
        layers = len(pool.layers)
        total.folds += plan.fold_count
        total.forced_folds += plan.forced
        total.early_folds += plan.early
        stored = pool.spec.checkpoint_bytes(pool.format)
        row = pool.spec.row_bytes(pool.dtype, pool.format)
        folded_rows = int(plan.fold_rows[plan.fold].sum())
        total.state_bytes += layers * (2 * stored * plan.fold_count + row * folded_rows)


def _on_device(planner: str, pool: StatePool) -> bool:
    if planner not in ("auto", "host", "device"):
        raise InputError(f"planner: got {planner!r}; allowed auto, host or device; pick one")
    return planner == "device" or (planner == "auto" and pool.on_device is not None)


def _direct_steps(
    direct: str | int, pool: StatePool, backend: Backend
) -> bool | Callable[[int], bool]:
    """What `HostPlanner.plan` takes, from the wrapper's argument."""
    if direct == "auto":
        return lambda bucket: backend.prefers_direct(pool, bucket)
    if direct in ("always", "never"):
        return direct == "always"
    if isinstance(direct, bool) or not isinstance(direct, int) or direct < 1:
        raise InputError(
            f"direct: got {direct!r}; allowed auto, never, always or an integer >= 1; give the "
            "largest bucket whose steps move the states themselves"
        )
    largest = direct
    return lambda bucket: bucket <= largest
