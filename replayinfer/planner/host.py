"""The host planner: numpy arrays in, one plan out, no loop over sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, PlanError
from ..pools import StatePool
from .plan import Plan, PlanBuffer
from .policy import Policy, get_policy
from .predicate import must_fold
from .trees import check_parents

__all__ = ["HostPlanner"]


class HostPlanner:
    """Plans steps over the sequences of one pool.

    A plan takes the pages that the step will write, but moves no cursor: `folded` and `commit` do,
    and `abort` before the fold gives the pages back.

    Parameters
    ----------
    pool : StatePool
    policy : {"full", "spread"} or Policy
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

        history = cur.history[slots]
        must = must_fold(history, wins, pool.capacity)
        chosen = must | self.policy(history, wins, must, pool.capacity)  # a policy only adds
        fold = (chosen | forced) & (history > 0)

        pages = cur.checkpoint[slots]
        old_table = cur.table[slots]
        table = old_table
        index = np.flatnonzero(fold)
        starts = np.where(fold, 0, history)
        source = pages[index]
        dropped = _NO_IDS
        moved = _NO_INDEX
        if index.size:
            # Sharing is judged by the counts as they are now, for all folds of the launch alike.
            moved = index[pool.checkpoint_ids.refs[source] > 1]
            table, dropped = self._drop_shared(old_table, index)

        missing = self._missing(table, starts, wins)
        needed = int(np.count_nonzero(missing))
        pool.checkpoint_ids.require(moved.size)
        pool.input_ids.require(needed)
        taken_inputs = taken_checkpoints = released = _NO_IDS
        if needed:
            taken_inputs = pool.input_ids.take(needed)
            if table is old_table:
                table = old_table.copy()
            table[missing] = taken_inputs
        if moved.size:
            taken_checkpoints = pool.checkpoint_ids.take(moved.size)
            released = pages[moved]
            pages[moved] = taken_checkpoints  # fancy indexing above made a copy

        buffer = self._buffers.get(size)
        if buffer is None:
            buffer = self._buffers[size] = PlanBuffer(
                size, pool.sizes.pages_per_sequence, pool.device
            )
        out = buffer.begin()
        out["slot"][:n] = slots
        out["page"][:n] = pages
        out["history"][:n] = starts
        out["window"][:n] = wins
        out["conv_place"][:n] = (cur.base[slots] + history) % pool.conv.ring
        out["table"][:n] = table
        k = int(index.size)
        if k:
            out["fold_count"][0] = k
            out["fold_source"][:k] = source
            out["fold_target"][:k] = pages[index]
            out["fold_rows"][:k] = history[index]
            out["fold_table"][:k] = old_table[index]
        buffer.upload()

        cur.busy[slots] = True
        early = chosen & ~must & fold
        plan = Plan(
            pool=pool, batch=n, bucket=size, window=width, arrays=buffer.arrays,
            handles=np.array(sequences, dtype=np.int64).reshape(-1), slots=slots,
            windows=wins, starts=starts, fold=fold, fold_rows=history,
            forced=int(np.count_nonzero(fold & ~chosen)), early=int(np.count_nonzero(early)),
            fold_index=index, pages=pages, table=table,
            taken_checkpoints=taken_checkpoints, taken_inputs=taken_inputs,
            released_checkpoints=released, released_inputs=dropped, parents=tree,
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
        plan.state = "folded"

    def commit(self, plan: Plan, accepted: ArrayLike | None = None) -> NDArray[np.int32]:
        """Advance every history by the accepted tokens of its window; returns the counts.

        Raises
        ------
        InputError
            A count outside 0..window of its sequence; nothing has changed then.
        PlanError
            The plan has not folded yet, or is finished.
        """
        self.require(plan, "folded", "commit")
        counts = plan.windows if accepted is None else self._accepted(plan, accepted)
        cur = self.pool.cursors
        cur.history[plan.slots] += counts
        cur.undo[plan.slots] = counts
        self._finish(plan, "committed")
        return counts

    def abort(self, plan: Plan) -> None:
        """Drop the window of `plan`. A fold that ran stands; before it, taken pages go back."""
        pool, cur = self.pool, self.pool.cursors
        planned = plan.state == "planned"
        self.require(plan, "planned" if planned else "folded", "abort")
        if planned:
            pool.input_ids.release(plan.taken_inputs)
            pool.checkpoint_ids.release(plan.taken_checkpoints)
        else:
            # The window may have been written into the ring over the oldest rows a rollback needs.
            room = (pool.max_window - plan.windows).astype(np.int32)
            cur.undo[plan.slots] = np.minimum(cur.undo[plan.slots], room)
        self._finish(plan, "aborted")

    # Pages ------------------------------------------------------------------------------------

    def _drop_shared(
        self, table: NDArray[np.int32], index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tables after the folds of `index`: shared pages gone, private ones moved to the front."""
        rows = table[index]
        shared = (rows >= 0) & (self.pool.input_ids.refs[rows] > 1)
        if not shared.any():
            return table, _NO_IDS
        dropped = rows[shared]
        rows[shared] = -1
        rows = np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)
        result = table.copy()
        result[index] = rows
        return result, dropped

    def _missing(
        self, table: NDArray[np.int32], starts: NDArray[np.int32], windows: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Table entries that this step writes and that hold no page yet."""
        rows = self.pool.sizes.page_rows
        place = np.arange(table.shape[1], dtype=np.int32)
        first = (starts // rows)[:, None]
        last = ((starts + windows - 1) // rows)[:, None]  # before `first` for an empty window
        return (table < 0) & (place >= first) & (place <= last) & (windows > 0)[:, None]

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

    def _accepted(self, plan: Plan, accepted: ArrayLike) -> NDArray[np.int32]:
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
_NO_INDEX: NDArray[np.int64] = np.empty(0, dtype=np.int64)
