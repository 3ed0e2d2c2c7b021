"""Kimi Delta Attention: Gated DeltaNet with a decay of its own for every key channel.

::

    S_t = S_{t-1} diag(e^{g_t}) (I - b_t k_t k_t^T) + b_t v_t k_t^T        y_t = scale * S_t q_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .delta import DeltaSpec

__all__ = ["KDASpec"]


@dataclass(frozen=True)
class KDASpec(DeltaSpec):
    """A Kimi Delta Attention layer.

    Parameters
    ----------
    heads, dim, state, key_heads, beta, norm, norm_eps, scale, conv_width, conv_activation
        As in `GDNSpec`.
    gate : {"softplus", "bounded", "log"}
        ``"softplus"``: ``g = -exp(A_log) softplus(a + dt_bias)``; ``"bounded"``:
        ``g = lower_bound sigmoid(exp(A_log) (a + dt_bias))``, with ``a [heads, state]`` raw,
        ``A_log [heads]`` and ``dt_bias [heads, state]``. ``"log"``: the log decay ``g <= 0`` is
        given.
    lower_bound : float
        Most negative log decay of a token with the bounded gate.

    Source
    ------
    Kimi Team, "Kimi Linear", 2025 (arXiv 2510.26692).

    Examples
    --------
    >>> spec = KDASpec(heads=32, dim=128, state=128, key_heads=32)
    >>> spec.gate_dims
    ('heads', 'state')
    """

    family: ClassVar[str] = "kda"

    lower_bound: float = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_number("lower_bound", "a negative number", lambda low: -1e4 <= low < 0)

    @property
    def gates_allowed(self) -> tuple[str, ...]:
        return ("softplus", "bounded", "log")

    @property
    def gate_dims(self) -> tuple[str, ...]:
        return ("heads", "state")
