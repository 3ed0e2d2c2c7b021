"""Mamba-2: scalar decay per head, input and output projections shared by groups of heads.

::

    dt  = clamp(softplus(dt_raw + dt_bias), *dt_limit)
    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t = S_t C_t + D x_t          optionally  y_t *= silu(z_t)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import UnsupportedError
from ..formats import CheckpointFormat
from .base import InputField, LayerSpec, RowField, WeightField

__all__ = ["Mamba2Spec"]


@dataclass(frozen=True)
class Mamba2Spec(LayerSpec):
    """A Mamba-2 layer.

    Parameters
    ----------
    heads, dim, state, groups : int
        Heads, head size P, state size N, and the groups that share ``B`` and ``C``.
    dt_softplus : bool
        Whether the given ``dt`` is raw (softplus is applied after the bias) or already positive.
    dt_limit : (float, float)
        Clamp of ``dt`` after the softplus.
    conv_width, conv_activation
        The causal convolution over ``x | B | C``; width 0 where the caller convolves.

    Source
    ------
    Dao and Gu, "Transformers are SSMs", 2024 (arXiv 2405.21060).

    Examples
    --------
    >>> spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
    >>> spec.state_shape, spec.conv_channels
    ((128, 64, 128), 10240)
    >>> spec.shard(0, 16).groups  # fewer groups than ranks: replicated
    1
    """

    family: ClassVar[str] = "mamba2"

    groups: int = 1
    dt_softplus: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_shared_heads()
        limit: Any = self.dt_limit
        try:
            low, high = (float(v) for v in limit)
        except (TypeError, ValueError):
            low, high = math.nan, math.nan
        if not (0.0 <= low <= high and low < math.inf):
            raise UnsupportedError(
                f"dt_limit: got {limit!r}; allowed (low, high) with 0 <= low <= high; "
                "take time_step_limit from the model's config"
            )
        if high > torch.finfo(torch.float32).max:  # published as 1e308, which float32 cannot hold
            high = math.inf
        object.__setattr__(self, "dt_limit", (low, high))

    @property
    def conv_channels(self) -> int:
        return self.heads * self.dim + 2 * self.groups * self.state

    def row_fields(self, dtype: torch.dtype, fmt: CheckpointFormat) -> tuple[RowField, ...]:
        dtype = self.check_dtype(dtype)
        return (
            RowField("x", (self.heads, self.dim), dtype),
            RowField("B", (self.groups, self.state), dtype),
            RowField("dt", (self.heads,), torch.float32),
        )

    @property
    def input_fields(self) -> tuple[InputField, ...]:
        return (
            InputField("x", ("heads", "dim"), "activation"),
            InputField("dt", ("heads",), "gate"),
            InputField("B", ("groups", "state"), "activation"),
            InputField("C", ("groups", "state"), "activation"),
            InputField("z", ("heads", "dim"), "activation", optional=True),
        )

    @property
    def own_weight_fields(self) -> tuple[WeightField, ...]:
        return (
            WeightField("A", (self.heads,)),
            WeightField("D", (self.heads,), default=0.0),
            WeightField("dt_bias", (self.heads,), default=0.0),
        )

    @property
    def output_dims(self) -> tuple[str, str]:
        return ("heads", "dim")

    @property
    def shared_heads(self) -> tuple[str, int]:
        return ("groups", self.groups)
