"""What every family's launches need: scratch memory at fixed addresses, and launch choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...pools import StatePool

__all__ = ["FoldArrays", "Workspaces", "config", "has_pdl", "processors", "single_fold"]


class Workspaces:
    """Scratch tensors by name and shape; one each, at an address that never moves."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """The tensor of that name and shape; zeros when it is new."""
        key = (name, shape, device, dtype)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(shape, device=device, dtype=dtype)
        return self._tensors[key]


@dataclass(frozen=True)
class FoldArrays:
    """The part of a plan's device arrays that a fold reads; all int32."""

    fold_source: torch.Tensor
    fold_target: torch.Tensor
    fold_rows: torch.Tensor
    fold_table: torch.Tensor
    fold_count: torch.Tensor


def single_fold(device: torch.device, page: int, table: list[int], rows: int) -> FoldArrays:
    """A fold list of one sequence, from checkpoint `page` to page 0 of another tensor."""

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return FoldArrays(ints([page]), ints([0]), ints([rows]), ints([table]), ints([1]))


def config(pool: StatePool, op: str, bucket: int) -> Any:
    """The launch choice for `op`; see `replayinfer.kernels.launch.lookup`."""
    from replayinfer.kernels.launch import lookup as launch

    return launch.lookup(op, pool.spec, pool.format.name, bucket, pool.device)


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (Hopper and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
