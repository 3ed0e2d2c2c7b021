"""Which sequences fold early, so that the work of folding is spread over steps.

A policy never delays a fold that must happen; it adds folds. Folding early is always allowed: it
changes where the recurrence is rounded, not what it computes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError

__all__ = ["POLICIES", "Policy", "full", "get_policy", "spread"]


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
    count = int(np.count_nonzero(must))
    pace = np.maximum(window, 1)
    longest = int(pace.max(initial=1))
    share = -(-history.size // max(capacity // longest, 1))
    deadline = np.where(must, 0, np.maximum((capacity - history) // pace, 0))
    due = np.cumsum(np.bincount(deadline))
    wanted = int((due - share * np.arange(due.size)).max(initial=0))
    if wanted <= count:
        return must
    # A sequence without rows has nothing to fold.
    deadline[history == 0] = due.size
    chosen = must.copy()
    first = np.argsort(deadline, kind="stable")[:wanted]
    chosen[first[deadline[first] < due.size]] = True
    return chosen


POLICIES: dict[str, Policy] = {"full": full, "spread": spread}


def get_policy(policy: str | Policy) -> Policy:
    """Look a policy up by name, or pass one through."""
    if callable(policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise UnsupportedError(
            f"policy: got {policy!r}; allowed {', '.join(POLICIES)} or a callable; pick one"
        )
    return POLICIES[policy]
