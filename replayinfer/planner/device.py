"""The device planner: the host's plan, made by a kernel from cursors that live on the device.

Nothing of a step is read back, so ``plan -> fold -> readouts -> commit`` can be enqueued before the
step before it has run, or captured as a whole in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..env import checks_enabled
from ..errors import PlanError, UnsupportedError
from ..pools import StatePool
from . import device_checks as checks
from .arguments import choose_bucket, goes_direct, step_width, window_array
from .device_inputs import (
    INTEGERS,
    check_array,
    count_vector,
    forced_folds,
    new_tokens,
    parent_matrix,
    path_matrix,
    require_no_capture,
)
from .device_plan import DevicePlan
from .device_step import CursorBackend, DeviceStep, StepRequest
from .device_warmup import warm
from .host import HostPlanner
from .plan import Plan, PlanBuffer
from .policy import Deadline, Policy, full, get_policy, spread
from .trees import mask_columns

__all__ = ["CursorBackend", "DevicePlan", "DevicePlanner", "DeviceStep", "StepRequest"]


class DevicePlanner(HostPlanner):
    """Plans steps on the device of a pool made with ``planner="device"``.

    The contract is that of `HostPlanner`, with these differences:

    - Nothing waits for the device, and nothing is taken: a sequence owns the pages it can need.
    - Sequences may be a device tensor, of handles or slots. What does not live is a pad.
    - Counts and windows on the device are clamped where the host would refuse them, a parent that
      does not come before its node counts as -1, and a path ends before its first wrong node. With
      ``REPLAYINFER_CHECK=1`` they are read and refused.
    - Who holds a sequence is known to the host only if it was named there. From plan to commit or
      abort, the named ones refuse fork, rollback, seed and free, as on the host; while a plan made
      from a tensor is in progress, all sequences do. What is enqueued after a step takes effect
      after it. A freed sequence of a step that is not yet committed is left alone by the commit.
    - A direct step needs no free page: a sequence copies a page that others hold into its own.
      Once a layer has run, its commit takes the whole windows, whatever counts on the device say;
      the host refuses others where it knows handles, windows and counts. To hold a sequence back,
      give it a window of 0.
    - Draft trees of pools with a `max_window` of up to 31, the bits of a mask; and only the
      policies that have a name, since a function of host arrays cannot be called there.

    Parameters
    ----------
    pool : StatePool
    kernels : CursorBackend
        What makes the plan and moves the cursors: a backend.
    policy : {"full", "spread", "deadline:FOLDS"} or Deadline
    buckets : sequence of int, optional

    Notes
    -----
    Plans of one planner share their arrays by bucket, so its steps run one after the other. Two
    half-batches on two streams need two planners; their sequences must not overlap, and pool calls
    go to the current stream: let it wait for the stream that last used a sequence before that is
    freed or forked, and each stream for the current one after `alloc`.
    """

    def __init__(
        self,
        pool: StatePool,
        kernels: CursorBackend,
        *,
        policy: str | Policy = "full",
        buckets: Sequence[int] | None = None,
    ) -> None:
        if pool.on_device is None:
            raise UnsupportedError(
                "planner: got 'device' for a pool whose cursors are on the host; allowed with "
                "StatePool(..., planner='device'); make the pool so, or plan on the host"
            )
        chosen = get_policy(policy)
        if chosen not in (full, spread) and type(chosen) is not Deadline:
            raise UnsupportedError(
                f"policy: got {policy!r}; allowed full, spread or deadline:FOLDS on the device; "
                "pick one, or plan on the host"
            )
        if not isinstance(kernels, CursorBackend):
            raise UnsupportedError(
                f"backend: got {getattr(kernels, 'name', kernels)!r}, which does not plan on the "
                "device; allowed torch, triton, or one with the methods of CursorBackend; plan on "
                "the host"
            )
        super().__init__(pool, policy=chosen, buckets=buckets)
        self.kernels = kernels
        self._steps: dict[int, DeviceStep] = {}
        self._checks = checks_enabled()
        pool.on_device.ahead = True

    def plan(
        self,
        sequences: Sequence[int] | NDArray[np.int64] | torch.Tensor,
        windows: ArrayLike | torch.Tensor | None = None,
        *,
        bucket: int | None = None,
        window: int | None = None,
        force_fold: ArrayLike | torch.Tensor | None = None,
        parents: ArrayLike | torch.Tensor | None = None,
        direct: bool | Callable[[int], bool] = False,
    ) -> DevicePlan:
        """Plan one step; enqueues one kernel, or two for draft trees.

        Parameters
        ----------
        sequences : handles, or int32 or int64 Tensor [entries]
            Each once. On the device: handles, or slots (`StatePool.slot`), which are below 2^20;
            an entry that is negative or does not live is a pad. So is a stale handle; a slot that
            was freed and taken again is its new sequence.
        windows : int, integer array or Tensor, optional
            New tokens of each sequence; 1 if omitted. On the device they are clamped to 0..window.
        bucket : int, optional
            Rows of the padded batch; at least the number of entries.
        window : int, optional
            Tokens per row of the step's tensors. If omitted the longest of `windows`, or the pool's
            `max_window` where they are on the device.
        force_fold : bool, bool array or Tensor, optional
        parents : int32 or int64 Tensor, or integers, [entries, window], optional
            As on the host. Rows of pads, and what lies beyond a window, do not matter; with windows
            on the host and parents there, those of pads are looked at like all others.
        direct : bool or function of the bucket
            As on the host. Windows on the device can be those of a direct step only with
            ``window=1``. What is chosen depends on the bucket and `window` alone, so that a CUDA
            graph is always of one kind, and graphs of either kind may follow each other; a step of
            draft trees is never direct.

        Raises
        ------
        InputError, StaleHandleError, PlanError
            Nothing has changed then.
        UnsupportedError
            Draft trees in a pool of larger windows than a mask has bits.
        """
        pool, cur = self.pool, self.pool.cursors
        tree = parents is not None
        held = None
        if isinstance(sequences, torch.Tensor):
            cur.require_awake()
            check_array(pool, "sequences", sequences, INTEGERS, (None,), "handles or slots")
            entries = int(sequences.shape[0])
            given = sequences
        else:
            require_no_capture(pool, "sequences")
            held = cur.resolve(sequences, on_device=True)
            entries = int(held.size)
            given = pool.upload(torch.from_numpy(np.array(sequences, dtype=np.int64).reshape(-1)))
        uniform, new, longest = new_tokens(pool, windows, entries)
        size = choose_bucket(self.buckets, entries, bucket)
        if isinstance(windows, torch.Tensor) and window is None:
            window = pool.max_window
        most = np.array([longest], dtype=np.int32)
        width = step_width(pool, most, window)
        moves = goes_direct(direct, most, width, tree, size)
        force = forced_folds(pool, force_fold, entries)
        wins = None  # where the host knows them
        if (tree or moves) and not isinstance(windows, torch.Tensor):
            wins = window_array(pool, windows, entries)
        lines, good = None, None
        if parents is not None:
            lines, good = parent_matrix(pool, parents, wins, (entries, width))
        self._require_unused(size)
        early, budget = self._early(entries, moves)
        request = StepRequest(
            given, new, force, uniform, width, early, moves, budget=budget, parents=lines
        )
        if self._checks:
            checks.check_request(request)
        step = self._step(size)
        self.kernels.plan_step(pool, step, request)
        if self._checks and lines is not None:
            checks.check_trees(step, lines)
        if held is None:
            cur.unnamed += 1
        else:
            cur.busy[held] = True
        known = None if good is None or wins is None else (good, wins)
        plan = DevicePlan(
            pool, step, batch=entries, bucket=size, window=width, held=held, direct=moves,
            tree=tree, known=None if held is None else known,
            taken=wins if moves and held is not None else None,
        )  # fmt: skip
        self._in_use[size] = plan
        return plan

    def folded(self, plan: Plan) -> None:
        """Enqueue the move of the folding sequences' cursors, behind the fold launch."""
        self.require(plan, "planned", "fold")
        self.kernels.fold_step(self.pool, self._steps[plan.bucket])
        plan.state = "folded"

    def accept(  # type: ignore[override]  # what the host has as arrays stays on the device
        self, plan: Plan, paths: Sequence[ArrayLike] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What accepted `paths` of draft trees are: their counts and nodes; enqueues one kernel.

        Parameters
        ----------
        paths : int32 or int64 Tensor [entries, window], or a list of nodes per entry
            From the root down, -1 behind each path. Those of pads do not matter. On the device a
            path is cut before its first node that is no child of the one before it, or lies beyond
            the window; ``REPLAYINFER_CHECK=1`` refuses it. On the host it is refused where handles,
            windows and parents were given there, too.

        Returns
        -------
        counts : int32 Tensor [entries]
            Nodes accepted, 0 for pads.
        nodes : int32 Tensor [bucket, max_window]
            -1 beyond each path. Both at addresses that stay the same for the bucket.

        Raises
        ------
        InputError
            Paths of the wrong form; nothing has changed then.
        PlanError
            The plan has not folded yet, or is finished.
        """
        self.require(plan, "folded", "commit")
        assert isinstance(plan, DevicePlan)
        given = path_matrix(plan, paths)
        if self._checks:
            checks.check_nodes(plan, given)
        self.kernels.accept_paths(self.pool, plan.step, given)
        return plan.step.counts[: plan.batch], plan.step.nodes

    def commit(  # type: ignore[override]  # what the host has as an array stays on the device
        self, plan: Plan, accepted: ArrayLike | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Advance every history by the accepted tokens of its window; enqueues one kernel.

        Parameters
        ----------
        accepted : int32 or int64 Tensor [entries], or integers, optional
            On the device or on the host; the whole windows if omitted. Entries of pads do not
            matter. A count outside 0..window is clamped; ``REPLAYINFER_CHECK=1`` refuses it. So is
            any but the window in a direct step of which a layer ran, since its states have moved.

        Returns
        -------
        int32 Tensor [bucket]
            The counts, 0 for pads, at an address that stays the same for the bucket.

        Raises
        ------
        InputError
            Counts of the wrong form, or below the windows of a direct step where all of it is known
            on the host; nothing has changed then.
        PlanError
            The plan has not folded yet, or is finished.
        """
        self.require(plan, "folded", "commit")
        assert isinstance(plan, DevicePlan)
        counts = None if accepted is None else count_vector(plan, accepted)
        if self._checks and counts is not None:
            checks.check_counts(plan, counts)
        if plan.moved:
            if accepted is not None and not isinstance(accepted, torch.Tensor):
                checks.check_taken(plan, np.asarray(accepted))
            counts = None  # a state that has moved takes no token back
        self.kernels.commit_step(self.pool, plan.step, counts, direct=plan.direct)
        self._finish(plan, "committed")
        return plan.step.counts

    def abort(self, plan: Plan, *, free: bool = False) -> None:
        """Drop the window of `plan`. A fold that ran stands.

        Parameters
        ----------
        free : bool
            Also end the sequences that were to take a token; reads the plan from the device. That
            is the one way out of a direct step that cannot be finished.

        Raises
        ------
        PlanError
            The plan is finished, or a direct step of which a layer ran, without `free`.
        """
        planned = plan.state == "planned"
        self.require(plan, "planned" if planned else "folded", "abort")
        assert isinstance(plan, DevicePlan)
        if plan.moved and not free:
            raise PlanError(
                f"abort: got a direct step of which layers {sorted(plan.layers_run)} ran; allowed "
                "before its first layer, since their states have moved; run the others and commit, "
                "or end the sequences with abort(free=True)"
            )
        if not planned:
            self.kernels.abort_step(self.pool, plan.step)
        gone = plan.handles[plan.windows > 0] if free else None
        self._finish(plan, "aborted")
        if gone is not None:
            self.pool.free(gone)

    def warmup(self, plan: Plan) -> None:
        """Launch every kernel of a step on a plan of pads: none moves a cursor.

        Sequences as handles or slots of int64, windows of one length or int32, with and without
        forced folds, counts of either type, and for windows of several tokens parents and paths of
        either type. Kernels for other types are compiled when they are first given.
        """
        assert isinstance(plan, DevicePlan)
        pool, step = self.pool, plan.step
        early, budget = self._early(plan.bucket, plan.direct)
        warm(self.kernels, pool, step, plan.window, early, budget, plan.direct)

    # Order ------------------------------------------------------------------------------------

    def _step(self, bucket: int) -> DeviceStep:
        step = self._steps.get(bucket)
        if step is None:
            pool = self.pool
            buffer = self._buffers[bucket] = PlanBuffer(
                bucket, pool.sizes.pages_per_sequence, mask_columns(pool.max_window), pool.device
            )
            step = self._steps[bucket] = DeviceStep.make(buffer.arrays, pool.max_window)
        return step

    def _finish(self, plan: Plan, state: str) -> None:
        assert isinstance(plan, DevicePlan)
        if plan.held is None:
            self.pool.cursors.unnamed -= 1
        else:
            self.pool.cursors.busy[plan.held] = False
        plan.state = state  # type: ignore[assignment]
        del self._in_use[plan.bucket]

    def _early(self, entries: int, direct: bool) -> tuple[bool, int]:
        """Whether the policy folds early, and the folds that it grants a step; 0: the fair share.

        More than all cannot fold, so a larger budget is that of all.
        """
        if isinstance(self.policy, Deadline) and not direct:
            return True, min(self.policy.folds, max(entries, 1))
        return self.policy is spread and not direct, 0
