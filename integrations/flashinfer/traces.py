"""FlashInfer's tracing around our calls, where FlashInfer is installed.

`traced` gives a call that computes as before and carries a trace template: FlashInfer's logging and
dumps (``FLASHINFER_LOGLEVEL``, ``FLASHINFER_TRACE_DUMP``) see it, and ``.fi_trace(**arguments)``
gives its definition. The calls themselves stay as they are.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayinfer import InputError, delta_walk, mamba2_ring, mamba2_walk

from .gdn import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from .mamba import checkpointing_ssu, selective_state_update

__all__ = ["traced", "traces"]

_VARYING = ("batch", "window", "slots")
_ABBREVIATIONS = {
    "heads": "h", "key_heads": "kh", "groups": "g", "dim": "d", "state": "s", "ring": "r",
}  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """Axes of a call's tensors by name, in order; ``?`` behind a name: it may be absent."""

    function: Callable[..., Any]
    op_type: str
    inputs: dict[str, str]
    output: str
    like: str


_MAMBA = {
    "x": "batch window heads dim",
    "dt": "batch window heads",
    "B": "batch window groups state",
    "C": "batch window groups state",
    "A": "heads",
    "D?": "heads",
    "z?": "batch window heads dim",
    "dt_bias?": "heads",
}
# As FlashInfer's callers pass them: one value a head, expanded.
_EXPANDED = _MAMBA | {
    "dt": "batch window heads dim",
    "A": "heads dim state",
    "D?": "heads dim",
    "dt_bias?": "heads dim",
}
_DELTA = {
    "q": "batch window key_heads state",
    "k": "batch window key_heads state",
    "v": "batch window heads dim",
    "a": "batch window heads",
    "b": "batch window heads",
    "A_log": "heads",
    "dt_bias": "heads",
}
_STATE = "slots heads dim state"
_Y = "batch window heads dim"
_CALLS = {
    call.function.__name__: call
    for call in (
        _Call(mamba2_walk, "mamba", {"state": _STATE, **_MAMBA, "source?": "batch"}, _Y, "x"),
        _Call(
            mamba2_ring,
            "mamba",
            {
                "state": _STATE, "row_x": "slots heads ring dim",
                "row_B": "slots groups ring state", "row_dt": "slots heads ring", "start": "slots",
                "history": "slots", **_MAMBA, "slot?": "batch",
            },
            _Y,
            "x",
        ),
        _Call(delta_walk, "gdn", {"state": _STATE, **_DELTA, "source?": "batch"}, _Y, "v"),
        _Call(
            selective_state_update,
            "mamba",
            {"state": _STATE, **_EXPANDED, "state_batch_indices?": "batch"},
            _Y,
            "x",
        ),
        _Call(
            checkpointing_ssu,
            "mamba",
            {
                "state": _STATE, "x_cache": "slots heads ring dim",
                "B_cache": "slots groups ring state", "dt_cache": "slots heads ring",
                "ring_start": "slots", "prev_num_accepted_tokens": "slots", **_EXPANDED,
                "state_batch_indices?": "batch",
            },
            _Y,
            "x",
        ),
        _Call(
            gated_delta_rule_decode_pretranspose,
            "gdn",
            {**_DELTA, "initial_state?": _STATE, "initial_state_indices?": "batch"},
            _Y,
            "v",
        ),
        _Call(
            gated_delta_rule_mtp,
            "gdn",
            {**_DELTA, "initial_state": _STATE, "initial_state_indices": "batch"},
            _Y,
            "v",
        ),
    )
}  # fmt: skip


def traces() -> list[str]:
    """Names that `traced` takes."""
    return list(_CALLS)


def traced(name: str) -> Callable[..., Any]:
    """The call of that name with FlashInfer's tracing around it.

    Raises
    ------
    InputError
        No call of that name has a template.
    ImportError
        FlashInfer is not installed.

    Examples
    --------
    >>> update = traced("selective_state_update")              # doctest: +SKIP
    >>> update.fi_trace(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D)["axes"]  # doctest: +SKIP
    """
    if name not in _CALLS:
        raise InputError(f"name: got {name!r}; allowed {', '.join(_CALLS)}; pick one")
    call = _CALLS[name]
    decorate = importlib.import_module("flashinfer.api_logging").flashinfer_api

    @functools.wraps(call.function)
    def operator(*args: Any, **options: Any) -> Any:
        return call.function(*args, **options)

    result: Callable[..., Any] = decorate(operator, trace=_template(name, call))
    return result


def _template(name: str, call: _Call) -> Any:
    peer = importlib.import_module("flashinfer.trace")
    used = " ".join(call.inputs.values()).split()
    axes = {
        axis: peer.Var() if axis in _VARYING else peer.Const(abbrev=_ABBREVIATIONS[axis])
        for axis in dict.fromkeys(used)
    }
    inputs = {
        key.rstrip("?"): peer.Tensor(dims.split(), optional=key.endswith("?"))
        for key, dims in call.inputs.items()
    }
    output = peer.Tensor(call.output.split(), dtype_from=call.like)
    return peer.TraceTemplate(
        op_type=call.op_type, name_prefix=f"replayinfer_{name}", axes=axes, inputs=inputs,
        outputs={"out": output}, tags=["replayinfer"],
        description=(call.function.__doc__ or "").strip().splitlines()[0],
    )  # fmt: skip
