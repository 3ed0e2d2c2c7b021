"""Poison shows where it should, and a planted write is found."""

import pytest
import torch

from replayinfer.testing import (
    PoisonedAllocations,
    assert_no_poison,
    assert_untouched,
    is_poison,
    poison_,
    poisoned,
    snapshot,
)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", FLOATS + SMALL + INTS, ids=str)
def test_poison_fills_and_shows(dtype):
    tensor = poisoned((2, 3), dtype)
    assert is_poison(tensor).all()
    tensor[1, 2] = torch.zeros((), dtype=dtype)
    assert is_poison(tensor).sum() == 5
    assert not is_poison(tensor)[1, 2]


def test_integer_poison_is_far_out_of_range():
    assert poisoned((1,), torch.int32).item() == 0x7F7F7F7F
    assert poisoned((1,), torch.int64).item() == 0x7F7F7F7F7F7F7F7F
    assert poisoned((1,), torch.int16).view(torch.bfloat16).isfinite().all()  # huge, as a plane
    for dtype in (torch.bool, torch.complex64):
        with pytest.raises(TypeError, match="dtype: got torch"):
            poisoned((1,), dtype)


def test_poison_in_place_follows_views():
    base = torch.zeros(4, 6)
    assert poison_(base[1::2, ::3]).shape == (2, 2)
    assert is_poison(base).sum() == 4


def test_assert_no_poison_names_the_place():
    tensor = torch.zeros(2, 3)
    assert_no_poison(tensor)
    tensor[1, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"y: 1 of 6 elements are poison, first at \(1, 0\)"):
        assert_no_poison(tensor, "y")


def test_fresh_allocations_are_poison_inside_the_context_only():
    like = torch.zeros(3, dtype=torch.int32)
    with PoisonedAllocations():
        fresh = [
            torch.empty(2, 3),
            torch.empty_like(like),
            torch.empty_strided((2, 2), (3, 1)),
            like.new_empty(4),
        ]
        flags = torch.empty(3, dtype=torch.bool)
        zeros = torch.zeros(3)
    assert all(is_poison(t).all() for t in fresh)
    assert flags.shape == (3,)
    assert not is_poison(zeros).any()
    out = torch.empty(1000).fill_(1.0)
    assert not is_poison(out).any()


@pytest.fixture
def world():
    return {
        "state": torch.arange(24.0).reshape(4, 6),
        "cursor": torch.zeros(4, dtype=torch.int32),
        "rows": poisoned((4, 3), torch.bfloat16),
        "y": poisoned((2,)),
    }


def test_untouched_accepts_no_change_and_nan(world):
    assert_untouched(snapshot(world), world)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("state", (3, 5), 23.000002),
        ("state", (0, 0), -0.0),
        ("cursor", (3,), 1),
        ("rows", (1, 2), 0.0),
        ("y", (0,), 5.0),
    ],
)
def test_untouched_catches_a_write(world, name, index, value):
    before = snapshot(world)
    world[name][index] = value
    place = str(index).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(AssertionError, match=rf"{name}: 1 of \d+ elements differ\n.*at {place}"):
        assert_untouched(before, world)
    others = [other for other in world if other != name]
    with pytest.raises(AssertionError, match=name):
        assert_untouched(before, world, apart_from=others)
    assert_untouched(before, world, apart_from=(name,))


def test_untouched_with_a_mask_allows_that_part_only(world):
    before = snapshot(world)
    page = torch.zeros(4, 1, dtype=torch.bool)
    page[2] = True
    world["state"][2] = 0.0
    world["y"].zero_()
    assert_untouched(before, world, apart_from={"state": page, "y": None})
    world["state"][3, 0] = 0.0
    with pytest.raises(AssertionError, match=r"state: 1 of 24 elements differ\n.*at \(3, 0\)"):
        assert_untouched(before, world, apart_from={"state": page, "y": None})


def test_untouched_catches_replaced_and_missing_tensors(world):
    before = snapshot(world)
    with pytest.raises(AssertionError, match=r"cursor: was torch.int32 \[4\], is torch.int64"):
        assert_untouched(before, world | {"cursor": world["cursor"].long()})
    del world["y"]
    with pytest.raises(AssertionError, match=r"\['y'\] came or went"):
        assert_untouched(before, world)


def test_untouched_refuses_a_misspelt_exception(world):
    with pytest.raises(KeyError, match="sate"):
        assert_untouched(snapshot(world), world, apart_from=("sate",))


def test_a_snapshot_is_a_copy(world):
    before = snapshot(world)
    world["state"].zero_()
    assert before["state"][3, 5] == 23.0
