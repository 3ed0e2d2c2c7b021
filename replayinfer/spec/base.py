"""What every layer family declares: sizes, rows, inputs, weights, shards."""

from __future__ import annotations

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..checks import dtype_name
from ..errors import InputError, UnsupportedError
from ..formats import CheckpointFormat

__all__ = ["ACTIVATION_DTYPES", "GATE_DTYPES", "InputField", "LayerSpec", "RowField", "WeightField"]

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Activation = Literal["silu"] | None


@dataclass(frozen=True)
class RowField:
    """One tensor of a row: what a single token leaves behind in one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class InputField:
    """One tensor of a step, ``[batch, window, *dims]``; `dims` names attributes of the spec.

    `kind` is ``"activation"`` (the pool's dtype) or ``"gate"`` (float32 or 16-bit, computed in
    fp32).
    """

    name: str
    dims: tuple[str, ...]
    kind: Literal["activation", "gate"]
    optional: bool = False


@dataclass(frozen=True)
class WeightField:
    """One per-layer parameter that `StatePool.bind` takes and keeps in float32."""

    name: str
    shape: tuple[int, ...]
    default: float | None = None  # None: required


@dataclass(frozen=True)
class LayerSpec(ABC):
    """The shape and the variations of one state-space or linear-attention layer.

    Immutable; every size is that of the shard it describes (see `shard`). The state is
    ``[heads, dim, state]`` in every family.
    """

    family: ClassVar[str]

    # Declared here for readers of the type; every family has them as fields.
    heads: int
    dim: int
    state: int
    conv_width: int = dataclasses.field(default=4, kw_only=True)
    conv_activation: Activation = dataclasses.field(default="silu", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "state"):
            self._require_positive(name)
        width = self.conv_width
        if isinstance(width, bool) or not isinstance(width, int) or width < 0 or width == 1:
            raise UnsupportedError(
                f"conv_width: got {width!r}; allowed 0 (the caller convolves) or an integer >= 2; "
                "pass the kernel size of the layer's convolution"
            )
        self._require_one_of("conv_activation", ("silu", None))

    # What a family provides -------------------------------------------------------------------

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Channels that go through the layer's causal convolution."""

    @abstractmethod
    def row_fields(self, dtype: torch.dtype, fmt: CheckpointFormat) -> tuple[RowField, ...]:
        """The tensors of a row for activations of `dtype` and a checkpoint in `fmt`."""

    @property
    @abstractmethod
    def input_fields(self) -> tuple[InputField, ...]:
        """The tensors that a readout takes."""

    @property
    @abstractmethod
    def own_weight_fields(self) -> tuple[WeightField, ...]:
        """The family's parameters, without the convolution's."""

    @property
    @abstractmethod
    def output_dims(self) -> tuple[str, str]:
        """Names of the last two dimensions of the output."""

    @property
    @abstractmethod
    def shared_heads(self) -> tuple[str, int]:
        """Name and number of the heads that several state heads share (groups, key heads)."""

    # What follows from it ---------------------------------------------------------------------

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``(heads, dim, state)``."""
        return (self.heads, self.dim, self.state)

    @property
    def weight_fields(self) -> tuple[WeightField, ...]:
        """Every parameter that `StatePool.bind` takes for a layer of this shape."""
        if not self.conv_width:
            return self.own_weight_fields
        return (
            *self.own_weight_fields,
            WeightField("conv_weight", (self.conv_channels, self.conv_width)),
            WeightField("conv_bias", (self.conv_channels,), default=0.0),
        )

    def checkpoint_bytes(self, fmt: CheckpointFormat) -> int:
        """Bytes of one checkpoint page in one layer: ``heads * dim * state * bytes_stored``."""
        return math.prod(self.state_shape) * fmt.bytes_stored

    def row_bytes(self, dtype: torch.dtype, fmt: CheckpointFormat) -> int:
        """Bytes of one row in one layer."""
        return sum(f.nbytes for f in self.row_fields(dtype, fmt))

    def shard(self, rank: int, size: int) -> LayerSpec:
        """The part of this layer that tensor-parallel rank `rank` of `size` holds.

        State heads are split evenly. Shared heads (groups, key heads) are split too, or replicated
        where there are fewer of them than ranks.

        Raises
        ------
        InputError
            The heads do not divide, or shared heads neither divide nor are divided by `size`.
        """
        ranges = self.shard_ranges(rank, size)
        name, _ = self.shared_heads
        counts: dict[str, Any] = {"heads": len(ranges["heads"]), name: len(ranges[name])}
        return dataclasses.replace(self, **counts)

    def shard_ranges(self, rank: int, size: int) -> Mapping[str, range]:
        """Which heads, and which shared heads, of the whole layer rank `rank` of `size` holds."""
        for label, value, low in (("size", size, 1), ("rank", rank, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InputError(f"{label}: got {value!r}; allowed an integer >= {low}; change it")
        if rank >= size:
            raise InputError(f"rank: got {rank}; allowed 0..{size - 1} for size={size}; change it")
        name, shared = self.shared_heads
        if self.heads % size:
            raise InputError(
                f"size: got {size}; allowed a divisor of heads={self.heads}; use another "
                "tensor-parallel size"
            )
        if shared % size and size % shared:
            raise InputError(
                f"size: got {size}; allowed a divisor or a multiple of {name}={shared}; use "
                "another tensor-parallel size"
            )
        per_rank = self.heads // size
        if shared >= size:
            count = shared // size
            held = range(rank * count, (rank + 1) * count)
        else:
            first = rank * shared // size
            held = range(first, first + 1)
        return {"heads": range(rank * per_rank, (rank + 1) * per_rank), name: held}

    def check_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuse an activation dtype that no row can hold as given."""
        if dtype not in ACTIVATION_DTYPES:
            raise UnsupportedError(
                f"dtype: got {dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype!r}; "
                "allowed float32, bfloat16 or float16; pass the dtype of the layer's activations"
            )
        return dtype

    # Validation helpers -----------------------------------------------------------------------

    def _require_positive(self, name: str) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedError(
                f"{name}: got {value!r}; allowed an integer >= 1; take it from the model's config"
            )

    def _require_number(self, name: str, rule: str, allowed: Callable[[float], bool]) -> None:
        value: Any = getattr(self, name)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not allowed(value):
            raise UnsupportedError(
                f"{name}: got {value!r}; allowed {rule}; take it from the model's config"
            )

    def _require_one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value: Any = getattr(self, name)
        if value not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise UnsupportedError(f"{name}: got {value!r}; allowed {choices}; pick one")

    def _require_shared_heads(self) -> None:
        name, shared = self.shared_heads
        self._require_positive(name)
        if self.heads % shared:
            raise UnsupportedError(
                f"{name}: got {shared}; allowed a divisor of heads={self.heads}; "
                "take both from the model's config"
            )
