"""Bytes: what is reported is what the tensors hold, and what a budget buys."""

import math
import re

import pytest
import torch

from replayinfer import (
    CapacityError,
    GDNSpec,
    InputError,
    KDASpec,
    Mamba2Spec,
    StatePool,
    UnsupportedError,
)
from replayinfer.errors import ReplayError

from .kit import FORMATS, random_int

SPECS = [
    Mamba2Spec(heads=4, dim=3, state=5, groups=2),
    Mamba2Spec(heads=3, dim=2, state=7, conv_width=0),
    GDNSpec(heads=4, dim=3, state=5, key_heads=2, conv_width=2),
    GDNSpec(heads=4, dim=3, state=5, gate="log", norm="none", conv_width=0),
    KDASpec(heads=2, dim=4, state=3, key_heads=2),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensor_bytes(pool):
    """Every byte of every tensor reachable from the pool, each storage once."""
    seen, stack, total = set(), [pool], 0
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif type(value).__module__.startswith("replayinfer.pools"):
            stack += vars(value).values()
    return total


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.family}{s.conv_width}")
def test_the_report_is_what_the_tensors_hold(spec, rng):
    for fmt in FORMATS:
        for dtype in DTYPES:
            capacity = random_int(rng, 1, 40)
            pool = StatePool(
                spec,
                range(random_int(rng, 1, 3)),
                random_int(rng, 1, 5),
                capacity=capacity,
                max_window=random_int(rng, 1, capacity),
                format=fmt,
                dtype=dtype,
                checkpoint_pages=random_int(rng, 1, 9),
                input_pages=random_int(rng, 1, 9),
                page_rows=2 ** random_int(rng, 0, 5),
                restore=["window", "any"][random_int(rng, 0, 1)],
            )
            report = pool.capacity_report()
            assert report.total_bytes == pool.nbytes == tensor_bytes(pool)
            sizes = pool.sizes
            assert report.total_bytes == (
                sizes.checkpoint_pages * report.checkpoint_page_bytes
                + sizes.input_pages * report.input_page_bytes
                + sizes.max_sequences * report.conv_slot_bytes
                + report.weight_bytes
            )


def test_numbers_by_hand():
    spec = Mamba2Spec(heads=4, dim=8, state=16, groups=2)  # 512 elements; 96 channels
    pool = StatePool(
        spec, [0, 3], 5, capacity=20, max_window=3, page_rows=8, format="bf16",
        dtype=torch.bfloat16,
    )  # fmt: skip
    report = pool.capacity_report()
    row = 32 * 2 + 32 * 2 + 4 * 4
    assert report.checkpoint_page_bytes == 2 * 512 * 2
    assert report.input_page_bytes == 2 * 8 * row
    assert report.conv_slot_bytes == 2 * (3 + 3) * 96 * 2
    assert report.weight_bytes == 2 * (3 * 4 + 96 * 4 + 96) * 4
    assert report.sequence_bytes == 2048 + 3 * 2304 + 2304
    assert report.total_bytes == 5 * 2048 + 15 * 2304 + 5 * 2304 + 3936


@pytest.mark.parametrize(("restore", "ring"), [("window", 3 + 2), ("any", 3 + 16)])
def test_what_restoring_anywhere_costs(restore, ring):
    """A pool made with restore="any" says what its longer rings cost."""
    spec = Mamba2Spec(heads=2, dim=4, state=8)  # 24 channels
    pool = StatePool(spec, [0], 1, capacity=16, max_window=2, restore=restore)
    report = pool.capacity_report()
    assert report.conv_slot_bytes == ring * 24 * 4
    assert f"({ring} rows each)" in str(report)


def test_the_formula_is_printed_with_its_numbers():
    """Every line that multiplies is right arithmetic, and the total is the sum of its lines."""
    pool = StatePool(SPECS[0], [1, 5], 3, capacity=12, format="fp32_split", input_pages=7)
    lines = str(pool.capacity_report()).splitlines()
    parts = 0
    for line in lines[:3]:
        left, right = line.split(" = ")
        left = re.sub(r"\([^)]*\)", "", left)  # remarks
        numbers = [int(n) for n in re.findall(r"\d+", left)]
        assert math.prod(numbers) == int(right.removesuffix(" B")), line
        parts += math.prod(numbers)
    weights = int(re.search(r"\d+", lines[3]).group())
    total = int(re.search(r"\d+", lines[4]).group())
    assert parts + weights == total == pool.nbytes
    left, right = lines[5].split(" = ")
    a, times, b, c = (int(n) for n in re.findall(r"\d+", left))
    assert a + times * b + c == int(right.removesuffix(" B"))
    assert a + times * b + c == pool.capacity_report().sequence_bytes
    assert "fp32_split" in lines[0]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.family}{s.conv_width}")
