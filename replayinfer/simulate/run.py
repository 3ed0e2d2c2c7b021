"""The loop: admit, plan, fold, commit, retire, with the clock of the cost model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..checks import positive_int
from ..cost import StepCost, latency_us
from ..errors import CapacityError, InputError
from ..planner import HostPlanner, Plan, Policy
from ..pools import StatePool
from .outcome import Outcome
from .pool import id_pool
from .trace import Trace

__all__ = ["simulate"]

_SHOW_EVERY_S = 0.5


def simulate(
    trace: Trace,
    cost: StepCost,
    *,
    layers: int = 1,
    capacity: int = 16,
    batch: int = 256,
    policy: str | Policy = "full",
    rest_us: float = 0.0,
    commit_rate: float = 1.0,
    checkpoint_pages: int | None = None,
    input_pages: int | None = None,
    page_rows: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Serve a trace: every step is planned, folded and committed by the planner of a real pool.

    A request that has arrived joins the next step that has room, first come first served; its
    prompt was prefilled elsewhere. It leaves when its output is complete. What the pools refuse is
    counted as exhaustion: an admission waits, and a step that finds too few input pages preempts
    the youngest sequences, which come back ahead of those that wait, with what is left of their
    outputs.

    Parameters
    ----------
    cost : StepCost
        Times of one recurrent layer; its window is that of every step.
    layers : int
        Recurrent layers of the model.
    batch : int
        Sequences of a step at most.
    rest_us : float
        Microseconds of a step beside the recurrent layers. It moves the clock, and so the arrivals;
        it is not in the step times of the outcome.
    commit_rate : float
        Of windows: the probability that a draft is right where all before it were.
    checkpoint_pages, input_pages, page_rows : int, optional
        As of `StatePool`; by default there are enough for `batch` sequences.
    progress : function of (requests done, requests)
        Called now and then.

    Raises
    ------
    CapacityError
        A single sequence does not fit into the pool.
    """
    positive_int("layers", layers)
    if not 0 <= rest_us < float("inf"):
        raise InputError(f"rest_us: got {rest_us}; allowed a number >= 0; give microseconds")
    if not 0 <= commit_rate <= 1:
        raise InputError(f"commit_rate: got {commit_rate}; allowed 0 to 1; it is a probability")
    pool = id_pool(
        positive_int("batch", batch), capacity=capacity, max_window=cost.window,
        checkpoint_pages=checkpoint_pages, input_pages=input_pages, page_rows=page_rows,
    )  # fmt: skip
    serving = _Serving(trace, pool, HostPlanner(pool, policy=policy), batch)
    clock = _Clock(cost, batch, layers, rest_us)
    rng = np.random.default_rng(seed)
    began = shown = time.perf_counter()
    while serving.done < len(trace):
        serving.admit(clock)
        plan = serving.plan()
        clock.step(plan)
        serving.planner.folded(plan)
        kept = np.minimum(_kept(rng, plan.batch, cost.window, commit_rate), serving.left)
        serving.planner.commit(plan, kept)
        serving.retire(kept)
        if progress and (now := time.perf_counter()) - shown > _SHOW_EVERY_S:
            progress(serving.done, len(trace))
            shown = now
    if progress:
        progress(len(trace), len(trace))
    record = clock.record()
    times = layers * cost.steps_us(
        record["sequences"], record["rows"], record["folds"], record["rows_folded"]
    )
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", repr(policy))
    return Outcome(
        policy=name, trace=trace.name, requests=len(trace), batch=batch, capacity=capacity,
        window=cost.window, format=cost.format.name, gpu=cost.device.name, layers=layers,
        times_us=times, sequences=record["sequences"], folds=record["folds"],
        early=record["early"], pages=record["pages"], exhausted=serving.exhausted,
        preempted=serving.preempted, tokens=serving.tokens,
        peak_checkpoint_pages=pool.checkpoint_ids.peak, peak_input_pages=pool.input_ids.peak,
        checkpoint_pages=pool.checkpoint_ids.count, input_pages=pool.input_ids.count,
        peak_context=serving.peak_context, simulated_s=clock.now, waited_s=serving.waited,
        wall_s=time.perf_counter() - began,
    )  # fmt: skip


def _kept(rng: np.random.Generator, n: int, window: int, rate: float) -> NDArray[np.int32]:
    """Tokens of each window that a round keeps."""
    kept = np.ones(n, dtype=np.int32)
    if window > 1:
        right = rng.random((n, window - 1)) < rate
        kept += np.cumprod(right, axis=1).sum(1, dtype=np.int32)
    return kept


