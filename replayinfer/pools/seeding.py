"""What a prefill hands over, checked and put into the pool's own order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..checks import check_tensor
from ..errors import InputError
from .weights import FLOAT_DTYPES

if TYPE_CHECKING:
    from .pool import StatePool

__all__ = ["check_seed"]


def check_seed(
    pool: StatePool,
    states: Mapping[int, torch.Tensor],
    conv: Mapping[int, torch.Tensor] | None,
    layout: str,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    heads, dim, state = pool.spec.state_shape
    if layout not in ("vk", "kv"):
        raise InputError(
            f"layout: got {layout!r}; allowed 'vk' ([heads, dim, state]) or 'kv' "
            "([heads, state, dim]); name the order of the last two dimensions"
        )
    if conv is None and pool.spec.conv_width:
        raise InputError(
            "conv: got None; allowed a mapping of layer to [channels, taps]; pass the last "
            "conv_width - 1 pre-convolution rows of the prefill"
        )
    tables: list[tuple[str, Mapping[int, torch.Tensor]]] = [("states", states)]
    if conv is not None and pool.spec.conv_width:
        tables.append(("conv", conv))
    for name, given in tables:
        if not isinstance(given, Mapping) or set(given) != set(pool.layers):
            got = f"layers {list(given)}" if isinstance(given, Mapping) else type(given).__name__
            raise InputError(
                f"{name}: got {got}; allowed a mapping of exactly the layers {list(pool.layers)}; "
                "seed every layer of the pool at once"
            )
    shape, dims = ((heads, dim, state), ("heads", "dim", "state"))
    if layout == "kv":
        shape, dims = ((heads, state, dim), ("heads", "state", "dim"))
    state_rows: list[torch.Tensor] = []
    conv_rows: list[torch.Tensor | None] = []
    for layer in pool.layers:
        value = check_tensor(
            f"states[{layer}]", states[layer], shape=shape, dims=dims,
            dtypes=FLOAT_DTYPES, device=pool.device,
            advice=f"layout={layout!r}; drop the batch dimension",
        )  # fmt: skip
        value = value.detach().float()
        state_rows.append(value.transpose(1, 2) if layout == "kv" else value)
        conv_rows.append(
            _check_tail(pool, layer, conv[layer]) if len(tables) == 2 and conv else None
        )
    return state_rows, conv_rows


def _check_tail(pool: StatePool, layer: int, tail: torch.Tensor) -> torch.Tensor:
    channels, taps = pool.spec.conv_channels, pool.conv.taps
    check_tensor(
        f"conv[{layer}]", tail, shape=(channels, None), dims=("channels", "taps"),
        dtypes=FLOAT_DTYPES, device=pool.device, advice="drop the batch dimension",
    )  # fmt: skip
    rows = tail.detach()[:, max(tail.shape[1] - taps, 0) :].transpose(0, 1)
    missing = taps - rows.shape[0]
    return torch.cat([rows.new_zeros(missing, channels), rows]) if missing else rows
