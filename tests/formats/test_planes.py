"""The two planes of fp32_split, over every kind of float32, against exact integer arithmetic."""

import numpy as np
import pytest
import torch

from replayinfer.formats import join_planes, split_planes

# Around everything that decides a rounding: the lower half and its middle, the carry, the ends.
EDGE_MANTISSAS = (
    0x000000, 0x000001, 0x007FFF, 0x008000, 0x008001, 0x00FFFF, 0x010000, 0x010001,
    0x017FFF, 0x018000, 0x018001, 0x01FFFF, 0x020000, 0x3F7FFF, 0x3F8000, 0x3FFFFF,
    0x400000, 0x400001, 0x408000, 0x7F7FFF, 0x7F8000, 0x7F8001, 0x7FFFFE, 0x7FFFFF,
)  # fmt: skip
INF, FLT_MAX = 0x7F800000, 0x7F7FFFFF


def edge_bits():
    """Every sign and exponent with every edge mantissa: 0, subnormals, infinities, NaNs too."""
    sign = np.array([0, 1], dtype=np.uint64)[:, None, None] << np.uint64(31)
    exponent = np.arange(256, dtype=np.uint64)[None, :, None] << np.uint64(23)
    return (sign | exponent | np.array(EDGE_MANTISSAS, dtype=np.uint64)).ravel()


def random_bits(rng, count):
    return torch.randint(0, 1 << 32, (count,), generator=rng).numpy().astype(np.uint64)


def to_float(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint64).astype(np.uint32).view(np.float32))


def to_bits(x):
    """uint64, so that nothing here wraps."""
    return x.contiguous().numpy().view(np.uint32).astype(np.uint64)


def plane_bits(x):
    return x.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint64)


def check_planes(bits):
    high, low = split_planes(to_float(bits))
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    rebuilt = to_bits(join_planes(high, low))
    magnitude = bits & np.uint64(0x7FFFFFFF)
    nan = magnitude > INF
    sign = bits & np.uint64(0x80000000)

    number = ~nan
    assert (rebuilt[number] == bits[number]).all()
    # Rounding half away from zero, on the magnitude alone: the sign never takes part.
    want = ((magnitude + 0x8000) >> np.uint64(16)) | (sign >> np.uint64(16))
    assert (plane_bits(high)[number] == want[number]).all()
    assert (plane_bits(low)[number] == (bits & np.uint64(0xFFFF))[number]).all()

    assert torch.isnan(high[torch.from_numpy(nan)]).all()
    assert (rebuilt[nan] == (sign | np.uint64(0x7FC00000))[nan]).all()
    assert not torch.isnan(high[torch.from_numpy(number)]).any()


def test_every_exponent_with_every_edge_mantissa():
    check_planes(edge_bits())


def test_a_million_random_patterns(rng):
    check_planes(random_bits(rng, 10**6))


def test_the_edges_of_every_exponent_at_random(rng):
    """Random upper halves, lower halves within 2 of where the rounding turns."""
    upper = torch.randint(0, 1 << 16, (200_000,), generator=rng).numpy().astype(np.uint64)
    lower = 0x8000 + torch.randint(-2, 3, (200_000,), generator=rng).numpy()
    check_planes((upper << np.uint64(16)) | lower.astype(np.uint64))


@pytest.mark.parametrize(
    "nan",
    [0x7F800001, 0x7F80FFFF, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFF7FFF, 0x7FFF8000,
     0x7FFFFFFF],
    ids=hex,
)  # fmt: skip
@pytest.mark.parametrize("sign", [0, 0x80000000], ids=["+", "-"])
def test_a_nan_stays_a_nan(nan, sign):
    """A payload in the low half alone would read as infinity, 0x7fffffff would round to -0."""
    high, low = split_planes(to_float([nan | sign]))
    assert plane_bits(high)[0] == 0x7FC0 | sign >> 16
    assert plane_bits(low)[0] == 0
    assert to_bits(join_planes(high, low))[0] == 0x7FC00000 | sign


