"""Field reports 22, 23 and 24: accepted counts, windows that always fit, rejected rows."""

import numpy as np
import pytest
import torch

from replayinfer import InputError, StatePool, UnsupportedError
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import SPECS, Unchanged, World, random_int


@pytest.mark.parametrize("family", SPECS)
def test_report_22_every_count_from_none_to_all(family, rng):
    """In one batch, at every fill level, step after step."""
    world = World(SPECS[family], rng, capacity=7, max_window=3, page_rows=2, layers=[0])
    seqs = world.alloc(4)
    for turn in range(10):
        accepted = {seq: (i + turn) % 4 for i, seq in enumerate(seqs)}
        before = {seq: world.pool.tokens(seq) for seq in seqs}
        world.step(dict.fromkeys(seqs, 3), accepted)
        for seq, count in accepted.items():
            assert world.pool.tokens(seq) == before[seq] + count
        world.check()


@pytest.mark.parametrize("family", SPECS)
def test_report_22_zero_is_a_no_op(family, rng):
    """The fold apart, which changes no state: the very same bits where none was due."""
    world = World(SPECS[family], rng, capacity=8, max_window=3, page_rows=4, layers=[0])
    (a,) = world.alloc()
    world.grow(a, 4)
    state, tail = world.wrapper.materialize(a), world.pool.conv_tail(a)
    for _ in range(5):
        world.step({a: 3}, {a: 0})
        assert_bitwise_equal(world.wrapper.materialize(a), state)
        assert_bitwise_equal(world.pool.conv_tail(a), tail)
        assert (world.pool.tokens(a), world.pool.history(a)) == (4, 4)
    world.step({a: 3})
    world.check()


@pytest.mark.parametrize(
    "accepted", [[-1, 0], [3, 0], [0, 2], [2, -(2**31)], [2**31, 0], [2**62, 1], [0, 2**63 - 1]]
)
def test_report_22_anything_else_is_refused(accepted, rng):
    world = World(SPECS["mamba2"], rng, capacity=4, max_window=2, layers=[0])
    a, b = world.alloc(2)
    plan = world.wrapper.plan([a, b], [2, 1])
    world.wrapper.fold()
    world.run(plan, world.draw(plan))
    bad = 0 if not 0 <= accepted[0] <= 2 else 1
    with Unchanged(world.pool), pytest.raises(InputError) as error:
        world.wrapper.commit(accepted)
    assert str(error.value).startswith(
        f"accepted: got {accepted[bad]} for sequence {bad} of the plan; allowed 0..{2 - bad}"
    )
    assert world.wrapper.commit([2, 0]).tolist() == [2, 0]


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(("capacity", "longest"), [(3, 3), (4, 3), (5, 3), (6, 3), (9, 4)])
def test_report_23_no_window_is_truncated(family, capacity, longest, rng):
    """Mixed windows and random acceptances; every output of every window is compared."""
    world = World(SPECS[family], rng, capacity=capacity, max_window=longest, page_rows=2,
                  layers=[0])  # fmt: skip
    seqs = world.alloc(4)
    for _ in range(16):
        windows = {seq: random_int(rng, 0, longest) for seq in seqs}
        accepted = {seq: random_int(rng, 0, window) for seq, window in windows.items()}
        plan = world.step(windows, accepted)
        assert plan.windows.tolist() == list(windows.values())
        assert plan.fold.tolist() == [
            h + t > capacity for h, t in zip(plan.fold_rows, plan.windows, strict=True)
        ]
        assert (plan.starts + plan.windows <= capacity).all()
    world.check()


def test_report_23_the_longest_window_at_every_fill_level(rng):
    world = World(SPECS["mamba2"], rng, capacity=6, max_window=6, page_rows=2, layers=[0])
    seqs = world.alloc(6)
    world.step(dict(zip(seqs, range(1, 7), strict=True)))
    assert [world.pool.history(s) for s in seqs] == [1, 2, 3, 4, 5, 6]
    world.step(dict.fromkeys(seqs, 6), dict(zip(seqs, range(6), strict=True)))
    world.step(dict.fromkeys(seqs, 6))
    world.check()


