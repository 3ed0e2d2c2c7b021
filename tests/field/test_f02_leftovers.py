"""Field report 2: the whole padded plan is rewritten; a larger batch leaves nothing behind."""

import dataclasses

import pytest
import torch

from replayinfer.planner.plan import PlanArrays
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import SPECS, World


@pytest.mark.parametrize("family", SPECS)
def test_report_2_a_smaller_batch_after_a_larger_one(family, rng):
    """In the same bucket: its outputs are those of a planner that never saw the larger one."""
    world = World(SPECS[family], rng, capacity=4, page_rows=2, max_window=2, max_sequences=8,
                  buckets=[8])  # fmt: skip
    seqs = world.alloc(8)
    addresses = None
    for turn in range(12):
        some = seqs[turn % 5 :: 1 + turn % 3] if turn % 2 else seqs
        plan = world.step({s: 1 + (turn + i) % 2 for i, s in enumerate(some)})
        assert (plan.batch, plan.bucket) == (len(some), 8)
        arrays = {f.name: getattr(plan.arrays, f.name) for f in dataclasses.fields(PlanArrays)}
        now = {name: a.data_ptr() for name, a in arrays.items()}
        assert addresses in (None, now)
        addresses = now
        for name in ("slot", "page", "table"):
            assert (arrays[name][plan.batch :] == -1).all(), name
        for name in ("history", "window", "conv_place"):
            assert (arrays[name][plan.batch :] == 0).all(), name
        for name in ("fold_source", "fold_target", "fold_table"):
            assert (arrays[name][plan.fold_count :] == -1).all(), name
        assert (arrays["fold_rows"][plan.fold_count :] == 0).all()
        assert arrays["fold_count"].item() == plan.fold_count
    world.check()  # those that were left out moved as little as the model's


def test_report_2_a_scribbled_bucket_is_rewritten(rng):
    """Whatever the arrays hold before a plan, they hold the plan afterwards."""
    world = World(SPECS["gdn"], rng, capacity=2, max_sequences=4, layers=[0])
    seqs = world.alloc(4)
    world.step(seqs)
    world.step(seqs)
    names = [f.name for f in dataclasses.fields(PlanArrays)]
    clean = world.wrapper.plan(seqs[:2], bucket=6)
    want = {name: getattr(clean.arrays, name).clone() for name in names}
    world.wrapper.abort()
    for value in (-1, 0, 7, 2**31 - 1):
        for name in names:
            getattr(clean.arrays, name).fill_(value)
        plan = world.wrapper.plan(seqs[:2], bucket=6)
        for name in names:
            assert_bitwise_equal(getattr(plan.arrays, name), want[name], name)
        world.wrapper.abort()
    assert torch.equal(want["slot"], torch.tensor([0, 1, -1, -1, -1, -1], dtype=torch.int32))
