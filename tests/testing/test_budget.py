"""Every comparison passes what is right and catches a planted error, naming the place."""

import math

import pytest
import torch

from replayinfer.testing import (
    assert_bitwise_equal,
    assert_within_budget,
    peak_error,
    relative_error,
)


def sums(rng, terms=256):
    """A float64 truth and two honest float32 computations of it."""
    a, b = torch.randn(4, 6, terms, generator=rng), torch.randn(4, 6, terms, generator=rng)
    exact = (a.double() * b.double()).sum(-1)
    rounded = torch.zeros(4, 6)
    for i in range(terms):
        rounded = rounded + a[..., i] * b[..., i]
    return exact, rounded, (a * b).sum(-1)


def test_relative_error_is_the_ratio_of_norms():
    ref = torch.tensor([3.0, 4.0])
    assert relative_error(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(0.01, rel=1e-5)
    assert relative_error(ref, ref) == 0.0
    assert peak_error(ref + torch.tensor([0.04, 0.0]), ref) == pytest.approx(0.01, rel=1e-5)


def test_relative_error_of_slices_finds_the_small_wrong_one():
    ref = torch.ones(2, 3, 4)
    ref[1, 2] = 1e-6
    out = ref.clone()
    out[1, 2] *= 1.5
    assert relative_error(out, ref) < 1e-6
    assert relative_error(out, ref, keep=(0, 1)) == pytest.approx(0.5)
    assert relative_error(out, ref, keep=(1,)) < 1e-5
    assert relative_error(out.mT, ref.mT, keep=(0, -1)) == pytest.approx(0.5)


@pytest.mark.parametrize("error", [relative_error, peak_error])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(error, bad):
    ref = torch.ones(3)
    assert error(torch.tensor([1.0, bad, 1.0]), ref) == math.inf
    with pytest.raises(ValueError, match="no reference"):
        error(ref, torch.tensor([1.0, bad, 1.0]))


@pytest.mark.parametrize("error", [relative_error, peak_error])
def test_zero_references_shapes_and_empty(error):
    zero = torch.zeros(3)
    assert error(zero, zero) == 0.0
    assert error(torch.tensor([0.0, 1e-30, 0.0]), zero) == math.inf
    assert error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    with pytest.raises(ValueError, match=r"out: got \[2\]; allowed \[3\]"):
        error(torch.zeros(2), zero)


def test_within_budget_passes_an_honest_computation(rng):
    exact, rounded, out = sums(rng)
    error = assert_within_budget(out, exact=exact, rounded=rounded)
    assert error == relative_error(out, exact)
    assert_within_budget(exact.bfloat16(), exact=exact)  # the floor alone: its own rounding
    assert_within_budget(exact.float(), exact=exact, floor=1e-7)


def test_within_budget_catches_one_wrong_element(rng):
    exact, rounded, out = sums(rng)
    out[2, 5] += 1e-3
    with pytest.raises(AssertionError, match=r"y: too far") as caught:
        assert_within_budget(out, exact=exact, rounded=rounded, name="y")
    message = str(caught.value)
    assert f"worst at (2, 5): got {float(out[2, 5]):.9g}, want {float(exact[2, 5]):.9g}" in message
    assert "budget" in message
    assert "= max(3 x " in message


def test_within_budget_catches_one_element_that_a_norm_hides():
    exact = torch.ones(1_000_000, dtype=torch.float64)
    rounded = (exact + 1e-3).float()  # an honest computation with errors of 1e-3 everywhere
    out = rounded.clone()
    out[123_456] = 1.005  # one element may be 6 times as wrong
    assert_within_budget(out, exact=exact, rounded=rounded)
    out[123_456] = 1.007
    assert relative_error(out, exact) < 3 * relative_error(rounded, exact)
    with pytest.raises(AssertionError, match=r"worst at \(123456,\)"):
        assert_within_budget(out, exact=exact, rounded=rounded)


def test_within_budget_catches_a_small_slice():
    exact = torch.ones(2, 500, dtype=torch.float64)
    exact[1] = 1e-5
    out = exact.float()
    out[1] *= 1.01
    assert_within_budget(out, exact=exact, floor=1e-6)
    with pytest.raises(AssertionError, match=r"norm error 1\.0"):
        assert_within_budget(out, exact=exact, floor=1e-6, keep=(0,))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_within_budget_catches_nan_and_inf_whatever_the_floor(bad):
    exact = torch.ones(2, 3, dtype=torch.float64)
    out = exact.float()
    out[1, 0] = bad
    with pytest.raises(AssertionError, match=r"worst at \(1, 0\).*1 of 6 elements are not finite"):
        assert_within_budget(out, exact=exact, floor=1e9)


def test_a_budget_from_nan_is_refused():
    exact = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="rounded: got NaN"):
        assert_within_budget(exact.float(), exact=exact, rounded=torch.full((3,), math.nan))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16]
)
def test_bitwise_equal_catches_the_last_bit(dtype):
    want = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert_bitwise_equal(want.clone(), want)
    assert_bitwise_equal(want.mT, want.mT.contiguous())
    got = want.clone()
    got.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])[1, 2, 3] ^= 1
    with pytest.raises(AssertionError, match=r"S: 1 of 24 elements differ\n.*at \(1, 2, 3\): got"):
        assert_bitwise_equal(got, want, "S")


def test_bitwise_equal_sees_bits_not_values():
    nan = torch.tensor([math.nan])
    assert_bitwise_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match=r"got -0 \(0x80000000\), want 0 \(0x00000000\)"):
        assert_bitwise_equal(torch.tensor([-0.0]), torch.tensor([0.0]))
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_bitwise_equal(other_nan, nan)


def test_bitwise_equal_sees_type_and_shape():
    with pytest.raises(AssertionError, match=r"got torch.float32 \[2\], want torch.float64 \[2\]"):
        assert_bitwise_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match=r"\[2, 1\], want"):
        assert_bitwise_equal(torch.zeros(2, 1), torch.zeros(2))
    assert_bitwise_equal(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_bitwise_equal(torch.tensor(1.5), torch.tensor(1.5))
    with pytest.raises(AssertionError, match=r"at \(1,\): got True, want False"):
        assert_bitwise_equal(torch.tensor([True, True]), torch.tensor([True, False]))
