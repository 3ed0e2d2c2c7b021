"""Bandwidths and memories of GPUs, and which of them were measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError

__all__ = ["DEVICES", "READ_SHARE", "Device", "get_device"]


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes
    ----------
    name : str
    peak_tbps : float
        Memory bandwidth of the data sheet, 10^12 bytes per second.
    read_tbps : float
        What a plain streaming read reaches.
    memory_bytes : int
        Of the data sheet, in bytes of 10^9 a gigabyte.
    tflops : float
        Of the data sheet: dense bfloat16 products, 10^12 operations per second.
    measured : bool
        Whether `read_tbps` and the constants of `KERNELS` were measured on it.
    """

    name: str
    peak_tbps: float
    read_tbps: float
    memory_bytes: int
    tflops: float
    measured: bool

    @property
    def basis(self) -> str:
        """Where its figures come from, in a sentence."""
        if self.measured:
            return f"{self.name}: measured, a plain read reaches {self.read_tbps:g} TB/s."
        return (
            f"{self.name}: not measured; {self.peak_tbps:g} TB/s of its data sheet times "
            f"{READ_SHARE:.3f}, the share that a plain read reaches on the H200, with the "
            "efficiencies and latencies of the H200."
        )


_H200_PEAK, _H200_READ = 4.8, 4.5
# The read ceilings of docs/benchmarks/*.json are 4.454 to 4.459 TB/s over 2 GB.
READ_SHARE = _H200_READ / _H200_PEAK
"""Part of its data sheet's bandwidth that a plain read reaches on an H200."""


def _by_data_sheet(name: str, peak_tbps: float, gigabytes: int, tflops: float) -> Device:
    read = peak_tbps * READ_SHARE
    return Device(name, peak_tbps, read, gigabytes * 10**9, tflops, measured=False)


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("h200", _H200_PEAK, _H200_READ, 141 * 10**9, 989.0, measured=True),
        _by_data_sheet("a100-40gb", 1.555, 40, 312.0),
        _by_data_sheet("a100", 2.039, 80, 312.0),
        _by_data_sheet("h100", 3.35, 80, 989.0),  # SXM
        _by_data_sheet("h100-pcie", 2.0, 80, 756.0),
        _by_data_sheet("h100-nvl", 3.9, 94, 835.0),
        _by_data_sheet("h20", 4.0, 96, 148.0),
        _by_data_sheet("b200", 8.0, 180, 2250.0),
        _by_data_sheet("b300", 8.0, 288, 2250.0),
        _by_data_sheet("l40s", 0.864, 48, 362.0),
        _by_data_sheet("rtx-pro-6000", 1.792, 96, 504.0),
    )
}
"""By name, in lower case."""


def get_device(name: str | Device) -> Device:
    """Look a GPU up by name, whatever the case."""
    if isinstance(name, Device):
        return name
    found = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise InputError(
            f"gpu: got {name!r}; allowed {', '.join(DEVICES)}; pick one, or make a "
            "replayinfer.cost.Device"
        )
    return found
