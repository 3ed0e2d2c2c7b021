"""Device functions of the kernels, each in a kernel of its own, against `replayinfer.formats`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from replayinfer import formats
from replayinfer.kernels.common import gates, split

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)


@triton.jit
def _planes_kernel(x_ptr, high_ptr, low_ptr, joined_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    high, low = split.split_planes(tl.load(x_ptr + i))
    tl.store(high_ptr + i, high)
    tl.store(low_ptr + i, low)
    tl.store(joined_ptr + i, split.join_planes(high, low))


@triton.jit
def _round_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, split.encode(tl.load(x_ptr + i), out_ptr.dtype.element_ty))


@triton.jit
def _softplus_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, gates.softplus(tl.load(x_ptr + i)))


def values(rng) -> torch.Tensor:
    """Any bits, ties of both rounding directions, and the edges; no NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (2048,), generator=rng).to(torch.int32)
    bits[:512] = (bits[:512] & ~0xFFFF) | 0x8000
    x = bits.view(torch.float32)
    inf, most = float("inf"), torch.finfo(torch.float32).max
    x[512:518] = torch.tensor([0.0, -0.0, inf, -inf, most, -most])
    return torch.where(x.isnan(), 1.0, x)


def test_planes_are_those_of_the_format(rng):
    x = values(rng)
    high, low = torch.empty_like(x, dtype=torch.int16), torch.empty_like(x, dtype=torch.int16)
    joined = torch.empty_like(x)
    _planes_kernel[(1,)](x, high, low, joined, SIZE=x.numel())
    want = formats.split_planes(x)
    assert torch.equal(high, want[0].view(torch.int16))
    assert torch.equal(low, want[1])
    assert torch.equal(joined.view(torch.int32), x.view(torch.int32))


def test_a_nan_of_arithmetic_stays_one():
    x = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    high, low = torch.empty(4, dtype=torch.int16), torch.empty(4, dtype=torch.int16)
    joined = torch.empty(4)
    _planes_kernel[(1,)](x, high, low, joined, SIZE=4)
    assert high.view(torch.bfloat16).isnan().all()
    assert joined.isnan().all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_is_that_of_the_format(name, rng):
    fmt = formats.FORMATS[name]
    x = values(rng)
    out = torch.empty(x.numel(), dtype=fmt.plane_dtype)
    _round_kernel[(1,)](x, out, SIZE=x.numel())
    assert torch.equal(out.view(torch.int16), formats.to_storage(x, fmt).view(torch.int16))


def test_softplus_at_the_edges(rng):
    x = torch.cat([torch.tensor([80.0, -80.0, 0.0, 20.0, -20.0]), 10 * torch.randn(27)])
    out = torch.empty_like(x)
    _softplus_kernel[(1,)](x, out, SIZE=32)
    exact = torch.logaddexp(x.double(), torch.zeros(1, dtype=torch.float64))
    assert ((out - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact).all()
