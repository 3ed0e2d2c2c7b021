"""Prefill of Gated DeltaNet and Kimi Delta Attention with the chunks of flash-linear-attention."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..pools import StatePool
from .chunked import ChunkedPrefill, describe_import
from .torch.gates import beta, log_decay, norm_scale

__all__ = ["FlaPrefill"]

_CALLS = {
    "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
}
_LARGEST_STATE = 256


class FlaPrefill(ChunkedPrefill):
    """``fla-core``: chunks of 64 tokens on the matrix units, in the type of the activations."""

    name = "fla"

    def refuses(self, pool: StatePool) -> str | None:
        spec: Any = pool.spec
        if spec.family not in _CALLS:
            return f"family {spec.family!r}; its kernels serve {', '.join(_CALLS)}"
        if spec.state > _LARGEST_STATE:
            return f"state={spec.state}; its kernels hold up to {_LARGEST_STATE} key channels"
        return None

    def missing(self) -> str | None:
        return next((why for why in map(_why_not, _CALLS) if why is not None), None)

    def scan(
        self,
        pool: StatePool,
        layer: int,
        inputs: Mapping[str, torch.Tensor],
        cu: NDArray[np.int64],
        states: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        spec: Any = pool.spec
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        if spec.norm == "l2":
            q, k = (
                (x.float() * norm_scale(x, spec.norm_eps)[..., None]).to(x.dtype) for x in (q, k)
            )
        gate = inputs["g" if spec.gate == "log" else "a"]
        g = log_decay(spec, pool.weights, layer, gate[None])
        starts = torch.from_numpy(cu)
        y, final = _call(spec.family)(
            *(x.contiguous()[None] for x in (q, k, v)), g=g, beta=beta(spec, inputs["b"])[None],
            scale=spec.query_scale, initial_state=states, output_final_state=True,
            state_v_first=True, cu_seqlens=starts.to(out.device), cu_seqlens_cpu=starts,
        )  # fmt: skip
        out.copy_(y[0])
        result: torch.Tensor = final.float()
        return result


@lru_cache
def _call(family: str) -> Any:
    module, name = _CALLS[family]
    return getattr(importlib.import_module(module), name)


@lru_cache
def _why_not(family: str) -> str | None:
    try:
        takes = inspect.signature(_call(family)).parameters
    except Exception as error:  # not there, or it does not import on this machine
        return describe_import(error)
    return None if "state_v_first" in takes else "older than fla-core 0.6: it takes states K first"
