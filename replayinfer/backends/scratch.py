"""Memory between the kernels of a step, at fixed addresses: made when needed, kept, counted."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..planner import HostPlanner
from ..planner.plan import PlanArrays

__all__ = ["scratch", "scratch_bytes"]

# Of a plan buffer: by name, shape and type. The memory goes with the buffer.
_scratch = WeakIdKeyDictionary()


def scratch(
    arrays: PlanArrays, name: str, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A tensor of a plan buffer, at an address that never moves; zeros when it is new.

    Steps that share a plan buffer run one after another, so they can share scratch memory; steps of
    two planners may overlap on two streams.
    """
    owner = arrays.window
    tensors = _scratch.setdefault(owner, {})
    key = (name, shape, dtype)
    if key not in tensors:
        tensors[key] = torch.zeros(shape, device=owner.device, dtype=dtype)
    tensor: torch.Tensor = tensors[key]
    return tensor


def scratch_bytes(planner: HostPlanner) -> int:
    """Device bytes that the kernels of this planner's steps hold between them, so far.

    Beside ``pool.nbytes``. Each bucket has its own, made in its first step or warmup and kept as
    long as the planner, since CUDA graphs know the addresses; it grows with the bucket.
    """
    buffers = (_scratch.get(arrays.window, {}) for arrays in planner.buffers())
    return sum(tensor.nbytes for tensors in buffers for tensor in tensors.values())
