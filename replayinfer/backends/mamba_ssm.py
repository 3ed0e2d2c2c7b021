"""Prefill of Mamba-2 with mamba-ssm's chunked scan."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..pools import StatePool
from .chunked import ChunkedPrefill, describe_import
from .torch.gates import step_sizes

__all__ = ["MambaSsmPrefill"]

_MODULE = "mamba_ssm.ops.triton.ssd_combined"
_CHUNK = 128
_LARGEST_STATE = 256


class MambaSsmPrefill(ChunkedPrefill):
    """``mamba-ssm``: chunks of 128 tokens on the matrix units, in the type of the activations.

    Its scan of packed sequences takes no states to start from, so sequences of one length are
    scanned together, and others one after another.
    """

    name = "mamba_ssm"

    def refuses(self, pool: StatePool) -> str | None:
        spec: Any = pool.spec
        if spec.family != "mamba2":
            return f"family {spec.family!r}; its kernels serve mamba2"
        if spec.state > _LARGEST_STATE:
            return f"state={spec.state}; its kernels hold up to {_LARGEST_STATE}"
        return None

    def missing(self) -> str | None:
        return _why_not()

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
        weights = pool.weights
        tokens = dict(inputs)
        tokens["dt"] = step_sizes(spec, inputs["dt"], weights["dt_bias"][layer])
        final = torch.empty_like(states)
        lengths = np.diff(cu)
        for length in np.unique(lengths).tolist():
            members = np.flatnonzero(lengths == length)
            rows = torch.from_numpy(cu[members][:, None] + np.arange(length)).to(out.device)
            part = {name: value[rows] for name, value in tokens.items()}
            which = pool.device_ids(members)
            y, after = _call()(
                part["x"], part["dt"], weights["A"][layer], part["B"], part["C"], _CHUNK,
                D=weights["D"][layer], z=part.get("z"), initial_states=states[which],
                return_final_states=True,
            )  # fmt: skip
            out[rows] = y.to(out.dtype)
            final[which] = after.float()
        return final


@lru_cache
def _call() -> Any:
    return importlib.import_module(_MODULE).mamba_chunk_scan_combined


@lru_cache
def _why_not() -> str | None:
    try:
        _call()
    except Exception as error:  # not there, or it does not import on this machine
        return describe_import(error)
    return None
