"""SGLang's update of the causal convolution, which its mixers launch before the state's."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from ..work import Work

__all__ = ["convolution"]


def convolution(work: Work, *, channels_last: bool = False) -> Callable[[int], torch.Tensor]:
    """A function of a layer that moves its windows and returns the convolved rows.

    Parameters
    ----------
    channels_last : bool
        Keep a window's rows together in memory, as its Kimi Delta Attention does; its other
        families keep a channel's values together.

    Returns
    -------
    function
        Of a layer, to ``[batch, channels]``.
    """
    path = "sglang.kernels.ops.mamba.causal_conv1d_triton"
    update = importlib.import_module(path).causal_conv1d_update
    windows = [
        w.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else w for w in work.windows
    ]
    weights = [w["conv_weight"].to(work.dtype) for w in work.weights]
    biases = [w["conv_bias"].to(work.dtype) if work.conv_bias else None for w in work.weights]

    def convolve(layer: int) -> torch.Tensor:
        rows: torch.Tensor = update(
            work.tokens[layer].rows, windows[layer], weights[layer], biases[layer],
            work.spec.conv_activation, conv_state_indices=work.slots,
        )  # fmt: skip
        return rows

    return convolve
