"""What the delta-rule families share: keys, gates, the corrected value ``u`` in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..formats import CheckpointFormat
from .base import InputField, LayerSpec, RowField, WeightField

__all__ = ["DeltaSpec"]


@dataclass(frozen=True)
class DeltaSpec(LayerSpec):
    """Base of `GDNSpec` and `KDASpec`; the state is ``[heads, V, K]`` = ``[heads, dim, state]``."""

    key_heads: int = 1
    gate: str = "softplus"
    beta: Literal["sigmoid", "sigmoid2", "given"] = "sigmoid"
    norm: Literal["l2", "none"] = "l2"
    norm_eps: float = 1e-6
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_shared_heads()
        self._require_one_of("gate", self.gates_allowed)
        self._require_one_of("beta", ("sigmoid", "sigmoid2", "given"))
        self._require_one_of("norm", ("l2", "none"))
        self._require_number("norm_eps", "a number >= 0", lambda eps: eps >= 0)
        if self.scale is not None:
            self._require_number("scale", "a number, or None for state ** -0.5", lambda _: True)

    @property
    def gates_allowed(self) -> tuple[str, ...]:
        return ("softplus", "log")

    @property
    def gate_dims(self) -> tuple[str, ...]:
        """Dimensions of one token's gate: per head, or per head and key channel."""
        return ("heads",)

    @property
    def query_scale(self) -> float:
        return float(self.state**-0.5 if self.scale is None else self.scale)

    @property
    def head_ratio(self) -> int:
        """Value heads per key head."""
        return self.heads // self.key_heads

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.state + self.heads * self.dim

    def resolves(self, fmt: CheckpointFormat) -> bool:
        """Whether a fold solves for ``u`` again, because readouts saw a rounded checkpoint."""
        return fmt.rounded_readout

    def row_fields(self, dtype: torch.dtype, fmt: CheckpointFormat) -> tuple[RowField, ...]:
        dtype = self.check_dtype(dtype)
        gate = tuple(int(getattr(self, name)) for name in self.gate_dims)
        fields = [RowField("k", (self.key_heads, self.state), dtype)]
        if self.norm == "l2":
            fields.append(RowField("k_scale", (self.key_heads,), torch.float32))
        fields.append(RowField("g", gate, torch.float32))
        if self.resolves(fmt):
            # u is provisional: good for readouts until the next fold, which solves from v and beta.
            # bf16 even beside fp16 activations, so that no u can overflow.
            provisional = torch.float32 if dtype is torch.float32 else torch.bfloat16
            fields += [
                RowField("u", (self.heads, self.dim), provisional),
                RowField("v", (self.heads, self.dim), dtype),
                RowField("beta", (self.heads,), torch.float32),
            ]
        else:
            fields.append(RowField("u", (self.heads, self.dim), torch.float32))
        return tuple(fields)

    @property
    def input_fields(self) -> tuple[InputField, ...]:
        return (
            InputField("q", ("key_heads", "state"), "activation"),
            InputField("k", ("key_heads", "state"), "activation"),
            InputField("v", ("heads", "dim"), "activation"),
            InputField("g" if self.gate == "log" else "a", self.gate_dims, "gate"),
            InputField("b", ("heads",), "gate"),
        )

    @property
    def own_weight_fields(self) -> tuple[WeightField, ...]:
        if self.gate == "log":
            return ()
        gate = tuple(int(getattr(self, name)) for name in self.gate_dims)
        return (WeightField("A_log", (self.heads,)), WeightField("dt_bias", gate, default=0.0))

    @property
    def output_dims(self) -> tuple[str, str]:
        return ("heads", "dim")

    @property
    def shared_heads(self) -> tuple[str, int]:
        return ("key_heads", self.key_heads)
