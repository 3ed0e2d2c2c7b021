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
from ..transfer.rig import CASES, FLOOR, SPECS, Rig, assert_same, join, joined
from .forest import matrix, path_to, random_tree
from .test_nodes import L, T

N = 6
# A readout of fp32_split passes the last bits of u on to a bf16 plane, where they may turn one.
SPLIT = 2.0**-9


def decode_together(rig, sequences, stream):
    """Decode one stream by all sequences in windows of three."""
    steps = [
        rig.step(dict.fromkeys(sequences, stream[t : t + 3])) for t in range(0, len(stream), 3)
    ]
    return {seq: joined([step[seq] for step in steps]) for seq in sequences}


def held_rows(rig, seq, name):
    """A field of a sequence's rows, oldest first: ``[layers, rows, ...]``."""
    slot = rig.pool.cursors.peek(seq)
    row = np.arange(rig.pool.history(seq))
    page = rig.pool.cursors.table[slot, row // rig.pool.sizes.page_rows]
    return rig.pool.inputs.fields[name][:, page, row % rig.pool.sizes.page_rows]


def compare(rig, seq, twin, *, rows, state):
    """`rows`, `state`: the arithmetic was the same, so all bits are; else ``u`` met other zeros."""
    assert rig.pool.tokens(seq) == rig.pool.tokens(twin)
    assert rig.pool.history(seq) == rig.pool.history(twin)
    assert_bitwise_equal(rig.pool.conv_tail(seq), rig.pool.conv_tail(twin), "convolution window")
    for name in rig.pool.inputs.fields:
        if rows or name != "u":
            assert_bitwise_equal(*(held_rows(rig, s, name) for s in (seq, twin)), name)
    got, want = (materialize(rig.pool, s) for s in (seq, twin))
    if state:
        assert_bitwise_equal(got, want, "state")
    else:
        assert_within_budget(got, exact=want.double(), floor=FLOOR, name="state")


@pytest.mark.parametrize(("history", "page_rows"), [(0, 4), (3, 2), (8, 1)])  # 8 folds first
@pytest.mark.parametrize(("spec", "format"), CASES)
def test_every_path_of_a_tree(spec, format, history, page_rows, rng):
    """One fork for every node as the end of the accepted path, and one that accepts nothing."""
    rig = Rig(spec, rng, sequences=2 * N + 3, capacity=L, max_window=T, page_rows=page_rows,
              format=format, input_pages=200)  # fmt: skip
    (root,) = rig.pool.alloc()
    before = rig.draw(history)
    if history:
        rig.decode(root, before)
    part, parents = rig.draw(N), random_tree(N, rng)
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

    plain_rows, rounded = spec.family == "mamba2", format == "fp32_split"
    same = {"rows": plain_rows, "state": plain_rows or rounded}  # rounded: u is solved for again
    for seq, twin, path in zip(trees, chains, paths, strict=True):
        compare(rig, seq, twin, **same)
        if len(path) > 1:  # the accepted nodes can be taken back like any window's
            for s in (seq, twin):
                rig.pool.rollback(s, 1)
            compare(rig, seq, twin, **same)
    # And decoding goes on, through another fold, where the float64 recurrence does.
    after = rig.draw(6)
    got, want = (decode_together(rig, seqs, after) for seqs in (trees, chains))
    values = {"got": [], "chain": [], "exact": [], "plain": []}
    for i, (seq, twin, path) in enumerate(zip(trees, chains, paths, strict=True)):
        kept = path[:-1] if len(path) > 1 else path
        line = join([before, part[kept], after])
        assert rig.pool.tokens(seq) == rig.pool.tokens(twin) == len(line)
        for layer in rig.layers:
            assert_bitwise_equal(got[seq][f"conv {layer}"], want[twin][f"conv {layer}"])
            values["got"].append(got[seq][f"y {layer}"])
            values["chain"].append(want[twin][f"y {layer}"])
        if i in (0, 1, N):
            truth = rig.reference(line)
            plain = rig.reference(line, torch.float32, readout=True)
            for layer in rig.layers:
                values["exact"].append(truth[f"y {layer}"][-6:])
                values["plain"].append(plain[f"y {layer}"][-6:])
    y, chain, true, near = (torch.cat(x) for x in values.values())
    assert_within_budget(y, exact=chain.double(), floor=SPLIT if rounded else FLOOR)
    y = torch.cat([v for i, v in enumerate(values["got"]) if i // 2 in (0, 1, N)])
    assert_within_budget(y, exact=true, rounded=near.float(), floor=FLOOR)


@pytest.mark.parametrize("restore", ["window", "any"])
def test_trees_chains_and_empty_windows_in_turn(restore, rng):
    """Mixed windows, random trees and random paths, beside the chains of the paths."""
    spec = SPECS["mamba2"]
    options = {"capacity": L, "max_window": T, "restore": restore, "input_pages": 99}
    rig = Rig(spec, rng, **options)
    twin = Rig(spec, rng, like=rig, **options)
    a, b = rig.pool.alloc(3), twin.pool.alloc(3)
    for turn in range(16):
        trees = [random_tree(int(n), rng) for n in torch.randint(0, T + 1, (3,), generator=rng)]
        if turn % 4 == 3:
            trees = [list(range(-1, len(p) - 1)) for p in trees]
        ends = [int(torch.randint(-1, len(p), (), generator=rng)) for p in trees]
        paths = [path_to(p, end) for p, end in zip(trees, ends, strict=True)]
        parts = [rig.draw(len(p)) for p in trees]
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
    assert rig.wrapper.counters.folds == twin.wrapper.counters.folds > 0
