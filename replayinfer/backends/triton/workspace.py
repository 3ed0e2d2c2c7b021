"""What every family's launches need: scratch memory at fixed addresses, and launch choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...errors import InputError
from ...pools import StatePool

__all__ = [
    "FoldArrays",
    "bit_planes",
    "config",
    "has_pdl",
    "processors",
    "require_pairs",
    "single_fold",
]


def bit_planes(pool: StatePool, layers: int | slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The checkpoint planes of `layers`: two of int16, or one of the format's type and None."""
    plane, low = pool.checkpoints.plane[layers], pool.checkpoints.low
    return (plane, None) if low is None else (plane.view(torch.int16), low[layers])


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


def require_pairs(**tensors: torch.Tensor) -> None:
    """Raise unless kernels may read each tensor's last axis as pairs of 16-bit values.

    Raises
    ------
    InputError
        A bf16 tensor that starts at an odd multiple of 2 bytes, or has such a stride.
    """
    for name, t in tensors.items():
        if t.dtype == torch.bfloat16 and (t.data_ptr() % 4 or any(s % 2 for s in t.stride()[:-1])):
            raise InputError(
                f"{name}: got bf16 at an address {t.data_ptr() % 4} bytes past a multiple of 4, "
                f"strides {list(t.stride())}; allowed multiples of 4 bytes for both, since its "
                "channels are read in pairs; pass a view at an even offset, or a contiguous copy"
            )


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
