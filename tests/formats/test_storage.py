"""Formats by name, their bytes, and the rounding of the single-plane ones."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from replayinfer import FORMATS, UnsupportedError
from replayinfer.formats import get_format, to_storage


@pytest.mark.parametrize(
    ("name", "plane", "read", "stored", "standard", "lossless", "rounded"),
    [
        ("fp32", torch.float32, 4, 4, 4, True, False),
        ("fp32_split", torch.bfloat16, 2, 4, 4, True, True),
        ("bf16", torch.bfloat16, 2, 2, 2, False, False),
        ("fp16", torch.float16, 2, 2, 2, False, False),
    ],
)
def test_the_table_of_formats(name, plane, read, stored, standard, lossless, rounded):
    fmt = get_format(name)
    assert fmt is FORMATS[name]
    assert get_format(fmt) is fmt
    assert (fmt.name, fmt.plane_dtype, fmt.bytes_read, fmt.bytes_stored, fmt.standard_bytes) == (
        name, plane, read, stored, standard,
    )  # fmt: skip
    assert (fmt.lossless, fmt.rounded_readout) == (lossless, rounded)
    assert plane.itemsize == read
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.bytes_read = 1


def test_there_are_no_others():
    assert list(FORMATS) == ["fp32", "fp32_split", "bf16", "fp16"]


@pytest.mark.parametrize("name", ["fp8", "FP32", "", None, 32, torch.float32, ["fp32"]], ids=str)
def test_an_unknown_format_is_refused_with_the_known_ones(name):
    with pytest.raises(UnsupportedError) as error:
        get_format(name)
    assert str(error.value) == (
        f"format: got {name!r}; allowed fp32, fp32_split, bf16, fp16; pick one"
    )


def test_fp16_saturates():
    """The choice made: a finite state never turns infinite by being stored."""
    x = [0.0, 65504.0, 65519.0, 65520.0, 1e6, 3.4e38, math.inf, math.nan]
    got = to_storage(torch.tensor([*x, *(-v for v in x)]), get_format("fp16"))
    assert got.dtype == torch.float16
    want = [0.0, *[65504.0] * 5, math.inf]
    assert got[:7].tolist() == want
    assert got[8:15].tolist() == [-v for v in want]
    assert torch.isnan(got[[7, 15]]).all()


def test_fp16_rounds_to_nearest_even(rng):
    x = torch.randn(100_000, generator=rng) * 2.0 ** torch.randint(
        -26, 16, (100_000,), generator=rng
    )
    got = to_storage(x, get_format("fp16"))
    want = np.clip(x.numpy(), -65504.0, 65504.0).astype(np.float16)  # IEEE, by numpy
    assert (got.numpy().view(np.uint16) == want.view(np.uint16)).all()


def test_bf16_rounds_to_nearest_even(rng):
    x = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=rng).to(torch.int32)
    x = x.view(torch.float32)
    x = x[torch.isfinite(x)]
    got = to_storage(x, get_format("bf16"))
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    odd = bits >> np.uint64(16) & np.uint64(1)
    want = (bits + np.uint64(0x7FFF) + odd) >> np.uint64(16)
    assert (got.view(torch.int16).numpy().view(np.uint16) == want).all()


def test_fp32_is_kept_as_it_is(rng):
    x = torch.randint(-(1 << 31), 1 << 31, (10_000,), generator=rng).to(torch.int32)
    got = to_storage(x.view(torch.float32), get_format("fp32"))
    assert torch.equal(got.view(torch.int32), x)