def test_report_23_a_capacity_below_the_window_is_refused_at_construction():
    for capacity, window in ((1, 2), (3, 4), (15, 16)):
        with pytest.raises(UnsupportedError) as error:
            StatePool(SPECS["gdn"], [0], 1, capacity=capacity, max_window=window)
        assert str(error.value).startswith(
            f"capacity: got {capacity}; allowed >= max_window={window}, since a window is never "
        )
        StatePool(SPECS["gdn"], [0], 1, capacity=window, max_window=window)


def test_report_23_a_window_longer_than_the_pools_is_refused(rng):
    world = World(SPECS["gdn"], rng, capacity=8, max_window=3, layers=[0])
    seqs = world.alloc(2)
    with (
        Unchanged(world.pool),
        pytest.raises(InputError, match=r"^windows: got 4; allowed 0\.\.3 "),
    ):
        world.wrapper.plan(seqs, [1, 4])


@pytest.mark.parametrize("fmt", ["fp32", "fp32_split"])
@pytest.mark.parametrize("family", SPECS)
def test_report_24_rejected_rows_leave_no_trace(family, fmt, rng):
    """Bit for bit the outputs, states and tails of a sequence that never had a draft rejected."""
    options = {"capacity": 5, "max_window": 3, "page_rows": 2, "format": fmt, "layers": [0]}
    drafted, plain = (World(SPECS[family], rng, **options) for _ in range(2))
    plain.pool.bind(0, **{name: w[0].clone() for name, w in drafted.pool.weights.items()})
    (a,), (b,) = drafted.pool.alloc(), plain.pool.alloc()
    tokens = 0
    while tokens < 24:
        window = random_int(rng, 1, 3)
        accepted = random_int(rng, 0, window)
        # The two must fold alike, or they would round alike only nearly.
        force = np.array([drafted.pool.history(a) + window > 5])
        plan = drafted.wrapper.plan([a], window)
        drafted.wrapper.fold()
        drawn = drafted.draw(plan)
        full = drafted.run(plan, drawn)[0]
        drafted.wrapper.commit([accepted])

        plan = plain.wrapper.plan([b], accepted, force_fold=force, window=window)
        plain.wrapper.fold()
        inputs, rows = drawn[0]
        for x in (rows, *inputs.values()):
            x[:, accepted:] = torch.nan
        kept = plain.run(plan, drawn)[0]
        plain.wrapper.commit()
        for want, got in zip(kept, full, strict=True):
            assert_bitwise_equal(got[:, :accepted], want[:, :accepted])
        assert_bitwise_equal(drafted.wrapper.materialize(a), plain.wrapper.materialize(b))
        assert_bitwise_equal(drafted.pool.conv_tail(a), plain.pool.conv_tail(b))
        assert drafted.pool.history(a) == plain.pool.history(b)
        tokens += accepted


@pytest.mark.parametrize("family", SPECS)
def test_report_24_rejected_rows_may_hold_anything(family, rng):
    """A draft that made NaN or infinity is gone once it is rejected."""
    world = World(SPECS[family], rng, capacity=6, max_window=3, page_rows=2, layers=[0])
    (a,) = world.alloc()
    for poison in (torch.nan, torch.inf, -torch.inf):
        plan = world.wrapper.plan([a], 3)
        world.wrapper.fold()
        drawn = world.draw(plan)
        inputs, rows = drawn[0]
        for x in (rows, *inputs.values()):
            x[:, 1:] = poison
        world.run(plan, drawn)
        world.wrapper.commit([1])
        kept = {name: x[0, :1] for name, x in inputs.items()}
        world.model.step(a, {0: kept}, conv={0: rows[0, :1]})
        world.check()
        world.step({a: 2}, {a: 1})
        world.check()
