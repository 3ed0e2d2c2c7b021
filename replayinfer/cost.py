"""What a step costs in bytes, and the buffer length that makes it least."""

from __future__ import annotations

import math

import torch

from .formats import CheckpointFormat, get_format
from .spec import LayerSpec

__all__ = ["best_capacity"]


def best_capacity(
    spec: LayerSpec,
    format: str | CheckpointFormat = "fp32_split",
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """The rows before a fold (L) that move the fewest bytes in plain decode, as a power of two.

    A sequence reads ``(L - 1) / 2`` rows of ``r`` bytes a step on average, and one step in ``L``
    moves the ``s`` bytes of a fold, a read and a write of the whole checkpoint; ``L r / 2 + s / L``
    is least at ``sqrt(2 s / r)``. The power of two at or above it is taken: a fold costs more than
    its bytes.

    Examples
    --------
    >>> import torch
    >>> from replayinfer import Mamba2Spec
    >>> best_capacity(Mamba2Spec(heads=128, dim=64, state=128, groups=8))
    32
    """
    fmt = get_format(format)
    fold = 2 * math.prod(spec.state_shape) * fmt.bytes_stored
    best = math.sqrt(2 * fold / spec.row_bytes(dtype, fmt))
    return int(2 ** math.ceil(math.log2(max(best, 1))))
