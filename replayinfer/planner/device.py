"""The device planner: the host's plan, made by a kernel from cursors that live on the device.

Nothing of a step is read back, so ``plan -> fold -> readouts -> commit`` can be enqueued before the
step before it has run, or captured as a whole in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..checks import dtype_name
from ..env import checks_enabled
from ..errors import InputError, PlanError, UnsupportedError
from ..pools import StatePool
from .host import HostPlanner
from .plan import Plan, PlanArrays, PlanBuffer
from .policy import Policy
from .trees import mask_columns

__all__ = ["CursorBackend", "DevicePlan", "DevicePlanner", "DeviceStep", "StepRequest"]

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class StepRequest:
    """What a device plan is made from.

    Attributes
    ----------
    sequences : int32 or int64 [entries]
        Handles, or slots where they are below 2^20. Anything else is a pad: negative numbers, free
        slots, stale handles.
    windows : int32 or int64 [entries], or None
        Clamped to ``0..most``; without it every window is `uniform`.
    force : bool [entries], or None
    spread : bool
        Whether the policy is ``"spread"`` instead of ``"full"``.
    direct : bool
        Whether the step moves states in place: what takes a token folds all its rows, and leaves a
        checkpoint page that it does not own. Nothing folds early then.
    """

    sequences: torch.Tensor
    windows: torch.Tensor | None
    force: torch.Tensor | None
    uniform: int
    most: int
    spread: bool
    direct: bool = False


@dataclass(frozen=True)
class DeviceStep:
    """The device arrays of a step, at fixed addresses.

    Attributes
    ----------
    arrays : PlanArrays
    handle : int64 [bucket]
        Of the sequences when they were planned, -1 for pads.
    counts : int32 [bucket]
        Accepted tokens, once committed.
    """

    arrays: PlanArrays
    handle: torch.Tensor
    counts: torch.Tensor


@runtime_checkable
class CursorBackend(Protocol):
    """Plans and moves cursors on the device of a pool, without a sync."""

    def plan_step(self, pool: StatePool, step: DeviceStep, request: StepRequest) -> None:
        """Write the whole of `step` but its counts; no cursor moves."""

    def fold_step(self, pool: StatePool, step: DeviceStep) -> None:
        """Move the cursors of the sequences that fold, or leave a shared page without rows."""

    def commit_step(
        self,
        pool: StatePool,
        step: DeviceStep,
        accepted: torch.Tensor | None,
        *,
        direct: bool = False,
    ) -> None:
        """Advance histories by `accepted` ``[entries]``, clamped to 0..window, or by windows.

        A `direct` step advances bases instead.
        """

    def abort_step(self, pool: StatePool, step: DeviceStep) -> None:
        """Drop the windows of a step that has folded."""


class DevicePlan(Plan):
    """A plan that lies on the device.

    ``batch`` counts entries; only the device knows which of them are pads. What a host plan knows
    besides (``slots``, ``windows``, ``starts``, ``fold``, ...) is read from the device when it is
    first asked for, which waits for it.
    """

    def __init__(
        self,
        pool: StatePool,
        step: DeviceStep,
        *,
        batch: int,
        bucket: int,
        window: int,
        held: NDArray[np.int64] | None,
        direct: bool = False,
        taken: NDArray[np.int32] | None = None,
    ) -> None:
        self.pool = pool
        self.step = step
        self.arrays = step.arrays
        self.batch, self.bucket, self.window = batch, bucket, window
        self.held = held  # slots, where the host knows them
        self.taken = taken  # tokens of a direct step by entry, where the host knows them
        self.parents = None
        self.direct = direct
        self.state = "planned"
        self.layers_run = set()

    def __repr__(self) -> str:
        return f"DevicePlan(bucket={self.bucket}, window={self.window}, state={self.state!r})"

    def __getattr__(self, name: str) -> Any:
        if name not in _READ:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._read()
        return self.__dict__[name]

    @property
    def moved(self) -> bool:
        """Whether a direct step has begun; its windows, which only the device knows, may be 0."""
        return self.direct and bool(self.layers_run)

    def ring_places(self) -> NDArray[np.int64]:
        return self._host(self.arrays.conv_place).astype(np.int64)

    def _host(self, array: torch.Tensor) -> NDArray[Any]:
        values: NDArray[Any] = array[: self.batch].cpu().numpy().copy()  # not a view, on a CPU
        return values

    def _read(self) -> None:
        arrays = self.arrays
        count = int(arrays.fold_count)
        self.handles = self._host(self.step.handle)
        self.slots = self._host(arrays.slot).astype(np.int64)
        self.windows = self._host(arrays.window)
        self.starts = self._host(arrays.history)
        self.pages = self._host(arrays.page)
        self.table = self._host(arrays.table)
        # A page belongs to one sequence once the folds are done, so it names its row.
        targets = arrays.fold_target[:count].cpu().numpy()
        order = np.argsort(self.pages, kind="stable")
        self.fold_index = order[np.searchsorted(self.pages, targets, sorter=order)]
        self.fold = np.zeros(self.batch, dtype=bool)
        self.fold[self.fold_index] = True
        self.fold_rows = self.starts.copy()
        self.fold_rows[self.fold_index] = arrays.fold_rows[:count].cpu().numpy()


_READ = frozenset(
    {
        "handles", "slots", "windows", "starts", "pages", "table",
        "fold", "fold_index", "fold_rows",
    }
)  # fmt: skip


class DevicePlanner(HostPlanner):
    """Plans steps on the device of a pool made with ``planner="device"``.

    The contract is that of `HostPlanner`, with these differences:

    - Nothing waits for the device, and nothing is taken: a sequence owns the pages it can need.
    - Sequences may be a device tensor, of handles or slots. What does not live is a pad.
    - Counts and windows on the device are clamped where the host would refuse them. With
      ``REPLAYINFER_CHECK=1`` they are read and refused.
    - Who holds a sequence is known to the host only if it was named there. From plan to commit or
      abort, the named ones refuse fork, rollback, seed and free, as on the host; while a plan made
      from a tensor is in progress, all sequences do. What is enqueued after a step takes effect
      after it. A freed sequence of a step that is not yet committed is left alone by the commit.
    - A direct step needs no free page: a sequence copies a page that others hold into its own.
      Once a layer has run, its commit takes the whole windows, whatever counts on the device say;
      the host refuses others where it knows handles, windows and counts. To hold a sequence back,
      give it a window of 0.
    - No draft trees, and only the policies that have a name.

    Parameters
    ----------
    pool : StatePool
    kernels : CursorBackend
        What makes the plan and moves the cursors: a backend.
    policy : {"full", "spread"}
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
        if policy not in ("full", "spread"):
            raise UnsupportedError(
                f"policy: got {policy!r}; allowed full or spread on the device; pick one, or plan "
                "on the host"
            )
        if not isinstance(kernels, CursorBackend):
            raise UnsupportedError(
                f"backend: got {getattr(kernels, 'name', kernels)!r}, which does not plan on the "
                "device; allowed torch, triton, or one with the methods of CursorBackend; plan on "
                "the host"
            )
        super().__init__(pool, policy=policy, buckets=buckets)
        self.kernels = kernels
        self._spread = policy == "spread"
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
        parents: ArrayLike | None = None,
        direct: bool | Callable[[int], bool] = False,
    ) -> DevicePlan:
        """Plan one step; enqueues one kernel.

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
        parents
            Refused: plan those steps on the host.
        direct : bool or function of the bucket
            As on the host. Windows on the device can be those of a direct step only with
            ``window=1``. What is chosen depends on the bucket and `window` alone, so that a CUDA
            graph is always of one kind, and graphs of either kind may follow each other.

        Raises
        ------
        InputError, StaleHandleError, PlanError
            Nothing has changed then.
        UnsupportedError
            Draft trees.
        """
        pool, cur = self.pool, self.pool.cursors
        if parents is not None:
            raise UnsupportedError(
                "plan: got draft trees; allowed chains, on the device; use a wrapper with "
                "planner='host'"
            )
        held = None
        if isinstance(sequences, torch.Tensor):
            cur.require_awake()
            entries = self._entries(sequences)
            given = sequences
        else:
            self._require_no_capture("sequences")
            held = cur.resolve(sequences, on_device=True)
            entries = int(held.size)
            given = pool.upload(torch.from_numpy(np.array(sequences, dtype=np.int64).reshape(-1)))
        uniform, new, longest = self._new_tokens(windows, entries)
        size = self._bucket(entries, bucket)
        if isinstance(windows, torch.Tensor) and window is None:
            window = pool.max_window
        most = np.array([longest], dtype=np.int32)
        width = self._width(most, window)
        goes_direct = self._goes_direct(direct, most, width, False, size)
        force = self._force(force_fold, entries)
        if size in self._in_use:
            raise PlanError(
                f"plan: got a second plan in bucket {size} before the first was committed or "
                "aborted; allowed one at a time, since their arrays share addresses; finish it, or "
                "use another wrapper"
            )
        spread = self._spread and not goes_direct
        request = StepRequest(given, new, force, uniform, width, spread, goes_direct)
        if self._checks:
            _check_request(request)
        step = self._step(size)
        self.kernels.plan_step(pool, step, request)
        if held is None:
            cur.unnamed += 1
        else:
            cur.busy[held] = True
        taken = None
        if goes_direct and held is not None and not isinstance(windows, torch.Tensor):
            taken = self._windows(windows, entries)
        plan = DevicePlan(
            pool, step, batch=entries, bucket=size, window=width, held=held, direct=goes_direct,
            taken=taken,
        )  # fmt: skip
        self._in_use[size] = plan
        return plan

    def folded(self, plan: Plan) -> None:
        """Enqueue the move of the folding sequences' cursors, behind the fold launch."""
        self.require(plan, "planned", "fold")
        self.kernels.fold_step(self.pool, self._steps[plan.bucket])
        plan.state = "folded"

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
        counts = None if accepted is None else self._counts(plan, accepted)
        if self._checks and counts is not None:
            _check_counts(plan, counts)
        if plan.moved:
            if accepted is not None and not isinstance(accepted, torch.Tensor):
                _check_taken(plan, np.asarray(accepted))
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
        forced folds, counts of either type. Kernels for other types are compiled when they are
        first given.
        """
        assert isinstance(plan, DevicePlan)
        pool, step = self.pool, plan.step
        pads = torch.full((plan.bucket,), -1, dtype=torch.int64, device=pool.device)
        zeros = torch.zeros(plan.bucket, dtype=torch.int32, device=pool.device)
        for windows, force in itertools.product((None, zeros), (None, zeros.bool())):
            spread = self._spread and not plan.direct
            request = StepRequest(pads, windows, force, 1, plan.window, spread, plan.direct)
            self.kernels.plan_step(pool, step, request)
        self.kernels.fold_step(pool, step)
        for counts in (None, zeros, zeros.long()):
            self.kernels.commit_step(pool, step, counts, direct=plan.direct)
        self.kernels.abort_step(pool, step)

    # Arguments --------------------------------------------------------------------------------

    def _entries(self, sequences: torch.Tensor) -> int:
        self._check_vector("sequences", sequences, _INTEGERS, None, "handles or slots")
        return int(sequences.shape[0])

    def _new_tokens(
        self, windows: ArrayLike | torch.Tensor | None, entries: int
    ) -> tuple[int, torch.Tensor | None, int]:
        """The window of all, or those of each, and the longest that the host knows of."""
        if windows is None:
            return 1, None, 1
        if isinstance(windows, torch.Tensor):
            self._check_vector("windows", windows, _INTEGERS, entries, "one window per entry")
            return 0, windows, 0
        values = self._windows(windows, entries)
        longest = int(values.max(initial=0))
        if np.ndim(windows) == 0:
            return longest, None, longest
        self._require_no_capture("windows")
        return 0, self.pool.upload(torch.from_numpy(values)), longest

    def _force(
        self, force_fold: ArrayLike | torch.Tensor | None, entries: int
    ) -> torch.Tensor | None:
        if force_fold is None:
            return None
        if isinstance(force_fold, torch.Tensor) and force_fold.dim():
            allowed = (torch.bool,)
            self._check_vector("force_fold", force_fold, allowed, entries, "one flag per entry")
            return force_fold
        values = self._mask(force_fold, entries)
        if not values.any():
            return None
        self._require_no_capture("force_fold")
        return self.pool.upload(torch.from_numpy(values.copy()))

    def _counts(self, plan: DevicePlan, accepted: ArrayLike | torch.Tensor) -> torch.Tensor:
        advice = "one count per entry of the plan, pads included"
        counts = accepted
        if not isinstance(counts, torch.Tensor):
            try:
                counts = torch.from_numpy(np.array(accepted))
            except (TypeError, ValueError):
                raise InputError(
                    f"accepted: got {type(accepted).__name__}; allowed int32 or int64 "
                    f"[{plan.batch}]; give {advice}"
                ) from None
            if not counts.numel():
                counts = counts.int()
        on_host = counts.device.type == "cpu" and self.pool.device.type != "cpu"
        device = counts.device if on_host else self.pool.device
        self._check_vector("accepted", counts, _INTEGERS, plan.batch, advice, device)
        if on_host:
            self._require_no_capture("accepted")
            return self.pool.upload(counts)
        return counts

    def _check_vector(
        self,
        name: str,
        value: torch.Tensor,
        dtypes: tuple[torch.dtype, ...],
        entries: int | None,
        advice: str,
        device: torch.device | None = None,
    ) -> None:
        device = device or self.pool.device
        fits = value.dim() == 1 and value.dtype in dtypes and value.device == device
        if fits and entries is not None:
            fits = value.shape[0] == entries
        if not fits or not value.is_contiguous():
            allowed = " or ".join(dtype_name(d) for d in dtypes)
            raise InputError(
                f"{name}: got {dtype_name(value.dtype)} {list(value.shape)} of strides "
                f"{list(value.stride())} on {value.device}; allowed contiguous {allowed} "
                f"[{'entries' if entries is None else entries}] on {device}; give {advice}"
            )

    def _require_no_capture(self, name: str) -> None:
        """A graph would replay the upload of what a host array held at capture."""
        if self.pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise PlanError(
                f"{name}: got values on the host while the stream captures a CUDA graph; allowed a "
                "tensor on the device, since a graph would replay these; write new values into it "
                "before each replay"
            )

    # Order ------------------------------------------------------------------------------------

    def _step(self, bucket: int) -> DeviceStep:
        step = self._steps.get(bucket)
        if step is None:
            pool = self.pool
            buffer = self._buffers[bucket] = PlanBuffer(
                bucket, pool.sizes.pages_per_sequence, mask_columns(pool.max_window), pool.device
            )
            step = self._steps[bucket] = DeviceStep(
                buffer.arrays,
                torch.full((bucket,), -1, dtype=torch.int64, device=pool.device),
                torch.zeros(bucket, dtype=torch.int32, device=pool.device),
            )
        return step

    def _finish(self, plan: Plan, state: str) -> None:
        assert isinstance(plan, DevicePlan)
        if plan.held is None:
            self.pool.cursors.unnamed -= 1
        else:
            self.pool.cursors.busy[plan.held] = False
        plan.state = state  # type: ignore[assignment]
        del self._in_use[plan.bucket]


def _check_request(request: StepRequest) -> None:
    """Refuse what the kernel would clamp, or plan twice; syncs."""
    named = request.sequences[request.sequences >= 0].cpu().numpy()
    slots = named & ((1 << 20) - 1)
    if np.unique(slots).size != slots.size:
        twice = int(np.flatnonzero(np.bincount(slots) > 1)[0])
        raise InputError(
            f"sequences: got slot {twice} twice; allowed each once; remove the duplicate"
        )
    if request.windows is not None and request.windows.numel():
        low, high = int(request.windows.min()), int(request.windows.max())
        if low < 0 or high > request.most:
            raise InputError(
                f"windows: got {low if low < 0 else high}; allowed 0..{request.most}; without "
                "REPLAYINFER_CHECK it is clamped"
            )


def _check_counts(plan: DevicePlan, counts: torch.Tensor) -> None:
    """Refuse what the kernel would clamp; syncs."""
    given = counts.cpu().numpy()
    windows = plan.step.arrays.window.cpu().numpy()[: plan.batch]
    live = plan.step.handle.cpu().numpy()[: plan.batch] >= 0
    least = windows if plan.moved else 0 * windows
    bad = live & ((given < least) | (given > windows))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        what = "what its direct step took" if plan.moved else "its window"
        raise InputError(
            f"accepted: got {int(given[i])} for entry {i} of the plan; allowed "
            f"{least[i]}..{windows[i]}, {what}; nothing was committed; without REPLAYINFER_CHECK "
            "it is clamped"
        )


def _check_taken(plan: DevicePlan, given: NDArray[Any]) -> None:
    """Refuse to drop a token of a direct step, where the host can see it without a wait."""
    if plan.taken is None or not (short := given < plan.taken).any():
        return
    i = int(np.flatnonzero(short)[0])
    raise InputError(
        f"accepted: got {int(given[i])} for entry {i} of a direct step; allowed {plan.taken[i]}, "
        "its window, since its state has moved already; commit it and free the sequence, or plan "
        "with direct=False where a token may be refused"
    )
