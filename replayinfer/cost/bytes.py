"""What a step costs in bytes, and the buffer length that makes it least."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import InputError
from ..formats import CheckpointFormat, get_format
from ..spec import LayerSpec

__all__ = [
    "SteadyState",
    "accepted_mean",
    "best_capacity",
    "fold_bytes",
    "readout_bytes",
    "step_bytes",
]

_NEARLY = 1.05  # of the fewest bytes; a shorter buffer within it is worth the memory
# More rows than the first leave a verify kernel too few registers: at 64 rows a step was measured
# 17% slower than at 32, of 2% fewer bytes (Mamba-2, windows of 4, batch 256, H200).
_FEW, _NEARLY_FEW = 32, 1.15


def accepted_mean(window: int, commit_rate: float = 1.0) -> float:
    """Tokens that a round keeps on average: ``1 + r + r^2 + ... + r^(T-1)``.

    A window of ``T`` is the newest token, which is kept always, and ``T - 1`` drafts, each of which
    is right with probability ``r`` where all before it were.

    Examples
    --------
    >>> accepted_mean(4, 0.5), accepted_mean(4), accepted_mean(1, 0.5)
    (1.875, 4.0, 1.0)
    """
    return math.fsum(_check_rate(commit_rate) ** k for k in range(window))


@dataclass(frozen=True)
class SteadyState:
    """Where the histories of sequences are, on average, after many rounds.

    Attributes
    ----------
    rows : float
        Rows before a window, after the folds of its step.
    folds : float
        Folds of a sequence per round.
    rows_folded : float
        Rows that a fold covers.
    accepted : float
        Tokens that a round keeps; all of them are folded some time: ``folds * rows_folded``.
    """

    rows: float
    folds: float
    rows_folded: float
    accepted: float

    @staticmethod
    def of(capacity: int, window: int = 1, commit_rate: float = 1.0) -> SteadyState:
        """Rounds that fold exactly where a window would not fit, ``h + T > L``.

        Examples
        --------
        >>> SteadyState.of(16)
        SteadyState(rows=7.5, folds=0.0625, rows_folded=16.0, accepted=1.0)
        """
        if window < 1 or capacity < window:
            raise InputError(
                f"capacity: got {capacity} for windows of {window}; allowed at least the window; "
                "raise the capacity"
            )
        rate = _check_rate(commit_rate)
        # P(a round keeps n tokens), n = 1..T: the first wrong draft ends it.
        kept = [rate ** (n - 1) * (1.0 if n == window else 1 - rate) for n in range(1, window + 1)]
        # How often a cycle from one fold to the next begins a window after h rows.
        visits = [0.0] * (capacity - window + 1)
        visits[0] = 1.0
        for h in range(1, len(visits)):
            visits[h] = math.fsum(p * visits[h - n] for n, p in enumerate(kept, start=1) if n <= h)
        rounds = math.fsum(visits)
        rows = math.fsum(h * v for h, v in enumerate(visits)) / rounds
        accepted = accepted_mean(window, rate)
        return SteadyState(rows, 1 / rounds, accepted * rounds, accepted)


def readout_bytes(
    spec: LayerSpec,
    format: str | CheckpointFormat = "fp32_split",
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: float,
    window: int = 1,
) -> float:
    """Bytes that one sequence moves in one layer's readout after `rows` rows, folds apart."""
    fmt = get_format(format)
    own = 1 if window == 1 else 2 * window
    state = math.prod(spec.state_shape) * fmt.bytes_read
    return state + spec.row_bytes(dtype, fmt) * (rows + own)


def fold_bytes(
    spec: LayerSpec,
    format: str | CheckpointFormat = "fp32_split",
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: float,
) -> float:
    """Bytes of one fold of `rows` rows in one layer: the checkpoint read and written, the rows."""
    fmt = get_format(format)
    return 2 * math.prod(spec.state_shape) * fmt.bytes_stored + rows * spec.row_bytes(dtype, fmt)


def step_bytes(
    spec: LayerSpec,
    format: str | CheckpointFormat = "fp32_split",
    dtype: torch.dtype = torch.bfloat16,
    *,
    capacity: int,
    window: int = 1,
    commit_rate: float = 1.0,
) -> float:
    """Bytes that a sequence moves in one layer and round of the steady state.

    The readout plane; the rows before the window, and the window's own, written and, as drafts
    read those before them, read; and of a fold's bytes (the whole checkpoint read and written, its
    rows read) the share of a round. A window of one token is not read again.
    """
    steady = SteadyState.of(capacity, window, commit_rate)
    fold = fold_bytes(spec, format, dtype, rows=steady.rows_folded)
    return readout_bytes(spec, format, dtype, rows=steady.rows, window=window) + steady.folds * fold


def best_capacity(
    spec: LayerSpec,
    format: str | CheckpointFormat = "fp32_split",
    dtype: torch.dtype = torch.bfloat16,
    *,
    window: int = 1,
    commit_rate: float = 1.0,
) -> int:
    """The rows before a fold (L) that move the fewest bytes, as a power of two.

    In plain decode a sequence reads ``(L - 1) / 2`` rows of ``r`` bytes a step on average, and one
    step in ``L`` moves the ``s`` bytes of a fold, a read and a write of the whole checkpoint;
    ``L r / 2 + s / L`` is least at ``sqrt(2 s / r)``. The power of two at or above it is taken: a
    fold costs more than its bytes. For windows it is the shortest whose `step_bytes` are within 5%
    of the fewest: they hardly change over a factor of two there, and a buffer is memory. More than
    32 rows, which cost more than their bytes, have to save 15%.

    Examples
    --------
    >>> import torch
    >>> from replayinfer import Mamba2Spec
    >>> spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
    >>> best_capacity(spec), best_capacity(spec, window=4, commit_rate=0.7)
    (32, 32)
    """
    fmt = get_format(format)
    if window == 1:
        fold = 2 * math.prod(spec.state_shape) * fmt.bytes_stored
        best = math.sqrt(2 * fold / spec.row_bytes(dtype, fmt))
        return int(2 ** math.ceil(math.log2(max(best, 1))))

    moved: dict[int, float] = {}
    length = 1 << (window - 1).bit_length()
    # Longer buffers mean more rows and fewer folds: the bytes fall, then rise.
    while len(moved) < 2 or moved[length // 2] <= moved[length // 4]:
        moved[length] = step_bytes(
            spec, fmt, dtype, capacity=length, window=window, commit_rate=commit_rate
        )
        length *= 2
    fewest = min(moved.values())
    best = min(c for c, b in moved.items() if b <= _NEARLY * fewest)
    if best > _FEW >= window and moved[_FEW] <= _NEARLY_FEW * fewest:
        return _FEW
    return best


def _check_rate(commit_rate: float) -> float:
    if not 0 <= commit_rate <= 1:
        raise InputError(
            f"commit_rate: got {commit_rate}; allowed 0 to 1; it is the probability that a draft "
            "is right"
        )
    return float(commit_rate)
