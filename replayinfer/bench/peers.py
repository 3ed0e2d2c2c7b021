"""Standard decode kernels of installed peers: they read and write every state in every token."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..spec import LayerSpec, Mamba2Spec

__all__ = ["PeerKernel", "standard_kernels"]

# Where each peer keeps its Mamba-2 state update.
_MAMBA2 = {
    "sglang": "sglang.kernels.ops.mamba.triton_ops.mamba_ssm",
    "mamba_ssm": "mamba_ssm.ops.triton.selective_state_update",
    "flashinfer": "flashinfer.mamba",
}
# (rows of a tile, warps) that a Triton peer is tried with, beside its own choice.
_TUNING = (None, (8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4))


@dataclass(frozen=True)
class PeerKernel:
    """A peer's kernel over states of its own, one launch a layer."""

    name: str
    launch: Callable[[], None]


def standard_kernels(
    spec: LayerSpec,
    batch: int,
    layers: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> Iterator[PeerKernel]:
    """Every installed peer's kernel for `spec`, in each configuration worth trying."""
    if not isinstance(spec, Mamba2Spec):
        return
    for peer, path in _MAMBA2.items():
        try:
            module = importlib.import_module(path)
        except Exception:  # not installed, or it does not import on this machine
            continue
        update = getattr(module, "selective_state_update", None)
        if update is None:
            continue
        call = _mamba2_step(update, spec, batch, layers, dtype, state_dtype, device)
        kernel = "_selective_scan_update_kernel"
        if not hasattr(module, kernel):
            yield PeerKernel(peer, call)
            continue
        for choice in _TUNING:
            label = peer if choice is None else f"{peer} (tile {choice[0]}, {choice[1]} warps)"
            yield PeerKernel(label, _with_choice(module, kernel, choice, call))


def _mamba2_step(
    update: Callable[..., Any],
    spec: Mamba2Spec,
    batch: int,
    layers: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    heads, dim, state = spec.state_shape

    def random(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=of)

    states = [random(batch, heads, dim, state, of=state_dtype) for _ in range(layers)]
    steps = [
        (
            random(batch, heads, dim),
            random(batch, heads)[..., None].expand(batch, heads, dim),
            random(batch, spec.groups, state),
            random(batch, spec.groups, state),
        )
        for _ in range(layers)
    ]
    a = -torch.rand(heads, device=device)[:, None, None].expand(heads, dim, state)
    skip = random(heads, of=torch.float32)[:, None].expand(heads, dim)
    bias = (random(heads, of=torch.float32) - 4)[:, None].expand(heads, dim)
    slots = torch.arange(batch, device=device, dtype=torch.int32)
    out = torch.empty(batch, heads, dim, device=device, dtype=dtype)

    def launch() -> None:
        for s, (x, dt, b, c) in zip(states, steps, strict=True):
            update(
                s, x, dt, a, b, c, D=skip, dt_bias=bias, dt_softplus=True,
                state_batch_indices=slots, out=out,
            )  # fmt: skip

    return launch


def _with_choice(
    module: Any, kernel: str, choice: tuple[int, int] | None, call: Callable[[], None]
) -> Callable[[], None]:
    """`call` with the peer's Triton kernel launched by another tile and warp count."""
    if choice is None:
        return call
    original = getattr(module, kernel)

    def launch() -> None:
        setattr(module, kernel, _Chosen(original, *choice))
        try:
            call()
        finally:
            setattr(module, kernel, original)

    return launch


class _Chosen:
    """A Triton kernel whose caller passes the tile size by position; both choices are replaced."""

    def __init__(self, kernel: Any, tile: int, warps: int) -> None:
        inner = kernel
        while hasattr(inner, "fn") and not hasattr(inner, "arg_names"):  # heuristics wrap kernels
            inner = inner.fn
        self._kernel, self._tile, self._warps = kernel, tile, warps
        self._place = list(inner.arg_names).index("BLOCK_SIZE_M")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            place = self._place
            args = (*args[:place], self._tile, *args[place + 1 :])
            return self._kernel[grid](*args, **{**kwargs, "num_warps": self._warps})

        return launch
