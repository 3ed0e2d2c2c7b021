"""A warmup leaves nothing to compile and the pool as it was; a step can be captured right after."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton

from replayinfer import Mamba2Spec
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import assert_bitwise_equal

from ..launch.walks import BUCKETS, SHAPES, draw, make, packed, walk

pytestmark = pytest.mark.gpu
FUSED = {"fused": LaunchConfig(num_warps=4, rows=16), "readout": None}


@pytest.fixture
def compiled(monkeypatch):
    """What Triton compiles, or loads from its cache on disk, as it happens."""
    found: list[str] = []

    def note(*, repr, **_):
        found.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return found


@pytest.fixture
def numpy_rng(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("kernels", ["by the table", "fused", "readout"])
@pytest.mark.parametrize(("shape", "format"), [("odd", "fp32_split"), ("round", "bf16")])
def test_later_steps_compile_nothing(shape, format, kernels, compiled, numpy_rng):
    choice = {} if kernels == "by the table" else {"fused": FUSED[kernels]}
    wrapper = make(SHAPES[shape], format=format, device="cuda")
    with forced(**choice):
        wrapper.warmup()
        compiled.clear()
        walk(wrapper, numpy_rng, steps=60)
    assert not compiled


def test_direct_steps_compile_nothing(compiled, numpy_rng):
    wrapper = make(SHAPES["odd"], direct=5, device="cuda")
    wrapper.warmup()
    compiled.clear()
    walk(wrapper, numpy_rng, steps=60)
    assert wrapper.counters.direct_steps
    assert not compiled


def test_examples_stand_for_the_layout_of_later_inputs(compiled, numpy_rng):
    wrapper = make(SHAPES["given steps"], device="cuda")
    examples = []
    for z in (False, True):
        tokens, out = packed(wrapper.pool, SimpleNamespace(bucket=3, window=1), None, z)
        examples.append({**tokens, "out": out})
    wrapper.warmup(inputs=examples, conv=False)
    compiled.clear()
    walk(wrapper, numpy_rng, draw=packed, conv=False)
    assert not compiled
    wrapper.warmup(conv=False)
    assert compiled, "contiguous inputs are no other variant, so the examples prove nothing"


def test_nothing_of_a_pool_in_use_changes(numpy_rng):
    wrapper = make(SHAPES["round"], device="cuda")
    pool = wrapper.pool
    live = pool.alloc(3)
    for _ in range(5):
        plan = wrapper.plan(live)
        wrapper.fold()
        for layer in pool.layers:
            wrapper.run(layer, **draw(pool, plan, numpy_rng, False)[0])
        wrapper.commit()
    parts = {"checkpoints": pool.checkpoints.storage, "rings": pool.conv.rows, **pool.inputs.fields}
    before = {name: tensor.clone() for name, tensor in parts.items()}
    wrapper.warmup(direct=True)
    for name, tensor in parts.items():
        assert_bitwise_equal(tensor, before[name], name)


@pytest.mark.parametrize("kernels", ["fused", "readout"])
def test_the_first_step_after_a_warmup_can_be_captured(kernels, numpy_rng):
    wrapper = make(SHAPES["round"], device="cuda")
    pool = wrapper.pool
    with forced(fused=FUSED[kernels]):
        wrapper.warmup()
        live = pool.alloc(5)
        plan = wrapper.plan(live)
        tokens, _ = draw(pool, plan, numpy_rng, True)
        shape = (plan.bucket, 1, pool.spec.heads, pool.spec.dim)
        out = torch.full(shape, float("nan"), dtype=pool.dtype, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.backend.fold(pool, plan)
            wrapper.backend.readout(pool, plan, 0, tokens, out)
        graph.replay()
        torch.cuda.synchronize()
    assert not out.isnan().any()


def test_refused_while_a_graph_is_captured():
    wrapper = make(SHAPES["round"], device="cuda")
    wrapper.warmup()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="captures"):
        wrapper.warmup()


@pytest.mark.parametrize("kernels", ["fused", "readout"])
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_wide_loads_stay_wide(format, kernels):
    """What is not specialized costs no 128-bit access: checkpoints and rows are read in them."""
    spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
    wrapper = make(spec, capacity=16, page_rows=16, format=format, device="cuda")
    from replayinfer.kernels.mamba2.fold import _fold_kernel
    from replayinfer.kernels.mamba2.fused import _fused_kernel
    from replayinfer.kernels.mamba2.readout import _readout_kernel

    reader = _fused_kernel if kernels == "fused" else _readout_kernel
    for kernel in (reader, _fold_kernel):
        kernel.device_caches.clear()
    with forced(fused=FUSED[kernels]):
        wrapper.warmup([BUCKETS[-1]])
    for kernel in (reader, _fold_kernel):
        for binary in kernel.device_caches[torch.cuda.current_device()][0].values():
            ptx = binary.asm["ptx"]
            assert len(re.findall(r"ld\.global\S*\.v4\.", ptx)) >= 4, kernel.__name__
            if kernel is _fold_kernel:
                assert len(re.findall(r"st\.global\S*\.v4\.", ptx)) >= 4
