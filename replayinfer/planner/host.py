"""The host planner: numpy arrays in, one plan out, no loop over sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, PlanError
from ..pools import StatePool
from .arguments import (
    choose_bucket,
    count_array,
    flag_array,
    goes_direct,
    step_width,
    window_array,
)
from .changes import step_changes
from .plan import Plan, PlanArrays, PlanBuffer
from .policy import Policy, get_policy
from .trees import ancestor_masks, check_parents, check_paths, mask_columns

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
        wins = window_array(pool, windows, n)
        forced = flag_array(force_fold, n)
        size = choose_bucket(self.buckets, n, bucket)
        width = step_width(pool, wins, window)
        tree = None if parents is None else check_parents(parents, wins, width)
        self._require_unused(size)

        pool.refresh(slots)
        history = cur.history[slots]
        moves = goes_direct(direct, wins, width, tree is not None, size)
        todo = step_changes(pool, self.policy, slots, wins, forced, moves)
        if moves and direct is not True and not todo.fit(pool):
            moves = False
            todo = step_changes(pool, self.policy, slots, wins, forced, moves)
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
            direct=moves,
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

    def accept(
        self, plan: Plan, paths: Sequence[ArrayLike] | torch.Tensor
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """What accepted `paths` of draft trees are: their counts and nodes; no cursor moves.

        Their rows are compacted then, and `commit` takes the counts. Paths in a tensor on a device
        are waited for.

        Returns
        -------
        counts : int32 [batch]
        nodes : int32 [batch, window]
            -1 beyond each path.

        Raises
        ------
        InputError
            A path that does not start at the history, skips a parent, or leaves the window.
        PlanError
            The plan has not folded yet, or is finished.
        """
        self.require(plan, "folded", "commit")
        assert plan.parents is not None, "paths of a plan of chains"
        given = paths.cpu().numpy() if isinstance(paths, torch.Tensor) else paths
        return check_paths(given, plan.parents, plan.windows)

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
        counts = plan.windows if accepted is None else count_array(plan, accepted)
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

    def buffers(self) -> list[PlanArrays]:
        """The arrays of every bucket that was planned so far."""
        return [buffer.arrays for buffer in self._buffers.values()]

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

    def _require_unused(self, bucket: int) -> None:
        if bucket in self._in_use:
            raise PlanError(
                f"plan: got a second plan in bucket {bucket} before the first was committed or "
                "aborted; allowed one at a time, since their arrays share addresses; finish it, or "
                "use another wrapper"
            )

    def _finish(self, plan: Plan, state: str) -> None:
        self.pool.cursors.busy[plan.slots] = False
        plan.state = state  # type: ignore[assignment]
        del self._in_use[plan.bucket]


_NO_IDS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
