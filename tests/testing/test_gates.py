"""Gate formulas against Python's own double-precision maths."""

import math

import pytest
import torch

from replayinfer.testing.gates import (
    beta_value,
    bounded_gate,
    l2_normalise,
    mamba2_step,
    softplus,
    softplus_gate,
)

STEPS = [-80.0, -40.0, -20.0, -16.0, -1.0, 0.0, 1.0, 16.0, 19.9, 20.1, 40.0, 80.0]


def scalar_softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-15), (torch.float32, 3e-7)])
def test_softplus_holds_from_minus_80_to_80(dtype, within):
    got = softplus(torch.tensor(STEPS, dtype=dtype))
    assert (got > 0).all()  # not 0 below -16, no NaN above
    for x, y in zip(STEPS, got.tolist(), strict=True):
        assert y == pytest.approx(scalar_softplus(x), rel=within)


def test_softplus_has_no_cut_off_at_20():
    x = torch.tensor(20.5, dtype=torch.float64)
    assert float(torch.nn.functional.softplus(x)) == 20.5  # why torch's own is no oracle
    assert float(softplus(x) - x) == pytest.approx(math.exp(-20.5), rel=1e-5)


def test_mamba2_step_order_is_bias_softplus_limits():
    dt = torch.tensor([[0.0, 5.0, -9.0]], dtype=torch.float64)
    bias = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    want = [scalar_softplus(1.0), 3.0, 0.5]
    assert mamba2_step(dt, bias, dt_limit=(0.5, 3.0)).tolist()[0] == pytest.approx(want)
    assert mamba2_step(dt, bias, dt_softplus=False).tolist()[0] == [1.0, 6.0, 0.0]


def test_softplus_gate_reaches_minus_1280_and_stays_finite():
    A_log = torch.tensor([math.log(16.0), 100.0, -100.0])
    g = softplus_gate(torch.tensor([80.0, 80.0, 80.0]), A_log.double())
    assert float(g[0]) == pytest.approx(-1280.0, rel=1e-6)
    assert torch.isfinite(g).all()
    assert (g < 0).all()


@pytest.mark.parametrize("a", [-80.0, -3.0, 0.0, 0.7, 80.0])
@pytest.mark.parametrize("A_log", [-2.0, 0.0, 1.5])
def test_bounded_gate(a, A_log):
    bias, bound = 0.25, -5.0
    args = [torch.tensor(v, dtype=torch.float64) for v in (a, A_log, bias)]
    got = float(bounded_gate(*args, lower_bound=bound))
    want = bound / (1.0 + math.exp(-math.exp(A_log) * (a + bias)))
    assert got == pytest.approx(want, rel=1e-12)
    assert bound <= got <= 0.0


def test_beta_rules():
    b = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    sigmoid = [1 / (1 + math.exp(1)), 0.5, 1 / (1 + math.exp(-2))]
    assert beta_value(b, "sigmoid").tolist() == pytest.approx(sigmoid)
    assert beta_value(b, "sigmoid2").tolist() == pytest.approx([2 * s for s in sigmoid])
    assert beta_value(b, "given") is b
    with pytest.raises(ValueError, match="beta_rule: got 'tanh'"):
        beta_value(b, "tanh")


def test_l2_norm_has_eps_inside_the_root():
    x = torch.tensor([3e-4, 4e-4], dtype=torch.float64)
    want = 3e-4 / math.sqrt(25e-8 + 1e-6)
    assert float(l2_normalise(x, 1e-6)[0]) == pytest.approx(want, rel=1e-12)
    assert l2_normalise(torch.zeros(4), 1e-6).tolist() == [0.0] * 4