def test_random_nans_stay_nans(rng):
    payload = torch.randint(1, 1 << 23, (100_000,), generator=rng).numpy().astype(np.uint64)
    sign = torch.randint(0, 2, (100_000,), generator=rng).numpy().astype(np.uint64)
    check_planes(sign << np.uint64(31) | np.uint64(INF) | payload)


@pytest.mark.parametrize("sign", [0, 0x80000000], ids=["+", "-"])
def test_the_largest_numbers(sign):
    """The choice made: finite numbers from 0x7f7f8000 up read as infinity and keep their bits."""
    last, first = 0x7F7F7FFF, 0x7F7F8000
    high, low = split_planes(to_float([b | sign for b in (last, first, FLT_MAX, INF)]))
    assert plane_bits(high).tolist() == [0x7F7F | sign >> 16] + [0x7F80 | sign >> 16] * 3
    rebuilt = join_planes(high, low)
    assert to_bits(rebuilt).tolist() == [b | sign for b in (last, first, FLT_MAX, INF)]
    assert torch.isfinite(rebuilt).tolist() == [True, True, True, False]


def test_zeros_keep_their_signs():
    high, low = split_planes(torch.tensor([0.0, -0.0]))
    assert torch.signbit(high).tolist() == [False, True]
    assert torch.signbit(join_planes(high, low)).tolist() == [False, True]


def test_the_high_plane_is_no_cast():
    """A cast rounds ties to even, the planes away from zero."""
    tie = to_float([0x3F808000, 0xBF808000])  # halfway between two bf16, the lower one even
    assert plane_bits(tie.bfloat16()).tolist() == [0x3F80, 0xBF80]
    assert plane_bits(split_planes(tie)[0]).tolist() == [0x3F81, 0xBF81]


def test_the_high_plane_is_the_nearest_bfloat16(rng):
    """What a readout sees is off by half a unit of bf16 at most, subnormals included."""
    bits = np.concatenate([edge_bits(), random_bits(rng, 100_000)])
    bits = bits[(bits & np.uint64(0x7FFFFFFF)) < 0x7F7F8000]
    x = to_float(bits)
    error = (split_planes(x)[0].double() - x.double()).abs()
    exponent = (bits >> np.uint64(23) & np.uint64(0xFF)).astype(np.int64)
    unit = torch.from_numpy(2.0 ** (np.maximum(exponent, 1) - 127 - 7))
    assert (error <= unit / 2).all()


def views(x):
    """The same elements in other layouts."""
    rows, columns = x.shape
    wide = torch.full((rows, 2 * columns + 1), torch.nan)
    wide[:, 1::2] = x
    yield "transposed", x.t().contiguous().t()
    yield "every other column", wide[:, 1::2]
    yield "offset into padded rows", torch.cat([torch.full((rows, 3), torch.nan), x], 1)[:, 3:]


def test_strided_input(rng):
    x = to_float(random_bits(rng, 64 * 30)).reshape(64, 30)
    want_high, want_low = split_planes(x.clone())
    for name, view in views(x):
        before = to_bits(view)
        high, low = split_planes(view)
        assert (plane_bits(high) == plane_bits(want_high)).all(), name
        assert torch.equal(low, want_low), name
        assert (to_bits(view) == before).all(), f"{name}: the input was written"


def test_strided_planes_are_joined(rng):
    x = to_float(random_bits(rng, 40 * 6)).reshape(40, 6)
    high, low = split_planes(x)
    pair = torch.stack([high.view(torch.int16), low], dim=1)  # a head's two planes, one storage
    got = join_planes(pair[:, 0].view(torch.bfloat16), pair[:, 1])
    assert (to_bits(got) == to_bits(join_planes(high, low))).all()
    assert got.shape == x.shape


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1, 1)], ids=str)
def test_any_shape(shape, rng):
    x = torch.randn(shape, generator=rng)
    high, low = split_planes(x)
    assert high.shape == low.shape == shape
    assert torch.equal(join_planes(high, low), x)
