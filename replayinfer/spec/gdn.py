"""Gated DeltaNet: scalar decay per value head and a delta-rule update of the state.

::

    S_t = e^{g_t} S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T         y_t = scale * S_t q_t
    u_t = b_t (v_t - e^{g_t} S_{t-1} k_t)      so that      S_t = e^{g_t} S_{t-1} + u_t k_t^T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..errors import UnsupportedError
from ..formats import CheckpointFormat
from .base import InputField, LayerSpec, RowField, WeightField

__all__ = ["GDNSpec"]


@dataclass(frozen=True)
class GDNSpec(LayerSpec):
    """A Gated DeltaNet layer.

    Parameters
    ----------
    heads, dim, state : int
        Value heads, value size V, key size K. The state is ``[heads, V, K]``.
    key_heads : int
        Heads of ``q`` and ``k``; value head ``h`` uses key head ``h // (heads // key_heads)``.
    gate : {"softplus", "log"}
        ``"softplus"``: the readout takes raw ``a`` and the layer binds ``A_log`` and ``dt_bias``,
        ``g = -exp(A_log) softplus(a + dt_bias)``. ``"log"``: it takes the log decay ``g <= 0``.
    beta : {"sigmoid", "sigmoid2", "given"}
        How ``b`` becomes beta: ``sigmoid(b)`` in (0, 1), ``2 sigmoid(b)`` in (0, 2), or as given.
    norm : {"l2", "none"}
        Whether ``q`` and ``k`` are normalised here, by ``rsqrt(sum of squares + norm_eps)``.
    scale : float or None
        Query scale; None means ``state ** -0.5``.
    conv_width, conv_activation
        The causal convolution over ``q | k | v``; width 0 where the caller convolves.

    Source
    ------
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024 (arXiv 2412.06464).

    Examples
    --------
    >>> spec = GDNSpec(heads=32, dim=128, state=128, key_heads=16)
    >>> spec.conv_channels
    8192
    """

    family: ClassVar[str] = "gdn"

    key_heads: int = 1
    gate: Literal["softplus", "log"] = "softplus"
    beta: Literal["sigmoid", "sigmoid2", "given"] = "sigmoid"
    norm: Literal["l2", "none"] = "l2"
    norm_eps: float = 1e-6
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_shared_heads()
        self._require_one_of("gate", ("softplus", "log"))
        self._require_one_of("beta", ("sigmoid", "sigmoid2", "given"))
        self._require_one_of("norm", ("l2", "none"))
        if not self.norm_eps >= 0:
            raise UnsupportedError(
                f"norm_eps: got {self.norm_eps!r}; allowed a number >= 0; take it from the model"
            )

    @property
    def query_scale(self) -> float:
        return self.state**-0.5 if self.scale is None else self.scale

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
        fields = [RowField("k", (self.key_heads, self.state), dtype)]
        if self.norm == "l2":
            fields.append(RowField("k_scale", (self.key_heads,), torch.float32))
        fields.append(RowField("g", (self.heads,), torch.float32))
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
        gate = "a" if self.gate == "softplus" else "g"
        return (
            InputField("q", ("key_heads", "state"), "activation"),
            InputField("k", ("key_heads", "state"), "activation"),
            InputField("v", ("heads", "dim"), "activation"),
            InputField(gate, ("heads",), "gate"),
            InputField("b", ("heads",), "gate"),
        )

    @property
    def own_weight_fields(self) -> tuple[WeightField, ...]:
        if self.gate == "log":
            return ()
        return (
            WeightField("A_log", (self.heads,)),
            WeightField("dt_bias", (self.heads,), default=0.0),
        )

    @property
    def output_dims(self) -> tuple[str, str]:
        return ("heads", "dim")

    @property
    def shared_heads(self) -> tuple[str, int]:
        return ("key_heads", self.key_heads)
