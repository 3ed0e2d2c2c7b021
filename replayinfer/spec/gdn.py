"""Gated DeltaNet: scalar decay per value head and a delta-rule update of the state.

::

    S_t = e^{g_t} S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T         y_t = scale * S_t q_t
    u_t = b_t (v_t - e^{g_t} S_{t-1} k_t)      so that      S_t = e^{g_t} S_{t-1} + u_t k_t^T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .delta import DeltaSpec

__all__ = ["GDNSpec"]


@dataclass(frozen=True)
class GDNSpec(DeltaSpec):
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
