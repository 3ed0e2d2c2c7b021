"""Random acceptance for long, every count at every fill level, and rollback by cursor."""

import numpy as np
import pytest
import torch

from replayinfer import materialize
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import SPECS as PLAIN
from ..pools.kit import World, random_int
from ..transfer.rig import SPECS, Rig, assert_same
from ..trees.test_commit import held_rows


@pytest.mark.parametrize("family", PLAIN)
def test_a_thousand_rounds_of_random_acceptance(family, rng):
    """500 a family; every output against the float64 recurrence over what was accepted."""
    world = World(PLAIN[family], rng, capacity=11, max_window=5, page_rows=4, layers=[0])
    seqs = world.alloc(4)
    for turn in range(125):
        windows = {seq: random_int(rng, 1, 5) for seq in seqs}
        world.step(windows, {seq: random_int(rng, 0, w) for seq, w in windows.items()})
        if turn % 25 == 0:
            world.check()
    world.check()
    assert world.wrapper.counters.rows_rejected > 125


@pytest.mark.parametrize("fmt", ["fp32", "fp32_split"])
@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_every_count_at_every_fill_level(family, fmt, rng):
    """Windows of 5 over pages of 4: within one, up to its end, across it, and after a fold."""
    capacity, window = 8, 5
    pairs = [(h, n) for h in range(capacity + 1) for n in range(window + 1)]
    options = {"sequences": 2 * len(pairs), "capacity": capacity, "max_window": window,
               "page_rows": 4, "format": fmt, "layers": (1,)}  # fmt: skip
    rig = Rig(SPECS[family], rng, **options)
    drafted, plain = (rig.pool.alloc(len(pairs)) for _ in range(2))
    for start in (0, window):  # both to their fill levels, with the same tokens
        parts = [rig.draw(min(max(h - start, 0), window)) for h, _ in pairs]
        for seqs in (drafted, plain):
            rig.step(dict(zip(seqs, parts, strict=True)))
    parts = [rig.draw(window) for _ in pairs]
    folds = np.array([h + window > capacity for h, _ in pairs])
    rig.step(
        dict(zip(drafted, parts, strict=True)),
        accepted={seq: n for seq, (_, n) in zip(drafted, pairs, strict=True)},
    )
    kept = [part[:n] for part, (_, n) in zip(parts, pairs, strict=True)]
    rig.step(dict(zip(plain, kept, strict=True)), force_fold=folds, width=window)
    for a, b, (h, n) in zip(drafted, plain, pairs, strict=True):
        assert rig.pool.history(a) == (n if h + window > capacity else h + n)
        assert_same(rig, a, rig, b)
        for name in rig.pool.inputs.fields:
            assert_bitwise_equal(held_rows(rig, a, name), held_rows(rig, b, name), name)


@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_rollback_after_a_commit_is_a_commit_of_less(family, rng):
    """What a cache that is cropped does: the same rows, state and convolution window."""
    spec = SPECS[family]
    options = {"capacity": 7, "max_window": 4, "page_rows": 2, "input_pages": 40}
    rig = Rig(spec, rng, **options)
    twin = Rig(spec, rng, like=rig, **options)
    (a,), (b,) = rig.pool.alloc(), twin.pool.alloc()
    shared = 0
    for turn in range(20):
        part = rig.draw(random_int(rng, 1, 4))
        count = random_int(rng, 0, len(part))
        rig.step({a: part})
        if turn % 4 == 1:  # a fork holds the pages that the rollback cuts
            child = rig.pool.fork(a)
            shared += 1
        rig.pool.rollback(a, len(part) - count)
        twin.step({b: part}, accepted={b: count})
        assert_same(rig, a, twin, b)
        for name in rig.pool.inputs.fields:
            assert_bitwise_equal(held_rows(rig, a, name), held_rows(twin, b, name), name)
        if turn % 4 == 1:
            rig.pool.free(child)
    assert shared == 5
    assert torch.isfinite(materialize(rig.pool, a)).all()
