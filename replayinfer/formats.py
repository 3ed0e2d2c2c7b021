"""Checkpoint formats: how a state is stored, what a readout sees of it, what a fold gets back.

``fp32_split`` stores an fp32 state as two 16-bit planes. With ``bits`` the fp32 pattern::

    hi   = (bits + 0x8000) >> 16                     rounded to bf16, ties away from zero
    lo   = bits & 0xffff
    bits = (hi << 16) - ((lo & 0x8000) << 1) + lo    32-bit wrap-around arithmetic

so a readout loads half of the bytes and a fold has every bit. Three choices are made here:

* A NaN becomes the quiet NaN of its sign in both planes. Its payload is dropped, because a payload
  in the low half alone would read as infinity, and 0x7fffffff would round up to -0.
* Finite values from 0x7f7f8000 up (FLT_MAX among them) round to infinity in the high plane, as any
  round-to-nearest bf16 does; the two planes together still give their exact bits.
* ``fp16`` saturates finite values beyond 65504 to +-65504: storage never makes a state infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import UnsupportedError

__all__ = ["FORMATS", "CheckpointFormat", "get_format", "join_planes", "split_planes", "to_storage"]

_FP16_MAX = 65504.0
_QUIET_NAN = 0x7FC00000


@dataclass(frozen=True)
class CheckpointFormat:
    """One way to store the checkpoint of a recurrent state.

    Attributes
    ----------
    name : str
    plane_dtype : torch.dtype
        What a readout loads.
    bytes_read, bytes_stored : int
        Bytes per element that a readout reads, and that a page holds (a fold reads and writes
        them).
    lossless : bool
        The recurrence is kept in fp32, bit for bit; otherwise it is rounded once per fold.
    rounded_readout : bool
        The readout sees less than the fold does, so what it derives from the state is provisional.
    """

    name: str
    plane_dtype: torch.dtype
    bytes_read: int
    bytes_stored: int
    lossless: bool
    rounded_readout: bool

    @property
    def standard_bytes(self) -> int:
        """Bytes per element of the state of a kernel without replay at the same exactness."""
        return 4 if self.lossless else self.bytes_stored


FORMATS: dict[str, CheckpointFormat] = {
    f.name: f
    for f in (
        CheckpointFormat("fp32", torch.float32, 4, 4, lossless=True, rounded_readout=False),
        CheckpointFormat("fp32_split", torch.bfloat16, 2, 4, lossless=True, rounded_readout=True),
        CheckpointFormat("bf16", torch.bfloat16, 2, 2, lossless=False, rounded_readout=False),
        CheckpointFormat("fp16", torch.float16, 2, 2, lossless=False, rounded_readout=False),
    )
}


def get_format(name: str | CheckpointFormat) -> CheckpointFormat:
    """Look a format up by name; `UnsupportedError` lists the names."""
    if isinstance(name, CheckpointFormat):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise UnsupportedError(f"format: got {name!r}; allowed {', '.join(FORMATS)}; pick one")
    return FORMATS[name]


def split_planes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into the two planes of ``fp32_split``: (high bfloat16, low int16)."""
    bits = x.contiguous().view(torch.int32)
    quiet = torch.where(bits < 0, _QUIET_NAN - (1 << 31), _QUIET_NAN).to(torch.int32)
    bits = torch.where(torch.isnan(x), quiet, bits)
    # NaNs are out of the way, so the addition cannot carry into the sign bit.
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    low = bits.to(torch.int16)  # the low half: int32 -> int16 wraps
    return high.view(torch.bfloat16), low


def join_planes(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Rebuild the float32 of `split_planes`, bit for bit."""
    h = high.view(torch.int16).to(torch.int32)
    lo = low.to(torch.int32) & 0xFFFF
    return ((h << 16) - ((lo & 0x8000) << 1) + lo).view(torch.float32)


def to_storage(x: torch.Tensor, fmt: CheckpointFormat) -> torch.Tensor:
    """Round float32 to a single-plane format's storage type."""
    if fmt.plane_dtype is torch.float16:
        inf = torch.isinf(x)
        return torch.where(inf, x, x.clamp(-_FP16_MAX, _FP16_MAX)).to(torch.float16)
    return x.to(fmt.plane_dtype)
