"""After the commit of a path a sequence is one that decoded that path as a chain."""

import numpy as np
import pytest
import torch

from replayinfer import materialize
from replayinfer.testing import (
    assert_bitwise_equal,
    assert_untouched,
    assert_within_budget,
    snapshot,
)

from ..backends.world import poison_dead
from ..pools.kit import check_books, memory
from ..transfer.rig import FLOOR, SPECS, Rig, assert_same, draw, join
from .forest import matrix, path_to, random_tree
from .test_nodes import L, T

N = 6


def held_rows(rig, seq, name):
    """A field of a sequence's rows, oldest first: ``[layers, rows, ...]``."""
    slot = rig.pool.cursors.peek(seq)
    row = np.arange(rig.pool.history(seq))
    page = rig.pool.cursors.table[slot, row // rig.pool.sizes.page_rows]
    return rig.pool.inputs.fields[name][:, page, row % rig.pool.sizes.page_rows]


def compare(rig, seq, twin, exact):
    """`exact`: the arithmetic was the same, so all bits are; else ``u``'s sums met other zeros."""
    assert rig.pool.tokens(seq) == rig.pool.tokens(twin)
    assert rig.pool.history(seq) == rig.pool.history(twin)
    assert_bitwise_equal(rig.pool.conv_tail(seq), rig.pool.conv_tail(twin), "convolution window")
    for name in rig.pool.inputs.fields:
        if exact or name != "u":
            assert_bitwise_equal(*(held_rows(rig, s, name) for s in (seq, twin)), name)
    if exact:
        assert_same(rig, seq, rig, twin)
    else:
        states = [materialize(rig.pool, s) for s in (seq, twin)]
        assert_within_budget(states[0], exact=states[1].double(), floor=FLOOR, name="state")


@pytest.mark.parametrize("history", [0, 1, 3, 4, 8])  # 4 and 8 fold before the tree
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_path_of_a_tree(spec, format, history, rng):
    """One fork for every node as the end of the accepted path, and one that accepts nothing."""
    page_rows = (1, 2, 4)[history % 3]
    rig = Rig(spec, rng, sequences=2 * N + 3, capacity=L, max_window=T, page_rows=page_rows,
              format=format, input_pages=200)  # fmt: skip
    (root,) = rig.pool.alloc()
    before = draw(spec, history, rng)
    if history:
        rig.decode(root, before)
    part, parents = draw(spec, N, rng), random_tree(N, rng)
    paths = [path_to(parents, node) for node in range(-1, N)]
    trees, chains = (rig.pool.fork(root, N + 1) for _ in range(2))
    fold = np.full(N + 1, history + N > L)

    rig.start(dict.fromkeys(trees, part), parents=matrix([parents] * (N + 1)))
    held = snapshot(memory(rig.pool))
    with_padding = [path + [-1] * (len(path) % 3) for path in paths]
    counts = rig.wrapper.commit(paths=with_padding)
    assert counts.tolist() == [len(path) for path in paths]
    assert_untouched(held, memory(rig.pool), [name for name in held if name != "checkpoints"])
    poison_dead(rig.pool)
    check_books(rig.pool)
    rig.step({c: part[p] for c, p in zip(chains, paths, strict=True)}, force_fold=fold)

    exact = spec.family == "mamba2" or format == "fp32_split"
    for seq, twin in zip(trees, chains, strict=True):
        # No u of a tree is used by an exact comparison: it is solved for again, or there is none.
        compare(rig, seq, twin, exact=spec.family == "mamba2")
        if exact:
            assert_same(rig, seq, rig, twin)
    # The accepted nodes can be taken back like any window's.
    for seq, twin, path in zip(trees, chains, paths, strict=True):
        if len(path) > 1:
            for s in (seq, twin):
                rig.pool.rollback(s, 1)
            compare(rig, seq, twin, exact=spec.family == "mamba2")
    # And decoding goes on, through another fold, where the float64 recurrence does.
    after = draw(spec, 6, rng)
    got = {seq: rig.decode(seq, after, window=3) for seq in trees}
    want = {seq: rig.decode(seq, after, window=3) for seq in chains}
    values = {"exact": [], "plain": [], "got": [], "chain": []}
    for seq, twin, path in zip(trees, chains, paths, strict=True):
        kept = path[:-1] if len(path) > 1 else path
        line = join([before, part[kept], after])
        assert rig.pool.tokens(seq) == len(line)
        truth = rig.reference(line)
        plain = rig.reference(line, torch.float32, readout=True)
        for key in got[seq]:
            if key.startswith("conv"):
                assert_bitwise_equal(got[seq][key], want[twin][key], key)
                continue
            values["got"].append(got[seq][key])
            values["chain"].append(want[twin][key])
            values["exact"].append(truth[key][-6:])
            values["plain"].append(plain[key][-6:])
    values = {name: torch.cat(x) for name, x in values.items()}
    assert_within_budget(
        values["got"], exact=values["exact"], rounded=values["plain"].float(), floor=FLOOR
    )
    assert_within_budget(values["got"], exact=values["chain"].double(), rounded=None,
                         floor=2**-9 if format == "fp32_split" else FLOOR)  # fmt: skip


@pytest.mark.parametrize("restore", ["window", "any"])
def test_trees_chains_and_empty_windows_in_turn(restore, rng):
    """Many steps of mixed windows, random trees and random paths, beside the chains of the paths."""
    spec = SPECS["mamba2"]
    options = {"capacity": L, "max_window": T, "restore": restore, "input_pages": 99}
    rig = Rig(spec, rng, **options)
    twin = Rig(spec, rng, like=rig, **options)
    a, b = rig.pool.alloc(3), twin.pool.alloc(3)
    for turn in range(12):
        trees = [random_tree(int(n), rng) for n in torch.randint(0, T + 1, (3,), generator=rng)]
        if turn % 4 == 3:
            trees = [list(range(-1, len(p) - 1)) for p in trees]
        ends = [int(torch.randint(-1, len(p), (), generator=rng)) for p in trees]
        paths = [path_to(p, end) for p, end in zip(trees, ends, strict=True)]
        parts = [draw(spec, len(p), rng) for p in trees]
        fold = np.array([rig.pool.history(s) + len(p) > L for s, p in zip(a, trees, strict=True)])
        rig.step(dict(zip(a, parts, strict=True)), parents=matrix(trees),
                 paths=dict(zip(a, paths, strict=True)))  # fmt: skip
        twin.step(
            {s: part[path] for s, part, path in zip(b, parts, paths, strict=True)}, force_fold=fold
        )
        check_books(rig.pool)
        for x, y in zip(a, b, strict=True):
            assert_same(rig, x, twin, y)
    assert rig.wrapper.counters.tokens == twin.wrapper.counters.tokens
    assert rig.wrapper.counters.folds == twin.wrapper.counters.folds > 3
