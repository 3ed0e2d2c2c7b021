"""Field reports 28, 29 and 31: exhaustion, exact bytes, and refusals at construction."""

import re

import pytest
import torch

from replayinfer import (
    CapacityError,
    ReplayDecodeWrapper,
    StatePool,
    UnsupportedError,
)
from replayinfer.backends import select
from replayinfer.errors import ReplayError
from replayinfer.spec import Mamba2Spec

from ..pools.kit import SPECS, Unchanged, World


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    ("pool", "sizes", "calls"),
    [
        ("sequence slots", {"max_sequences": 2}, ["alloc", "fork"]),
        ("checkpoint pages", {"checkpoint_pages": 2}, ["alloc", "plan", "seed"]),
        ("input pages", {"input_pages": 3}, ["fork", "plan other", "rollback"]),
    ],
)
def test_report_28_exhaustion_names_what_ran_out_and_changes_nothing(
    family, pool, sizes, calls, rng
):
    """Every call that can run out, on full pools: the whole of memory and books is compared."""
    options = {"capacity": 4, "page_rows": 2, "max_sequences": 6, "restore": "any"} | sizes
    world = World(SPECS[family], rng, **options)
    a, b = world.alloc(2)
    world.grow(a, 4 if pool != "input pages" else 3)
    if pool == "checkpoint pages":
        world.fork(a)
    if pool == "input pages":
        world.grow(b, 2)
    spec = world.spec
    states = {layer: torch.zeros(spec.state_shape) for layer in (1, 4)}
    tails = {layer: torch.zeros(spec.conv_channels, 3) for layer in (1, 4)}
    if "rollback" in calls:
        with Unchanged(world.pool), pytest.raises(CapacityError, match=r"^input pages: "):
            world.pool.fork(a)
        with Unchanged(world.pool), pytest.raises(CapacityError, match=r"^input pages: "):
            world.wrapper.plan([b])
        world.fork(b)  # shares the one full page
        with Unchanged(world.pool), pytest.raises(CapacityError, match=r"^input pages: ") as error:
            world.pool.rollback(b, 1)
    else:
        for call in calls:
            with Unchanged(world.pool), pytest.raises(CapacityError) as error:
                {
                    "alloc": world.pool.alloc,
                    "fork": lambda: world.pool.fork(a),
                    "plan": lambda: world.wrapper.plan([a]),
                    "seed": lambda: world.pool.seed(a, states, conv=tails, tokens=1),
                }[call]()
            assert error.value.pool == pool
    message = str(error.value)
    assert re.match(
        rf"^{pool}: got a need of 1; allowed 0 \(free now\); free sequences, or ", message
    )
    world.check()


def test_report_28_what_is_reserved_is_what_is_held(rng):
    """As many sequences as were paid for can be full at once, to the last page, and no more."""
    for capacity, page_rows in ((5, 2), (8, 4), (3, 8), (16, 1)):
        spec = SPECS["mamba2"]
        one = StatePool(spec, [0], 1, capacity=capacity, page_rows=page_rows)
        report = one.capacity_report()
        budget = report.weight_bytes + 3 * report.sequence_bytes
        pool = StatePool.from_memory_budget(
            spec, [0], budget, capacity=capacity, page_rows=page_rows
        )
        assert pool.nbytes == budget
        wrapper = ReplayDecodeWrapper(pool, backend="torch")
        seqs = pool.alloc(3)
        for _ in range(capacity):
            plan = wrapper.planner.plan(seqs)
            wrapper.planner.folded(plan)
            wrapper.planner.commit(plan)
        assert {ids.free for ids in (pool.slot_ids, pool.checkpoint_ids, pool.input_ids)} == {0}
        with pytest.raises(CapacityError, match=r"^sequence slots: "):
            pool.alloc()


@pytest.mark.parametrize("fmt", ["fp32", "fp32_split", "bf16", "fp16"])
@pytest.mark.parametrize("family", SPECS)
def test_report_29_exact_bytes_with_the_formula(family, fmt):
    pool = StatePool(
        SPECS[family], [0, 1, 2], 3, capacity=10, max_window=2, format=fmt, dtype=torch.bfloat16,
        checkpoint_pages=4, input_pages=7, page_rows=4,
    )  # fmt: skip
    report = pool.capacity_report()
    checkpoints, conv = pool.checkpoints.storage.nbytes, pool.conv.rows.nbytes
    rows = sum(f.nbytes for f in pool.inputs.fields.values())
    weights = sum(w.nbytes for w in pool.weights.values())
    assert report.total_bytes == checkpoints + rows + conv + weights == pool.nbytes
    text = str(report)
    state = pool.spec.checkpoint_bytes(pool.format)
    row = pool.spec.row_bytes(torch.bfloat16, pool.format)
    for line in (
        f"4 x 3 layers x {state} B ({fmt}) = {checkpoints} B",
        f"7 x 3 layers x 4 rows x {row} B = {rows} B",
        f"3 x {report.conv_slot_bytes} B (5 rows each) = {conv} B",
        f"{weights} B",
        f"{report.total_bytes} B",
    ):
        assert line in text, text


CONSTRUCTIONS = {
    "device": {"device": "cuda:1023"},
    "dtype": {"dtype": torch.float8_e4m3fn},
    "format": {"format": "int8"},
    "capacity": {"capacity": 2, "max_window": 3},
    "page_rows": {"page_rows": 3},
    "layers": {"layers": [2, 2]},
    "spec": {"spec": {"heads": 4}},
    "restore": {"restore": "never"},
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_report_31_what_is_not_served_is_refused_at_construction_with_the_reason(name):
    arguments = {"spec": SPECS["gdn"], "layers": [0], "max_sequences": 2, **CONSTRUCTIONS[name]}
    with pytest.raises(UnsupportedError) as error:
        StatePool(**arguments)
    assert isinstance(error.value, ReplayError)
    assert re.match(rf"^{name}: got .+; allowed .+; .+$", str(error.value)), error.value


class OtherSpec(Mamba2Spec):
    family = "other"


def test_report_31_a_family_that_no_backend_serves():
    pool = StatePool(OtherSpec(heads=2, dim=2, state=2, conv_width=0), [0], 1)
    for backend in ("torch", "auto", select("torch", StatePool(SPECS["gdn"], [0], 1))):
        with pytest.raises(
            UnsupportedError, match=r"^backend: got .+ \(family 'other'; it serves "
        ):
            ReplayDecodeWrapper(pool, backend=backend)


def test_report_31_an_unknown_backend_lists_those_that_there_are():
    pool = StatePool(SPECS["gdn"], [0], 1)
    with pytest.raises(
        UnsupportedError, match=r"^backend: got 'cuda'; allowed auto, .*torch.*; pick"
    ):
        ReplayDecodeWrapper(pool, backend="cuda")
    assert ReplayDecodeWrapper(pool, backend="auto").backend.name
