"""The gated norm, by kernel and by torch, against float64."""

from __future__ import annotations

import os

import pytest
import torch

from replayinfer import InputError
from replayinfer.ops import gated_norm

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)


def want(x, z, weight, eps, activation):
    x, z, weight = x.double(), z.double(), weight.double()
    gate = z * torch.sigmoid(z) if activation == "silu" else torch.sigmoid(z)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * gate


def check(got, x, z, weight, eps, activation):
    """Within the rounding to the output's type, and a few places of float32 arithmetic."""
    exact = want(x, z, weight, eps, activation)
    assert got.dtype == x.dtype
    assert torch.isfinite(got).all()
    kind = torch.finfo(got.dtype)
    places = kind.smallest_normal * kind.eps  # of numbers below the normal ones
    bound = (kind.eps / 2 + 2e-6) * exact.abs() + places
    assert ((got.double() - exact).abs() <= bound).all()


def launch(x, z, weight, *, eps, activation, out=None):
    from replayinfer.kernels.common.gated_norm import gated_norm as kernel

    out = torch.full_like(x, torch.nan) if out is None else out
    kernel(out, x, z, weight, eps=eps, silu=activation == "silu", pdl=False)
    return out


def operands(rng, batch, heads, dim, dtype, layout):
    x, z = (torch.randn(batch, heads, dim, generator=rng).to(dtype) for _ in range(2))
    x[0] *= 1e-4  # eps counts
    if layout == "slices":
        wide = torch.full((batch, heads, 2 * dim + 8), torch.nan, dtype=dtype)
        wide[..., dim + 8 :] = z
        z = wide[..., dim + 8 :]
        x = torch.stack([x, torch.full_like(x, torch.nan)], dim=1)[:, 0]
    return x, z, torch.randn(dim, generator=rng).to(dtype if dim != 24 else torch.float32)


@pytest.mark.parametrize("call", [gated_norm, pytest.param(launch, marks=interpreted)])
@pytest.mark.parametrize(
    ("batch", "heads", "dim", "dtype", "activation", "layout"),
    [
        (5, 3, 128, torch.bfloat16, "silu", "slices"),
        (2, 1, 256, torch.float32, "sigmoid", "packed"),
        (9, 2, 24, torch.float16, "silu", "slices"),
        (1, 1, 1500, torch.bfloat16, "sigmoid", "packed"),
    ],
)
def test_values(call, batch, heads, dim, dtype, activation, layout, rng):
    x, z, weight = operands(rng, batch, heads, dim, dtype, layout)
    rule = {"eps": 1e-6, "activation": activation}
    got = call(x, z, weight, **rule)
    check(got, x, z, weight, 1e-6, activation)
    given = x.clone()
    assert call(given, z, weight, **rule, out=given) is given
    assert torch.equal(given, got)


def test_a_head_is_normed_by_itself(rng):
    """Rows of NaN, as pads may have, stay in their rows."""
    x, z, weight = operands(rng, 4, 2, 16, torch.float32, "packed")
    alone = gated_norm(x, z, weight, eps=1e-5)
    x[1, 0] = torch.nan
    got = gated_norm(x, z, weight, eps=1e-5)
    rest = torch.ones(4, 2, dtype=torch.bool)
    rest[1, 0] = False
    assert torch.equal(got[rest], alone[rest])
    assert got[1, 0].isnan().all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": (3, 8)}, "x"),
        ({"z": (3, 2, 9)}, "z"),
        ({"weight": (9,)}, "weight"),
        ({"out": (3, 2, 9)}, "out"),
    ],
)
def test_wrong_shapes_are_refused(change, said, rng):
    given = {"x": (3, 2, 8), "z": (3, 2, 8), "weight": (8,), **change}
    out = torch.full((3, 2, 8), 7.0)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in given.items()}
    with pytest.raises(InputError, match=rf"^{said}: got"):
        gated_norm(**{"out": out, **tensors}, eps=1e-6)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("rule", "said"),
    [({"eps": 0.0}, "eps"), ({"activation": "gelu"}, "activation")],
)
def test_wrong_rules_are_refused(rule, said, rng):
    x, z, weight = operands(rng, 2, 2, 8, torch.float32, "packed")
    with pytest.raises(InputError, match=rf"^{said}: got"):
        gated_norm(x, z, weight, **{"eps": 1e-6, **rule})


def test_types_are_not_mixed(rng):
    x, z, weight = operands(rng, 2, 2, 8, torch.float32, "packed")
    with pytest.raises(InputError, match=r"^z: got"):
        gated_norm(x, z.bfloat16(), weight, eps=1e-6)
