"""How long a decode step of a recurrent layer takes, from its bytes and measured constants.

::

    replay    lat(n) + readout bytes / (read  x BW) + fold bytes / (fold x BW)
    standard  lat(n) + state bytes   / (read x BW)
    lat(n)    one + (many - one) x log2(min(n, 32)) / 5

``BW`` is what a plain read reaches on the device, the shares are of that, and ``n`` counts the
sequences of the step. The readout's bytes are the plane and the rows of every sequence
(`readout_bytes`); a fold's are the checkpoint, read and written, and its rows (`fold_bytes`); a
standard kernel reads a state once and writes one per token of the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..formats import CheckpointFormat, get_format
from ..spec import LayerSpec
from .bytes import SteadyState, fold_bytes, readout_bytes
from .devices import Device, get_device

__all__ = ["KERNELS", "STANDARD", "KernelConstants", "StepCost", "latency_us"]

MANY = 32
"""Sequences from which on a kernel's latency grows no more."""


@dataclass(frozen=True)
class KernelConstants:
    """What the kernels of one family were measured to reach on an H200.

    Attributes
    ----------
    one_us, many_us : float
        Microseconds of a layer that are not bytes, for one sequence and for 32 or more: launches,
        the prepass, the ramp of a grid, and the layer's share of the plan's upload.
    read, fold : float
        Shares of the read ceiling at which readouts (or standard kernels) and folds move their
        bytes.
    """

    one_us: float
    many_us: float
    read: float
    fold: float


# Source: docs/benchmarks/*.json, rows of scope `ssm` with windows of one token that were not
# direct. `fold` is from "What bounds the large batches" in docs/benchmarks/README.md: 20, 17 and
# 35 us of folds at batch 256, whose bytes need 16.0, 8.6 and 17.3 us. Given that, `many_us` and
# `read` fit the rows of batch 32 and above with least relative squares, and `one_us` is what is
# left of batch 1 (of the delta rules, before that went direct). `python -m
# replayinfer.cost.calibrate docs/benchmarks/*.json` prints them.
KERNELS: Mapping[str, KernelConstants] = {
    "mamba2": KernelConstants(one_us=3.19, many_us=5.73, read=0.918, fold=0.80),
    "gdn": KernelConstants(one_us=3.74, many_us=7.60, read=0.977, fold=0.51),
    "kda": KernelConstants(one_us=4.53, many_us=7.93, read=0.858, fold=0.49),
}

# Source: `baseline_us` of the same rows, the fastest standard kernel that was installed.
STANDARD: Mapping[str, KernelConstants] = {
    "mamba2": KernelConstants(one_us=2.38, many_us=2.25, read=0.869, fold=0.0),
    "gdn": KernelConstants(one_us=3.07, many_us=3.96, read=0.919, fold=0.0),
    "kda": KernelConstants(one_us=2.71, many_us=4.12, read=0.917, fold=0.0),
}


def latency_us(constants: KernelConstants, sequences: float) -> float:
    """``lat(n)`` of the module's formula; none where there is no sequence."""
    if sequences < 1:
        return 0.0
    share = math.log2(min(sequences, MANY)) / math.log2(MANY)
    return constants.one_us + (constants.many_us - constants.one_us) * share


@dataclass(frozen=True)
class StepCost:
    """Times of one recurrent layer on one GPU.

    Parameters
    ----------
    spec : LayerSpec
    format : CheckpointFormat
    dtype : torch.dtype
        Of activations.
    device : Device
    window : int
        Tokens of a step.

    Examples
    --------
    >>> from replayinfer import Mamba2Spec
    >>> cost = StepCost.of(Mamba2Spec(heads=128, dim=64, state=128, groups=8), gpu="h200")
    >>> round(cost.standard_us(256) / cost.steady_us(256, capacity=32), 1)
    3.1
    """

    spec: LayerSpec
    format: CheckpointFormat
    dtype: torch.dtype
    device: Device
    window: int = 1

    @staticmethod
    def of(
        spec: LayerSpec,
        format: str | CheckpointFormat = "fp32_split",
        dtype: torch.dtype = torch.bfloat16,
        *,
        gpu: str | Device = "h200",
        window: int = 1,
    ) -> StepCost:
        """From names."""
        return StepCost(spec, get_format(format), dtype, get_device(gpu), window)

    @property
    def constants(self) -> KernelConstants:
        return KERNELS[self.spec.family]

    def _micros(self, size: float, share: float) -> float:
        return size / (share * self.device.read_tbps * 1e6)

    @property
    def sequence_us(self) -> float:
        """A sequence's readout without rows: its plane and its own window."""
        size = readout_bytes(self.spec, self.format, self.dtype, rows=0, window=self.window)
        return self._micros(size, self.constants.read)

    @property
    def row_us(self) -> float:
        """A row that a readout reads."""
        return self._micros(self.spec.row_bytes(self.dtype, self.format), self.constants.read)

    def fold_us(self, rows: float) -> float:
        """A fold of `rows` rows."""
        size = fold_bytes(self.spec, self.format, self.dtype, rows=rows)
        return self._micros(size, self.constants.fold)

    def step_us(self, sequences: int, rows: float, folds: float, rows_folded: float) -> float:
        """One step.

        Parameters
        ----------
        sequences : int
        rows : float
            Rows before the windows, after the folds, over all sequences.
        folds, rows_folded : float
            Folds of the step, and the rows that they cover together.
        """
        return (
            latency_us(self.constants, sequences)
            + sequences * self.sequence_us
            + rows * self.row_us
            + folds * self.fold_us(0)
            + rows_folded * (self.fold_us(1) - self.fold_us(0))
        )

    def steps_us(
        self,
        sequences: NDArray[Any],
        rows: NDArray[Any],
        folds: NDArray[Any],
        rows_folded: NDArray[Any],
    ) -> NDArray[np.float64]:
        """As `step_us`, for many steps at once."""
        counts, place = np.unique(sequences, return_inverse=True)
        latency = np.array([latency_us(self.constants, int(n)) for n in counts])[place]
        fold, row = self.fold_us(0), self.fold_us(1) - self.fold_us(0)
        moved: NDArray[np.float64] = (
            latency + sequences * self.sequence_us + rows * self.row_us
        ) + (folds * fold + rows_folded * row)
        return moved

    def steady_us(self, sequences: int, capacity: int, commit_rate: float = 1.0) -> float:
        """The mean step of `sequences` whose folds are spread evenly over a cycle."""
        steady = SteadyState.of(capacity, self.window, commit_rate)
        folds = sequences * steady.folds
        return self.step_us(sequences, sequences * steady.rows, folds, folds * steady.rows_folded)

    def standard_us(self, sequences: int) -> float:
        """A kernel without replay at the same exactness: the state read, and written per token."""
        constants = STANDARD[self.spec.family]
        state = math.prod(self.spec.state_shape) * self.format.standard_bytes
        moved = self._micros(sequences * state * (1 + self.window), constants.read)
        return latency_us(constants, sequences) + moved
