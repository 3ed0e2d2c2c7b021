"""The kernels of device plans, launched on pads before the first step or capture needs them."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from ..pools import StatePool
from .device_inputs import INTEGERS
from .device_step import CursorBackend, DeviceStep, StepRequest
from .trees import mask_columns

__all__ = ["warm"]


def warm(
    kernels: CursorBackend,
    pool: StatePool,
    step: DeviceStep,
    window: int,
    spread: bool,
    budget: int,
    direct: bool,
) -> None:
    """Launch all that a step of these arrays can, on pads; see `DevicePlanner.warmup`."""
    bucket = step.handle.shape[0]
    pads = torch.full((bucket,), -1, dtype=torch.int64, device=pool.device)
    zeros = torch.zeros(bucket, dtype=torch.int32, device=pool.device)
    request = StepRequest(pads, None, None, 1, window, spread, direct, budget=budget)
    for windows, force in itertools.product((None, zeros), (None, zeros.bool())):
        kernels.plan_step(pool, step, dataclasses.replace(request, windows=windows, force=force))
    if window > 1 and mask_columns(pool.max_window):
        for dtype in INTEGERS:
            nodes = torch.full((bucket, window), -1, dtype=dtype, device=pool.device)
            kernels.plan_step(pool, step, dataclasses.replace(request, parents=nodes))
            kernels.accept_paths(pool, step, nodes)
    kernels.fold_step(pool, step)
    for counts in (None, zeros, zeros.long()):
        kernels.commit_step(pool, step, counts, direct=direct)
    kernels.abort_step(pool, step)