def test_a_budget_buys_as_many_sequences_as_fit(spec, rng):
    for fmt in FORMATS:
        options = {
            "format": fmt, "capacity": random_int(rng, 2, 20), "max_window": 2,
            "restore": ["window", "any"][random_int(rng, 0, 1)],
        }  # fmt: skip
        budget = random_int(rng, 30_000, 200_000)
        pool = StatePool.from_memory_budget(spec, [0, 2], budget, **options)
        report, count = pool.capacity_report(), pool.sizes.max_sequences
        assert pool.nbytes == tensor_bytes(pool) <= budget
        assert StatePool(spec, [0, 2], count + 1, **options).nbytes > budget
        assert report.total_bytes == report.weight_bytes + count * report.sequence_bytes
        # Exactly enough is enough, one byte less is not.
        again = StatePool.from_memory_budget(spec, [0, 2], report.total_bytes, **options)
        assert again.sizes == pool.sizes
        if count > 1:
            less = StatePool.from_memory_budget(spec, [0, 2], report.total_bytes - 1, **options)
            assert less.sizes.max_sequences == count - 1


def test_a_budget_for_nobody():
    spec = SPECS[0]
    one = StatePool(spec, [0], 1).nbytes
    assert StatePool.from_memory_budget(spec, [0], one).sizes.max_sequences == 1
    with pytest.raises(CapacityError) as error:
        StatePool.from_memory_budget(spec, [0], one - 1)
    assert (error.value.needed, error.value.free) == (one, one - 1)
    assert "one sequence needs" in str(error.value)


def test_a_budget_decides_the_counts():
    for name in ("max_sequences", "checkpoint_pages", "input_pages"):
        with pytest.raises(InputError, match=rf"^{name}: got 3; allowed nothing, the budget "):
            StatePool.from_memory_budget(SPECS[0], [0], 10**6, **{name: 3})
    for budget in (0, -5, 1e6, "1GB", None):
        with pytest.raises(InputError, match=r"^budget: got .+; allowed an integer >= 1; "):
            StatePool.from_memory_budget(SPECS[0], [0], budget)


REFUSED = {
    "spec": {"spec": "mamba2"},
    "layers": {"layers": []},
    "layers ": {"layers": [0, 0]},
    "layers  ": {"layers": [-1]},
    "layers   ": {"layers": [1.0]},
    "layers    ": {"layers": 5},
    "layers     ": {"layers": [True]},
    "layers      ": {"layers": None},
    "max_sequences": {"max_sequences": 0},
    "max_sequences ": {"max_sequences": (1 << 20) + 1},
    "max_sequences  ": {"max_sequences": 2.0},
    "capacity": {"capacity": 0},
    "capacity ": {"capacity": 3, "max_window": 4},
    "max_window": {"max_window": 0},
    "format": {"format": "fp8"},
    "dtype": {"dtype": torch.float64},
    "dtype ": {"dtype": "bfloat16"},
    "checkpoint_pages": {"checkpoint_pages": 0},
    "input_pages": {"input_pages": -1},
    "page_rows": {"page_rows": 6},
    "page_rows ": {"page_rows": 0},
    "restore": {"restore": "all"},
    "device": {"device": "nonsense"},
    "device ": {"device": "cuda:99"},
    "device  ": {"device": 1.5},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_at_construction(case):
    arguments = {"spec": SPECS[0], "layers": [0], "max_sequences": 2, **REFUSED[case]}
    with pytest.raises(ReplayError) as error:
        StatePool(**arguments)
    assert isinstance(error.value, (UnsupportedError, InputError))
    assert re.match(rf"^{case.strip()}: got .+; allowed .+; .+$", str(error.value)), error.value


def test_layers_come_from_any_iterable():
    assert StatePool(SPECS[0], (i for i in (4, 2)), 1).layers == (4, 2)
    assert StatePool.from_memory_budget(SPECS[0], iter(range(3)), 10**6).layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("capacity", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (7, 8), (8, 8), (16, 8), (33, 8)]
)
def test_pages_fit_short_capacities(capacity, rows):
    sizes = StatePool(SPECS[0], [0], 3, capacity=capacity).sizes
    assert sizes.page_rows == rows
    assert sizes.pages_per_sequence == -(-capacity // rows)
    assert sizes.input_pages == 3 * sizes.pages_per_sequence
    assert sizes.checkpoint_pages == 3


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_types_are_the_pools_whatever_torchs_default(default):
    """Engines load models under another default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        pool = StatePool(SPECS[0], [0], 2, format="fp32")
        pool.bind(0, A=-torch.ones(4), conv_weight=torch.ones(32, 4))
    finally:
        torch.set_default_dtype(before)
    assert {w.dtype for w in pool.weights.values()} == {torch.float32}
    assert pool.nbytes == pool.capacity_report().total_bytes
