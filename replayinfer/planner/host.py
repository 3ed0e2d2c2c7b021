"""The host planner: numpy arrays in, one plan out, no loop over sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, PlanError
from ..pools import StatePool
from .changes import step_changes
from .plan import Plan, PlanBuffer
from .policy import Policy, get_policy
from .trees import ancestor_masks, check_parents, mask_columns

__all__ = ["HostPlanner"]


class HostPlanner:
    """Plans steps over the sequences of one pool.

    A plan takes the pages that the step will write, but moves no cursor: `folded` and `commit` do,
    and `abort` before the fold gives the pages back.

    Parameters
    ----------
    pool : StatePool
    policy : {"full", "spread", "deadline:FOLDS"} or Policy
    buckets : sequence of int, optional
        Padded batch sizes to choose from; without it a bucket is as large as its batch.
    """

    def __init__(
        self,
        pool: StatePool,
        *,
        policy: str | Policy = "full",
        buckets: Sequence[int] | None = None,
    ) -> None:
        self.pool = pool
        self.policy = get_policy(policy)
        given = () if buckets is None else buckets
        sizes = list(given) if isinstance(given, Iterable) else [None]
        if any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in sizes):
            raise InputError(f"buckets: got {buckets!r}; allowed integers >= 1; list batch sizes")
        self.buckets = tuple(sorted(set(sizes)))
        self._buffers: dict[int, PlanBuffer] = {}
        self._in_use: dict[int, Plan] = {}

    def plan(
        self,
        sequences: Sequence[int] | NDArray[np.int64],
        windows: ArrayLike | None = None,
        *,
        bucket: int | None = None,
        window: int | None = None,
        force_fold: ArrayLike | None = None,
        parents: ArrayLike | None = None,
        direct: bool | Callable[[int], bool] = False,
    ) -> Plan:
        """Plan one step.

        Parameters
        ----------
        sequences : handles
            Live sequences of the pool that no other plan holds, each once.
        windows : int or integer array, optional
            New tokens of each sequence, 0..max_window; 1 if omitted.
        bucket : int, optional
            Rows of the padded batch; at least the number of sequences.
        window : int, optional
            Tokens per row of the step's tensors; the longest of `windows` if omitted.
        force_fold : bool or bool array, optional
            Sequences to fold even where their window fits, e.g. before a state is published.
        parents : integer array [batch, window], optional
            Makes the windows draft trees: the parent of every node, which comes before it, or -1
            where it continues the history. Such a plan is committed with paths.
        direct : bool or function of the bucket
            Whether the step moves the states themselves instead of writing rows. Every sequence
            that takes a token folds its rows first, and leaves a checkpoint page that others hold
            for one of its own. A token whose layer ran cannot be taken back: commit takes it, and
            abort is refused. ``True`` refuses windows beyond one token and draft trees. A function
            is asked only where a direct step is possible; otherwise, and where the pages that it
            needs are not free, the step is planned for replay.

        Returns
        -------
        Plan
            It holds its sequences until `commit` or `abort`.

        Raises
        ------
        InputError, StaleHandleError, PlanError, CapacityError
            Nothing has changed then.

        Notes
        -----
        Host cost: under 300 microseconds for 512 sequences. One asynchronous upload, no sync.
        """
        pool, cur = self.pool, self.pool.cursors
        slots = cur.resolve(sequences)
        n = int(slots.size)
        wins = self._windows(windows, n)
        forced = self._mask(force_fold, n)
        size = self._bucket(n, bucket)
        width = self._width(wins, window)
        tree = None if parents is None else check_parents(parents, wins, width)
        if size in self._in_use:
            raise PlanError(
                f"plan: got a second plan in bucket {size} before the first was committed or "
                "aborted; allowed one at a time, since their arrays share addresses; finish it, or "
                "use another wrapper"
            )

        pool.refresh(slots)
        history = cur.history[slots]
        goes_direct = self._goes_direct(direct, wins, width, tree is not None, size)
        todo = step_changes(pool, self.policy, slots, wins, forced, goes_direct)
        if goes_direct and direct is not True and not todo.fit(pool):
            goes_direct = False
            todo = step_changes(pool, self.policy, slots, wins, forced, goes_direct)
        pool.checkpoint_ids.require(todo.taken)
        pool.input_ids.require(todo.needed)

        pages = cur.checkpoint[slots]  # fancy indexing makes copies
        old_table = cur.table[slots]
        table, index = todo.table, todo.index
        source = pages[index]
        taken_inputs = taken_checkpoints = released = _NO_IDS
        if todo.needed:
            taken_inputs = pool.input_ids.take(todo.needed)
            table[todo.missing] = taken_inputs
        if todo.moved.size:
            taken_checkpoints = pool.checkpoint_ids.take(todo.taken)
            released = pages[todo.moved]
            pages[todo.moved] = taken_checkpoints if todo.spares is None else todo.spares

        buffer = self._buffers.get(size)
        if buffer is None:
            buffer = self._buffers[size] = PlanBuffer(
                size, pool.sizes.pages_per_sequence, mask_columns(pool.max_window), pool.device
            )
        out = buffer.begin()
        out["slot"][:n] = slots
        out["page"][:n] = pages
        out["history"][:n] = todo.starts
        out["window"][:n] = wins
        out["conv_place"][:n] = (cur.base[slots] + history) % pool.conv.ring
        out["table"][:n] = table
        out["ancestors"][:n] = ancestor_masks(tree, out["ancestors"].shape[1])
        k = int(index.size)
        if k:
            out["fold_count"][0] = k
            out["fold_source"][:k] = source
            out["fold_target"][:k] = pages[index]
            out["fold_rows"][:k] = history[index]
            out["fold_table"][:k] = old_table[index]
        buffer.upload()

        cur.busy[slots] = True
        plan = Plan(
            pool=pool, batch=n, bucket=size, window=width, arrays=buffer.arrays,
            handles=np.array(sequences, dtype=np.int64).reshape(-1), slots=slots,
            windows=wins, starts=todo.starts, fold=todo.fold, fold_rows=history,
            forced=todo.forced, early=todo.early,
            fold_index=index, pages=pages, table=table,
            taken_checkpoints=taken_checkpoints, taken_inputs=taken_inputs,
            released_checkpoints=released, released_inputs=todo.dropped, parents=tree,
            direct=goes_direct,
        )  # fmt: skip
        self._in_use[size] = plan
        return plan

    def folded(self, plan: Plan) -> None:
        """Record that the fold launch of `plan` is enqueued: cursors of its sequences move."""
        self.require(plan, "planned", "fold")
        pool, cur = self.pool, self.pool.cursors
        slots = plan.slots
        cur.table[slots] = plan.table
        if plan.fold_index.size:
            folding = slots[plan.fold_index]
            cur.base[folding] += cur.history[folding]
            cur.history[folding] = 0
            cur.checkpoint[folding] = plan.pages[plan.fold_index]
        # Released only now: no destination of this launch can be a page that it still reads.
        pool.checkpoint_ids.release(plan.released_checkpoints)
        pool.input_ids.release(plan.released_inputs)
        pool.push(slots)
        plan.state = "folded"

    def commit(
        self, plan: Plan, accepted: ArrayLike | torch.Tensor | None = None
    ) -> NDArray[np.int32]:
        """Advance every history by the accepted tokens of its window; returns the counts.

        A direct step advances the token base instead, and histories stay 0. Counts in a tensor on
        a device are waited for.

        Raises
        ------
        InputError
            A count outside 0..window of its sequence, or below its window where a direct step has
            moved states; nothing has changed then.
        PlanError
            The plan has not folded yet, or is finished.
        """
        self.require(plan, "folded", "commit")
        counts = plan.windows if accepted is None else self._accepted(plan, accepted)
        pool, cur = self.pool, self.pool.cursors
        if plan.direct:
            cur.base[plan.slots] += counts
            cur.undo[plan.slots] = 0
        else:
            cur.history[plan.slots] += counts
            cur.undo[plan.slots] = counts
        pool.push(plan.slots)
        self._finish(plan, "committed")
        return counts

    def abort(self, plan: Plan, *, free: bool = False) -> None:
        """Drop the window of `plan`. A fold that ran stands; before it, taken pages go back.

        Parameters
        ----------
        free : bool
            Also end the sequences that were to take a token. That is the one way out of a direct
            step that cannot be finished.

        Raises
        ------
        PlanError
            The plan is finished, or a direct step of which a layer ran, without `free`.
        """
        pool, cur = self.pool, self.pool.cursors
        planned = plan.state == "planned"
        self.require(plan, "planned" if planned else "folded", "abort")
        if plan.moved and not free:
            raise PlanError(
                f"abort: got a direct step of which layers {sorted(plan.layers_run)} ran; allowed "
                "before its first layer, since their states have moved; run the others and commit, "
                "or end the sequences with abort(free=True)"
            )
        if planned:
            pool.input_ids.release(plan.taken_inputs)
            pool.checkpoint_ids.release(plan.taken_checkpoints)
        else:
            # The window may have been written into the ring over the oldest rows a rollback needs.
            room = (pool.max_window - plan.windows).astype(np.int32)
            cur.undo[plan.slots] = np.minimum(cur.undo[plan.slots], room)
            pool.push(plan.slots)
        self._finish(plan, "aborted")
        if free:
            pool.free(plan.handles[plan.windows > 0])

    # Arguments --------------------------------------------------------------------------------

    def _windows(self, windows: ArrayLike | None, n: int) -> NDArray[np.int32]:
        if windows is None:
            return np.ones(n, dtype=np.int32)
        given = _array(windows, np.int32)
        if given.dtype.kind not in "iu" or given.ndim > 1 or (given.ndim and given.size != n):
            raise InputError(
                f"windows: got {given.dtype} {list(given.shape)}; allowed an integer or an integer "
                f"array [{n}]; give one window per sequence"
            )
        limit = self.pool.max_window
        low, high = int(given.min(initial=0)), int(given.max(initial=0))
        if low < 0 or high > limit:
            raise InputError(
                f"windows: got {low if low < 0 else high}; allowed 0..{limit} (max_window of the "
                "pool); make the pool with a larger max_window, since no window is truncated"
            )
        return np.broadcast_to(given, (n,)).astype(np.int32)

    def _mask(self, mask: ArrayLike | None, n: int) -> NDArray[np.bool_]:
        if mask is None:
            return np.zeros(n, dtype=bool)
        given = _array(mask, np.bool_)
        if given.dtype != np.bool_ or given.ndim > 1 or (given.ndim and given.size != n):
            raise InputError(
                f"force_fold: got {given.dtype} {list(given.shape)}; allowed a bool or a bool "
                f"array [{n}]; give one flag per sequence"
            )
        return np.broadcast_to(given, (n,))

    def _bucket(self, n: int, bucket: int | None) -> int:
        if bucket is None:
            for size in self.buckets:
                if size >= n:
                    return size
            if self.buckets:
                raise InputError(
                    f"sequences: got {n}; allowed at most the largest bucket, {self.buckets[-1]}; "
                    "add a bucket or split the batch"
                )
            return max(n, 1)
        if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < max(n, 1):
            raise InputError(
                f"bucket: got {bucket!r}; allowed an integer >= {max(n, 1)}; pad to at least the "
                f"batch"
            )
        return bucket

    def _width(self, windows: NDArray[np.int32], window: int | None) -> int:
        longest = int(windows.max(initial=0))
        if window is None:
            return max(longest, 1)
        limit = self.pool.max_window
        if (
            isinstance(window, bool)
            or not isinstance(window, int)
            or not (max(longest, 1) <= window <= limit)
        ):
            raise InputError(
                f"window: got {window!r}; allowed {max(longest, 1)}..{limit}; it is the token "
                "axis of the step's tensors"
            )
        return window

    def _goes_direct(
        self,
        direct: bool | Callable[[int], bool],
        windows: NDArray[np.int32],
        width: int,
        tree: bool,
        bucket: int,
    ) -> bool:
        if not isinstance(direct, bool) and not callable(direct):
            raise InputError(
                f"direct: got {direct!r}; allowed a bool or a function of the bucket; say whether "
                "the step moves the states themselves"
            )
        if direct is False:
            return False
        longest = int(windows.max(initial=0))
        if direct is not True:
            return not tree and width == 1 and bool(direct(bucket))
        advice = "plan it with direct=False, since a state that has moved takes no token back"
        if tree:
            raise InputError(
                f"parents: got draft trees for a direct step; allowed windows of 0 or 1; {advice}"
            )
        if longest > 1 or width > 1:
            name, got = ("windows", longest) if longest > 1 else ("window", width)
            allowed = "0 or 1" if longest > 1 else "1"
            raise InputError(f"{name}: got {got} for a direct step; allowed {allowed}; {advice}")
        return True

    def _accepted(self, plan: Plan, accepted: ArrayLike | torch.Tensor) -> NDArray[np.int32]:
        if isinstance(accepted, torch.Tensor):
            accepted = accepted.cpu().numpy()
        counts = _array(accepted, np.int32)
        if counts.dtype.kind not in "iu" or counts.shape != (plan.batch,):
            raise InputError(
                f"accepted: got {counts.dtype} {list(counts.shape)}; allowed integers "
                f"[{plan.batch}]; give one count per sequence, pads left out"
            )
        bad = (counts < 0) | (counts > plan.windows)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise InputError(
                f"accepted: got {int(counts[i])} for sequence {i} of the plan; allowed "
                f"0..{int(plan.windows[i])}, its window; nothing was committed"
            )
        short = counts < plan.windows
        if plan.moved and short.any():
            i = int(np.flatnonzero(short)[0])
            raise InputError(
                f"accepted: got 0 for sequence {i} of a direct step; allowed 1, its window, since "
                "its state has moved already; commit it and free the sequence, or plan with "
                "direct=False where a token may be refused"
            )
        return counts.astype(np.int32)

    # Order ------------------------------------------------------------------------------------

    def require(self, plan: Plan, state: str, action: str) -> None:
        """Raise `PlanError` unless `plan` is this planner's and in that state."""
        if plan.state != state:
            order = "plan, fold, run, commit"
            raise PlanError(
                f"{action}: got a plan that is {plan.state}; allowed once it is {state}; the "
                f"order of a step is {order}"
            )
        if self._in_use.get(plan.bucket) is not plan:
            raise PlanError(
                f"{action}: got a plan of another planner; allowed those of this one; use the "
                "planner that made it"
            )

    def _finish(self, plan: Plan, state: str) -> None:
        self.pool.cursors.busy[plan.slots] = False
        plan.state = state  # type: ignore[assignment]
        del self._in_use[plan.bucket]


def _array(values: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
    """As numpy reads it; an empty list, which it takes for floats, becomes `dtype`."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths
        array = np.asarray(values, dtype=object)
    return array if array.size else array.astype(dtype)


_NO_IDS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
