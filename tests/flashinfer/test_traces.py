"""Trace templates: on stand-ins for FlashInfer's classes, and on its own where it is installed."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from replayinfer import InputError
from replayinfer.integrations.flashinfer.traces import _CALLS, traced, traces


@dataclass
class Var:
    description: str = ""


@dataclass
class Const:
    abbrev: str | None = None


@dataclass
class Tensor:
    dim_names: list[str]
    dtype_from: str | None = None
    optional: bool = False


@dataclass
class TraceTemplate:
    op_type: str
    axes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    name_prefix: str = ""
    tags: list[str] = field(default_factory=list)
    description: str = ""


def flashinfer_api(function, *, trace):
    def wrapper(*args, **options):
        wrapper.calls += 1
        return function(*args, **options)

    wrapper.calls, wrapper.trace, wrapper.__wrapped__ = 0, trace, function
    return wrapper


@pytest.fixture
def peer(monkeypatch):
    trace = types.ModuleType("flashinfer.trace")
    for one in (Var, Const, Tensor, TraceTemplate):
        setattr(trace, one.__name__, one)
    logging = types.ModuleType("flashinfer.api_logging")
    logging.flashinfer_api = flashinfer_api
    for module in (types.ModuleType("flashinfer"), trace, logging):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", traces())
def test_a_template_names_parameters_and_every_axis(peer, name):
    template = traced(name).trace
    parameters = inspect.signature(_CALLS[name].function).parameters
    assert set(template.inputs) <= set(parameters)
    for key, tensor in template.inputs.items():
        assert tensor.optional == (parameters[key].default is not inspect.Parameter.empty) or (
            key in ("D",)  # ours may be absent, where FlashInfer's call has no default
        )
        assert set(tensor.dim_names) <= set(template.axes)
    (output,) = template.outputs.values()
    assert set(output.dim_names) <= set(template.axes)
    assert output.dtype_from in template.inputs
    assert template.description.endswith(".")
    assert template.name_prefix == f"replayinfer_{name}"


def small_call(draw):
    sizes = {"batch": 2, "window": 1, "slots": 3, "heads": 4, "groups": 2, "dim": 8, "state": 16}
    tensors = {
        "x": draw("batch window heads dim", sizes), "dt": draw("batch window heads", sizes),
        "B": draw("batch window groups state", sizes),
        "C": draw("batch window groups state", sizes),
        "state": draw("slots heads dim state", sizes), "A": -draw("heads", sizes).abs(),
    }  # fmt: skip
    return sizes, tensors


@pytest.fixture
def draw(rng):
    return lambda dims, sizes: torch.randn([sizes[d] for d in dims.split()], generator=rng)


def test_a_traced_call_computes_as_before_and_the_call_itself_is_left_alone(peer, draw):
    from replayinfer import mamba2_walk

    sizes, tensors = small_call(draw)
    call = traced("mamba2_walk")
    for key, value in tensors.items():
        dims = call.trace.inputs[key].dim_names
        assert tuple(value.shape) == tuple(sizes[d] for d in dims)
    before = dict(vars(mamba2_walk))
    states = [tensors["state"].clone() for _ in range(2)]
    outs = [f(**tensors | {"state": s}) for f, s in zip((call, mamba2_walk), states, strict=True)]
    assert torch.equal(*outs)
    assert torch.equal(*states)
    assert call.calls == 1
    assert vars(mamba2_walk) == before


def test_other_names_are_refused():
    with pytest.raises(InputError, match="name: got 'fold'; allowed mamba2_walk"):
        traced("fold")


def test_definitions_of_flashinfers_own_classes(draw):
    pytest.importorskip("flashinfer.trace.template")
    sizes, tensors = small_call(draw)
    definition = traced("mamba2_walk").fi_trace(**tensors)
    assert definition["axes"]["heads"] == {"type": "const", "value": sizes["heads"]}
    assert definition["axes"]["batch"] == {"type": "var"}
    assert definition["inputs"]["x"] == {
        "shape": ["batch", "window", "heads", "dim"],
        "dtype": "float32",
    }
    assert definition["inputs"]["z"]["optional"]
    assert definition["outputs"]["out"]["dtype"] == "float32"
    assert definition["tags"][0].endswith(".mamba2_walk")