@dataclass
class _Clock:
    """Simulated time, and what every step did."""

    cost: StepCost
    batch: int
    layers: int
    rest_us: float
    now: float = 0.0
    _steps: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        cost = self.cost
        self._latency = [latency_us(cost.constants, n) for n in range(self.batch + 1)]
        self._sequence, self._row, self._fold = cost.sequence_us, cost.row_us, cost.fold_us(0)
        self._fold_row = cost.fold_us(1) - cost.fold_us(0)

    def step(self, plan: Plan) -> None:
        """Let the step of `plan` pass."""
        rows, folds = int(plan.starts.sum()), plan.fold_count
        folded = int(plan.fold_rows[plan.fold_index].sum()) if folds else 0
        layer = (
            self._latency[plan.batch]
            + plan.batch * self._sequence
            + rows * self._row
            + folds * self._fold
            + folded * self._fold_row
        )
        self.now += (self.layers * layer + self.rest_us) * 1e-6
        pages = plan.pool.checkpoint_ids.used + plan.pool.input_ids.used
        self._steps.append((plan.batch, rows, folds, folded, plan.early, pages))

    def record(self) -> dict[str, NDArray[np.int64]]:
        table = np.array(self._steps, dtype=np.int64).reshape(-1, 6)
        names = ("sequences", "rows", "folds", "rows_folded", "early", "pages")
        return {name: table[:, i] for i, name in enumerate(names)}


class _Serving:
    """The sequences of the batch, those that wait, and what became of the others.

    Attributes
    ----------
    handles, request, left : arrays [sequences]
        Of the batch, in the order of admission: handle, place in the trace, tokens to decode.
    """

    def __init__(self, trace: Trace, pool: StatePool, planner: HostPlanner, batch: int) -> None:
        self.trace, self.pool, self.planner, self.batch = trace, pool, planner, batch
        self.handles = np.empty(0, dtype=np.int64)
        self.request = np.empty(0, dtype=np.int64)
        self.left = np.empty(0, dtype=np.int32)
        self.done = self.tokens = self.exhausted = self.preempted = 0
        self.context = self.peak_context = 0
        self.waited = 0.0
        self._next = self._arrived = 0
        self._back: deque[tuple[int, int]] = deque()  # preempted: request, tokens left

    def admit(self, clock: _Clock) -> None:
        """Take in what has arrived and fits; with an empty batch, wait for an arrival."""
        arrival = self.trace.arrival
        if not self.handles.size and not self._back and self._next < len(arrival):
            clock.now = max(clock.now, float(arrival[self._next]))
        if self._arrived < arrival.size and arrival[self._arrived] <= clock.now:
            self._arrived = int(np.searchsorted(arrival, clock.now, side="right"))
        waiting = len(self._back) + self._arrived - self._next
        count = min(self.batch - self.handles.size, waiting)
        if not count:
            return
        if self.handles.size:  # a first sequence is admitted anyhow, and refused where it must be
            fits = self._fits()
            if fits < count:
                self.exhausted += 1
                count = fits
            if not count:
                return
        again = [self._back.popleft() for _ in range(min(count, len(self._back)))]
        fresh = np.arange(self._next, self._next + count - len(again))
        self._next += fresh.size
        self.waited += float(clock.now * fresh.size - arrival[fresh].sum())
        came = np.array([r for r, _ in again], dtype=np.int64)
        left = np.array([n for _, n in again], dtype=np.int32)
        added = np.concatenate((came, fresh))
        self.handles = np.concatenate((self.handles, np.array(self.pool.alloc(count))))
        self.request = np.concatenate((self.request, added))
        self.left = np.concatenate((self.left, left, self.trace.output[fresh]))
        self.context += int(self.trace.prompt[added].sum())
        self.context += int(self.trace.output[came].sum()) - int(left.sum())

    def _fits(self) -> int:
        """Sequences that the pool can take in with all their rows, beside those of the batch."""
        pool, each = self.pool, self.pool.sizes.pages_per_sequence
        return min(pool.checkpoint_ids.free, pool.input_ids.free // each)

    def plan(self) -> Plan:
        """Plan a step, without the youngest sequences where the pool is short of pages."""
        while True:
            try:
                return self.planner.plan(self.handles, self.pool.max_window, bucket=self.batch)
            except CapacityError as error:
                if self.handles.size < 2:
                    raise
                self.exhausted += 1
                self._preempt(error.needed - error.free)

    def _preempt(self, short: int) -> None:
        """End the youngest sequences until `short` pages are free, or one sequence is left."""
        free = self.pool.input_ids.free
        while self.handles.size > 1 and self.pool.input_ids.free - free < short:
            self.pool.free(self.handles[-1:])
            request, left = int(self.request[-1]), int(self.left[-1])
            self._back.appendleft((request, left))
            trace = self.trace
            self.context -= int(trace.prompt[request]) + int(trace.output[request]) - left
            self.handles, self.request = self.handles[:-1], self.request[:-1]
            self.left = self.left[:-1]
            self.preempted += 1

    def retire(self, kept: NDArray[np.int32]) -> None:
        """Count the tokens of a step, and end what is complete."""
        tokens = int(kept.sum())
        self.tokens += tokens
        self.context += tokens
        self.peak_context = max(self.peak_context, self.context)
        self.left = self.left - kept
        gone = self.left == 0
        count = int(np.count_nonzero(gone))
        if not count:
            return
        self.pool.free(self.handles[gone])
        ended = self.request[gone]
        self.context -= int(self.trace.prompt[ended].sum() + self.trace.output[ended].sum())
        stay = ~gone
        self.handles, self.request = self.handles[stay], self.request[stay]
        self.left = self.left[stay]
        self.done += count
