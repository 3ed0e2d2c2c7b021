"""Which sequences fold early, so that the work of folding is spread over steps.

A policy never delays a fold that must happen; it adds folds. Folding early is always allowed: it
changes where the recurrence is rounded, not what it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import positive_int
from ..errors import InputError, UnsupportedError
from ..formats import CheckpointFormat, get_format
from ..pools import StatePool
from ..spec import LayerSpec

__all__ = [
    "POLICIES",
    "Deadline",
    "Policy",
    "fold_budget",
    "folds_within",
    "full",
    "get_policy",
    "spread",
]


class Policy(Protocol):
    """Choose early folds.

    Called with the committed rows and this step's window of each sequence (int32 arrays), which of
    them must fold, and the capacity L. Returns a mask that includes `must`.
    """

    def __call__(
        self,
        history: NDArray[np.int32],
        window: NDArray[np.int32],
        must: NDArray[np.bool_],
        capacity: int,
    ) -> NDArray[np.bool_]: ...


def full(
    history: NDArray[np.int32],
    window: NDArray[np.int32],
    must: NDArray[np.bool_],
    capacity: int,
) -> NDArray[np.bool_]:
    """Fold exactly when full, so that a sequence's bits never depend on who shares its batch."""
    return must


def spread(
    history: NDArray[np.int32],
    window: NDArray[np.int32],
    must: NDArray[np.bool_],
    capacity: int,
) -> NDArray[np.bool_]:
    """Fold just early enough that no later step needs more than its share.

    With windows of T rows a sequence folds every ``c = L // T`` steps, so the fair share of a batch
    of ``n`` is ``q = ceil(n / c)`` folds a step. Each sequence has a deadline: the number of steps
    until it must fold if every row is accepted. Later steps can take ``q d`` folds by deadline
    ``d``, so this step takes the fewest ``k`` with ``#{deadline <= d} <= k + q d`` for every ``d``
    (earliest deadline first; ties by position). A batch that is already staggered folds nothing
    early, and one that started together is staggered after one cycle.
    """
    return _at_most(_fair_share(history, window, capacity), history, window, must, capacity)


@dataclass(frozen=True)
class Deadline:
    """Fold early only where a later step would otherwise need more folds than a budget.

    Between `spread`, which levels a batch to its fair share and folds most early, and `full`, which
    folds none: a larger budget folds fewer sequences early, and lets steps be less level. Folds
    that a step must make, and those of ``force_fold``, are never put off, budget or not.

    A budget below the fair share ``q = ceil(n / c)`` of `spread` cannot be kept, since every
    sequence folds once in ``c`` steps; ``q`` takes its place then. Where many sequences are due so
    soon that no order of their folds keeps the budget (they may fold only once they have rows), the
    least peak takes its place: the largest ``#{deadline <= d} / (d + 1)``, rounded up. So a step
    exceeds the budget by no more than it has to.

    Parameters
    ----------
    folds : int
        The budget: folds of a step. `fold_budget` gives it from bytes.

    Examples
    --------
    >>> Deadline(4) == get_policy("deadline:4")
    True
    """

    folds: int

    def __post_init__(self) -> None:
        positive_int("folds", self.folds)

    def __call__(
        self,
        history: NDArray[np.int32],
        window: NDArray[np.int32],
        must: NDArray[np.bool_],
        capacity: int,
    ) -> NDArray[np.bool_]:
        due = _due(_deadlines(history, window, must, capacity))
        peak = int((-(-due // np.arange(1, due.size + 1))).max(initial=0))
        share = max(self.folds, _fair_share(history, window, capacity), peak)
        return _at_most(share, history, window, must, capacity)


def fold_budget(pool: StatePool, size: int) -> int:
    """How many folds move at most `size` bytes in one step, over all layers of `pool`.

    Raises
    ------
    InputError
        Not even one fold fits; the message says what one moves.
    """
    return folds_within(
        size, pool.spec, pool.format, pool.dtype, layers=len(pool.layers), capacity=pool.capacity
    )


def folds_within(
    size: int,
    spec: LayerSpec,
    format: str | CheckpointFormat,
    dtype: torch.dtype,
    *,
    layers: int,
    capacity: int,
) -> int:
    """As `fold_budget`, without a pool.

    A fold reads and writes a whole checkpoint and reads at most `capacity` rows, in every layer.
    """
    size = positive_int("budget", size)
    fmt = get_format(format)
    stored, rows = spec.checkpoint_bytes(fmt), capacity * spec.row_bytes(dtype, fmt)
    fold = layers * (2 * stored + rows)
    if size < fold:
        raise InputError(
            f"budget: got {size} B; allowed at least one fold, {layers} layers x (2 x {stored} + "
            f"{rows}) B = {fold} B; raise it"
        )
    return size // fold


def _deadlines(
    history: NDArray[np.int32],
    window: NDArray[np.int32],
    must: NDArray[np.bool_],
    capacity: int,
) -> NDArray[np.int32]:
    """Steps until each sequence must fold if every row is accepted; 0: in this one."""
    steps: NDArray[np.int32] = np.maximum((capacity - history) // np.maximum(window, 1), 0)
    return np.where(must, 0, steps)


def _due(deadline: NDArray[np.int32]) -> NDArray[np.int64]:
    """Folds that are due by every deadline."""
    due: NDArray[np.int64] = np.cumsum(np.bincount(deadline))
    return due


def _fair_share(history: NDArray[np.int32], window: NDArray[np.int32], capacity: int) -> int:
    """Folds of a step where all are spread evenly over a cycle."""
    longest = max(int(window.max(initial=1)), 1)
    return -(-history.size // max(capacity // longest, 1))


def _at_most(
    share: int,
    history: NDArray[np.int32],
    window: NDArray[np.int32],
    must: NDArray[np.bool_],
    capacity: int,
) -> NDArray[np.bool_]:
    """The fewest folds now that leave no later step more than `share`, the earliest due first."""
    deadline = _deadlines(history, window, must, capacity)
    due = _due(deadline)
    wanted = int((due - share * np.arange(due.size)).max(initial=0))
    if wanted <= int(np.count_nonzero(must)):
        return must
    # A sequence without rows has nothing to fold.
    deadline[history == 0] = due.size
    chosen = must.copy()
    first = np.argsort(deadline, kind="stable")[:wanted]
    chosen[first[deadline[first] < due.size]] = True
    return chosen


POLICIES: dict[str, Policy] = {"full": full, "spread": spread}
_DEADLINE = "deadline:"


def get_policy(policy: str | Policy) -> Policy:
    """Look a policy up by name, or pass one through; ``"deadline:4"`` is ``Deadline(4)``."""
    if callable(policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    if isinstance(policy, str) and policy.startswith(_DEADLINE):
        number = policy.removeprefix(_DEADLINE)
        if number.isdecimal() and int(number):
            return Deadline(int(number))
    raise UnsupportedError(
        f"policy: got {policy!r}; allowed {', '.join(POLICIES)}, deadline:FOLDS or a callable; "
        "pick one"
    )
