"""Every family through the wrapper against its float64 recurrence."""

import pytest
import torch

from replayinfer.testing import relative_error

from .world import BASES, World, vary

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["fp32", "fp32_split", "bf16", "fp16"]
GATES = ["realistic", "near_one", "strong", "extreme"]
L = 8


def decode(case, rng):
    world = World(case, rng).decode()
    world.check()
    world.pool.free(world.sequences)
    assert not any(world.pool.pages_in_use().values())


@pytest.mark.parametrize("case", vary(BASES, tokens=[1, L - 1, L, L + 1]), ids=str)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_around_the_capacity(case, window, format, rng):
    decode(case.but(max_window=window, format=format, capacity=L), rng)


@pytest.mark.parametrize("case", vary(BASES, gates=GATES), ids=str)
def test_thousand_tokens(case, rng):
    decode(case.but(tokens=1000, max_window=8, capacity=16), rng)


@pytest.mark.parametrize("case", vary(BASES, format=["fp32_split", "bf16"]), ids=str)
def test_thousand_tokens_in_rounded_formats(case, rng):
    decode(case.but(tokens=1000, max_window=8, capacity=16, dtype=torch.bfloat16), rng)


@pytest.mark.parametrize("case", vary(BASES, gates=GATES), ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_gates_and_formats(case, format, rng):
    decode(case.but(format=format, dtype=torch.bfloat16), rng)


@pytest.mark.parametrize("case", vary(BASES, dtype=DTYPES), ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_types_and_formats(case, format, rng):
    decode(case.but(format=format), rng)


@pytest.mark.parametrize("case", vary(BASES, gate_dtype=DTYPES), ids=str)
def test_gates_have_their_own_type(case, rng):
    decode(case.but(dtype=torch.bfloat16), rng)


@pytest.mark.parametrize(
    "case",
    vary(
        BASES,
        policy=["spread"],
        page_rows=[1, 2, 8, None],
        capacity=[3, 5, 9, 31],  # no multiples of a page, and the window itself
        batch=[1, 7],
        max_window=[8],
    ),
    ids=str,
)
def test_pages_and_policies(case, rng):
    decode(case.but(format="fp32_split"), rng)


@pytest.mark.parametrize("case", vary(BASES, format=["bf16", "fp16"]), ids=str)
def test_rounding_once_a_fold_beats_rounding_every_token(case, rng):
    """With gates near 1 an error stays, so a fold of 16 rows makes several times fewer of them."""
    world = World(case.but(tokens=120, capacity=16, max_window=1, gates="near_one"), rng).decode()
    got, plain = (relative_error(s, world.exact[1]) for s in (world.states(), world.plain[1]))
    assert got < 0.75 * plain
