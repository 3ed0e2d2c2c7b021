"""The recurrent layers of a loaded SGLang model: their shape and their parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

from replayinfer import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, UnsupportedError

__all__ = ["Family", "RecurrentLayers", "read_layers"]

Family = Literal["gdn", "kda", "mamba2"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class RecurrentLayers:
    """The shape that a model's recurrent layers share, and its modules by layer index."""

    family: Family
    spec: LayerSpec
    modules: dict[int, Any]

    def weights(self, layer: int) -> dict[str, torch.Tensor]:
        """What `StatePool.bind` takes for a layer."""
        module = self.modules[layer]
        if self.family == "mamba2":
            return {name: getattr(module, name).data for name in ("A", "D", "dt_bias")}
        spec: Any = self.spec
        gate = [int(getattr(spec, name)) for name in spec.gate_dims]
        return {
            "A_log": module.A_log.data.reshape(spec.heads),
            "dt_bias": module.dt_bias.data.reshape(gate),
        }


def read_layers(model: Any, family: Family) -> RecurrentLayers:
    """The recurrent layers of `model`, as this rank holds them.

    Raises
    ------
    UnsupportedError
        There are none of the family, or they differ in shape.
    """
    found: dict[int, tuple[LayerSpec, Any]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if family == "mamba2" and kind == "MambaMixer2":
            match = _LAYER.search(f"{name}.")
            if match is None:
                raise UnsupportedError(
                    f"model: got a Mamba-2 mixer called {name!r}; allowed names that hold "
                    "layers.<index>; serve with another decode backend"
                )
            found[int(match[1])] = (_mamba2(module), module)
        elif family != "mamba2" and kind == "RadixLinearAttention":
            found[int(module.layer_id)] = (_delta(module, family), module)
    shapes = {spec for spec, _ in found.values()}
    if len(shapes) != 1:
        what = "no layers of it" if not shapes else f"layers of {len(shapes)} shapes"
        raise UnsupportedError(
            f"model: got {type(model).__name__} with {what} ({family}); allowed GDN, KDA or "
            "Mamba-2 layers of one shape; serve with another decode backend"
        )
    return RecurrentLayers(
        family, shapes.pop(), {layer: module for layer, (_, module) in sorted(found.items())}
    )


def _delta(module: Any, family: Family) -> LayerSpec:
    if module.num_q_heads != module.num_k_heads or module.head_q_dim != module.head_k_dim:
        raise UnsupportedError(
            f"model: got {module.num_q_heads} query heads of {module.head_q_dim} and "
            f"{module.num_k_heads} key heads of {module.head_k_dim}; allowed equal ones; serve "
            "with another decode backend"
        )
    sizes: dict[str, Any] = {
        "heads": int(module.num_v_heads),
        "dim": int(module.head_v_dim),
        "state": int(module.head_k_dim),
        "key_heads": int(module.num_k_heads),
    }
    if family == "gdn":
        return GDNSpec(**sizes, gate="softplus", conv_width=0)
    if module.lower_bound is None:
        return KDASpec(**sizes, gate="softplus", conv_width=0)
    return KDASpec(**sizes, gate="bounded", lower_bound=float(module.lower_bound), conv_width=0)


def _mamba2(module: Any) -> LayerSpec:
    ranks = int(module.tp_size)
    return Mamba2Spec(
        heads=int(module.num_heads) // ranks,
        dim=int(module.head_dim),
        state=int(module.ssm_state_size),
        groups=int(module.n_groups) // ranks,
        conv_width=0,
    )
