"""What a pool holds and what that costs, in exact bytes.

The same function sizes a pool that is about to be made and reports one that exists, so what is
reserved and what is held cannot differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import CapacityError
from .device_cursors import record_words
from .sizes import PoolSizes

__all__ = ["CapacityReport", "fit_sequences", "report"]


@dataclass(frozen=True)
class CapacityReport:
    """Device memory of a pool; `str()` prints the formula with the numbers in it.

    Attributes
    ----------
    checkpoint_page_bytes, input_page_bytes, conv_slot_bytes, weight_bytes : int
        Bytes of one unit over all layers of the pool; `weight_bytes` is the bound parameters in
        fp32.
    cursor_bytes : int
        Of one sequence's cursors where they live on the device, else 0.
    sequence_bytes : int
        What one sequence needs that shares nothing.
    total_bytes : int
        What the pool holds.
    """

    sizes: PoolSizes
    checkpoint_page_bytes: int
    input_page_bytes: int
    conv_slot_bytes: int
    weight_bytes: int
    cursor_bytes: int = 0

    @property
    def sequence_bytes(self) -> int:
        pages = self.sizes.pages_per_sequence
        slot = self.conv_slot_bytes + self.cursor_bytes
        return self.checkpoint_page_bytes + pages * self.input_page_bytes + slot

    @property
    def total_bytes(self) -> int:
        s = self.sizes
        return (
            s.checkpoint_pages * self.checkpoint_page_bytes
            + s.input_pages * self.input_page_bytes
            + s.max_sequences * (self.conv_slot_bytes + self.cursor_bytes)
            + self.weight_bytes
        )

    def __str__(self) -> str:
        s = self.sizes
        row = s.spec.row_bytes(s.dtype, s.format)
        state = s.spec.checkpoint_bytes(s.format)
        total = s.max_sequences * self.cursor_bytes
        cursors = [
            f"device cursors    {s.max_sequences} x {self.cursor_bytes} B = {total} B"
        ] * s.device_cursors
        return "\n".join(
            (
                f"checkpoint pages  {s.checkpoint_pages} x {s.layers} layers x {state} B "
                f"({s.format.name}) = {s.checkpoint_pages * self.checkpoint_page_bytes} B",
                f"input pages       {s.input_pages} x {s.layers} layers x {s.page_rows} rows x "
                f"{row} B = {s.input_pages * self.input_page_bytes} B",
                f"convolution rings {s.max_sequences} x {self.conv_slot_bytes} B "
                f"({s.ring} rows each) = {s.max_sequences * self.conv_slot_bytes} B",
                *cursors,
                f"weights           {self.weight_bytes} B",
                f"total             {self.total_bytes} B",
                f"one sequence      {self.checkpoint_page_bytes} + {s.pages_per_sequence} x "
                f"{self.input_page_bytes} + {self.conv_slot_bytes + self.cursor_bytes} = "
                f"{self.sequence_bytes} B",
            )
        )


def report(sizes: PoolSizes) -> CapacityReport:
    """The bytes of a pool of `sizes`."""
    spec = sizes.spec
    channels = spec.conv_channels if spec.conv_width else 0
    weights = sum(math.prod(f.shape) for f in spec.weight_fields)
    return CapacityReport(
        sizes=sizes,
        checkpoint_page_bytes=sizes.layers * spec.checkpoint_bytes(sizes.format),
        input_page_bytes=sizes.layers * sizes.page_rows * spec.row_bytes(sizes.dtype, sizes.format),
        conv_slot_bytes=sizes.layers * sizes.ring * channels * sizes.dtype.itemsize,
        weight_bytes=sizes.layers * weights * 4,
        cursor_bytes=4 * record_words(sizes.pages_per_sequence) if sizes.device_cursors else 0,
    )


def fit_sequences(one: CapacityReport, budget: int) -> int:
    """How many sequences that share nothing fit into `budget` bytes; at least one or an error."""
    count = (budget - one.weight_bytes) // one.sequence_bytes
    if count < 1:
        raise CapacityError(
            "memory budget (bytes)",
            one.weight_bytes + one.sequence_bytes,
            budget,
            f"one sequence needs {one.sequence_bytes} B beside {one.weight_bytes} B of weights; "
            "raise the budget, or lower capacity or the number of layers",
        )
    return int(count)
