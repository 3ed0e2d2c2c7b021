"""What a simulation says: the tail of the steps, the pages in use, the folds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..figures import two_panels

__all__ = ["Outcome", "plot"]


@dataclass(frozen=True)
class Outcome:
    """One policy over one trace; arrays have an entry a step.

    Attributes
    ----------
    times_us : float64 [steps]
        The recurrent layers of each step, folds included, by the cost model.
    sequences, folds, early : int64 [steps]
        Sequences of the step, those that folded, and the folds among them that the policy added.
    pages : int64 [steps]
        Checkpoint and input pages held.
    exhausted : int
        How often the pool had too little: for an admission, or for a step.
    preempted : int
        Sequences that gave their pages up for others, and came back.
    peak_context : int
        Most tokens, prompts and outputs, of the sequences of one step: what attention keeps.
    waited_s : float
        From arrival to admission, over all requests.
    """

    policy: str
    trace: str
    requests: int
    batch: int
    capacity: int
    window: int
    format: str
    gpu: str
    layers: int
    times_us: NDArray[np.float64] = field(repr=False)
    sequences: NDArray[np.int64] = field(repr=False)
    folds: NDArray[np.int64] = field(repr=False)
    early: NDArray[np.int64] = field(repr=False)
    pages: NDArray[np.int64] = field(repr=False)
    exhausted: int
    preempted: int
    tokens: int
    peak_checkpoint_pages: int
    peak_input_pages: int
    checkpoint_pages: int
    input_pages: int
    peak_context: int
    simulated_s: float
    waited_s: float
    wall_s: float

    @property
    def steps(self) -> int:
        return int(self.times_us.size)

    def percentile_us(self, percent: float) -> float:
        return float(np.percentile(self.times_us, percent))

    def fold_histogram(self) -> dict[str, int]:
        """Steps by how many sequences folded in them; counts that never occurred are left out."""
        counts = np.bincount(self.folds)
        return {str(n): int(counts[n]) for n in np.flatnonzero(counts)}

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        p50, p99 = self.percentile_us(50), self.percentile_us(99)
        return {
            "policy": self.policy,
            "trace": self.trace,
            "requests": self.requests,
            "steps": self.steps,
            "tokens": self.tokens,
            "p50_us": round(p50, 2),
            "p99_us": round(p99, 2),
            "p999_us": round(self.percentile_us(99.9), 2),
            "max_us": round(float(self.times_us.max()), 2),
            "mean_us": round(float(self.times_us.mean()), 2),
            "tail": round(p99 / p50, 4),
            "exhausted": self.exhausted,
            "preempted": self.preempted,
            "peak_pages": int(self.pages.max()),
            "mean_pages": round(float(self.pages.mean()), 1),
            "peak_checkpoint_pages": self.peak_checkpoint_pages,
            "peak_input_pages": self.peak_input_pages,
            "checkpoint_pages": self.checkpoint_pages,
            "input_pages": self.input_pages,
            "peak_context_tokens": self.peak_context,
            "folds": int(self.folds.sum()),
            "early_folds": int(self.early.sum()),
            "folds_p99": int(np.percentile(self.folds, 99)),
            "fold_histogram": self.fold_histogram(),
            "batch": self.batch,
            "mean_batch": round(float(self.sequences.mean()), 2),
            "at_cap": round(float((self.sequences == self.batch).mean()), 4),
            "capacity": self.capacity,
            "window": self.window,
            "format": self.format,
            "gpu": self.gpu,
            "layers": self.layers,
            "simulated_s": round(self.simulated_s, 3),
            "mean_wait_s": round(self.waited_s / self.requests, 6),
            "wall_s": round(self.wall_s, 2),
        }


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Step times by percentile, and folds a step, of each policy.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed (extra ``bench``).
    """
    with two_panels(path) as (left, right):
        percents = np.concatenate((np.arange(0, 99, 1), np.arange(99, 100.01, 0.05)))
        most = max(int(o.folds.max()) for o in outcomes)
        for outcome in outcomes:
            left.plot(percents, np.percentile(outcome.times_us, percents.clip(max=100)))
            share = np.bincount(outcome.folds, minlength=most + 1) / outcome.steps
            right.step(np.arange(most + 1), share, where="mid", label=outcome.policy)
        left.set(xlabel="percentile of the steps", title="microseconds of the recurrent layers")
        right.set(xlabel="sequences that fold in a step", title="share of the steps", yscale="log")
        for axis in (left, right):
            axis.grid(alpha=0.3)
        right.legend()
