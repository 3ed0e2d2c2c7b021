"""The parameters of a pool's layers that readouts and folds need, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..checks import check_tensor
from ..errors import InputError, PlanError
from ..spec import LayerSpec

__all__ = ["FLOAT_DTYPES", "LayerWeights"]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LayerWeights:
    """One tensor per parameter over all layers, so that a fold of every layer is one launch.

    Attributes
    ----------
    tensors : dict of str to Tensor
        float32 ``[layers, *shape]`` by name; NaN until bound where a parameter has no default.
    """

    def __init__(self, spec: LayerSpec, layers: tuple[int, ...], device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {
            f.name: torch.full(
                (len(layers), *f.shape),
                math.nan if f.default is None else f.default,
                dtype=torch.float32,  # whatever torch's default is
                device=device,
            )
            for f in spec.weight_fields
        }
        ready = all(f.default is not None for f in spec.weight_fields)
        self._bound = dict.fromkeys(layers, ready)

    def bind(self, index: int, layer: int, weights: Mapping[str, torch.Tensor | None]) -> None:
        """Copy the parameters of one layer, or raise and change nothing."""
        fields = {f.name: f for f in self.spec.weight_fields}
        if unknown := set(weights) - set(fields):
            raise InputError(
                f"weights: got {', '.join(sorted(unknown))}; allowed "
                f"{', '.join(fields) or 'none for this spec'}; rename or drop it"
            )
        ready: dict[str, torch.Tensor] = {}
        for name, field in fields.items():
            value = weights.get(name)
            if value is None:
                if field.default is None:
                    raise InputError(
                        f"{name}: got nothing for layer {layer}; allowed float "
                        f"{list(field.shape)}; pass {name}=…"
                    )
                value = torch.full(
                    field.shape, field.default, dtype=torch.float32, device=self.device
                )
            check_tensor(
                name, value, shape=field.shape, dims=[str(s) for s in field.shape],
                dtypes=FLOAT_DTYPES, device=self.device,
                advice="for a tensor-parallel shard use spec.shard(rank, size)",
            )  # fmt: skip
            ready[name] = value.detach().float()
        if "A" in ready:
            # A = -inf (from exp of a large A_log) times a decay length of 0 would be NaN.
            if not bool((ready["A"] <= 0).all()):
                raise InputError(
                    "A: got a value above 0 or NaN; allowed A <= 0 per head; "
                    "pass A = -exp(A_log), not A_log"
                )
            ready["A"] = ready["A"].clamp_min(torch.finfo(torch.float32).min)
        for name, value in ready.items():
            self.tensors[name][index] = value
        self._bound[layer] = True

    def require_bound(self) -> None:
        """Raise unless every layer has its parameters."""
        missing = [layer for layer, bound in self._bound.items() if not bound]
        if missing:
            raise PlanError(
                f"weights: got none for layers {missing}; allowed after pool.bind(layer, …); "
                "bind every layer of the pool first"
            )
