"""Parents and paths that make no tree, counts where paths belong, and the abort of a tree."""

import numpy as np
import pytest
import torch

from replayinfer import InputError
from replayinfer.planner.trees import ancestors, check_parents

from ..pools.kit import Unchanged, check_books
from ..transfer.rig import SPECS, Rig, assert_equal_outputs, assert_same
from .forest import matrix, path_to, random_tree

GOOD = [[-1, 0, 0], [-1, 0, 7]]  # windows of 3 and 2


@pytest.fixture
def rig(rng):
    rig = Rig(SPECS["gdn"], rng, sequences=8)
    for seq in rig.pool.alloc(2):
        rig.decode(seq, rig.draw(2))
    return rig


@pytest.fixture
def sequences(rig):
    return rig.pool.cursors.handles(rig.pool.cursors.live)


BAD_PARENTS = {
    "itself": [[-1, 1, 0], [-1, 0, 0]],
    "a later node": [[-1, 2, 0], [-1, 0, 0]],
    "the first node's": [[0, 0, 0], [-1, 0, 0]],
    "below -1": [[-1, -2, 0], [-1, 0, 0]],
    "in the second sequence": [[-1, 0, 0], [-1, 5, 0]],
    "too narrow": [[-1, 0], [-1, 0]],
    "too wide": [[-1, 0, 0, 0], [-1, 0, 0, 0]],
    "one sequence": [[-1, 0, 0]],
    "flat": [-1, 0, 0],
    "ragged": [[-1, 0, 0], [-1, 0]],
    "floats": [[-1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]],
    "bools": [[True, False, False]] * 2,
    "beyond int32": [[-1, 2**40, 0], [-1, 0, 0]],
    "none": [],
}


@pytest.mark.parametrize("parents", BAD_PARENTS.values(), ids=BAD_PARENTS)
def test_bad_parents(rig, sequences, parents):
    with Unchanged(rig.pool), pytest.raises(InputError, match=r"parents: got .*; allowed"):
        rig.wrapper.plan(sequences, [3, 2], parents=parents)
    for good in (GOOD, np.array(GOOD, dtype=np.int8), torch.tensor(GOOD)):
        rig.wrapper.plan(sequences, [3, 2], parents=good)
        rig.wrapper.abort()
        check_books(rig.pool)


def test_the_message_says_which_node(rig, sequences):
    with pytest.raises(InputError, match=r"got 2 for node 1 of sequence 1; allowed -1\.\.0"):
        rig.wrapper.plan(sequences, 3, parents=[[-1, 0, 0], [-1, 2, 0]])


BAD_PATHS = {
    "does not start at the history": [[1], []],
    "skips a parent": [[0, 1, 2], []],
    "goes up": [[0, 0], []],
    "a node twice": [[0, 1, 1], []],
    "leaves the window": [[], [0, 1, 2]],
    "leaves the width": [[3], []],
    "a hole": [[0, -1, 2], []],
    "starts with a hole": [[-1, 0], []],
    "below -1": [[-2], []],
    "one sequence": [[0]],
    "three sequences": [[0], [0], []],
    "nested": [[[0, 1]], []],
    "ragged": [[[0], [0, 1]], []],
    "floats": [[0.0], []],
    "bools": [[True], []],
    "a count": [2, [0]],
}


@pytest.mark.parametrize("paths", BAD_PATHS.values(), ids=BAD_PATHS)
def test_bad_paths(rig, sequences, paths, rng):
    parts = {s: rig.draw(n) for s, n in zip(sequences, (3, 2), strict=True)}
    rig.start(parts, parents=GOOD)
    with Unchanged(rig.pool), pytest.raises(InputError, match=r"paths: got .*; allowed"):
        rig.wrapper.commit(paths=paths)
    counts = rig.wrapper.commit(paths=np.array([[0, 2, -1], [0, -1, -1]]))  # goes on
    assert counts.tolist() == [2, 1]
    assert [rig.pool.tokens(s) for s in sequences] == [4, 3]


def test_counts_for_trees_and_paths_for_chains(rig, sequences, rng):
    parts = {s: rig.draw(3) for s in sequences}
    rig.start(parts, parents=[[-1, 0, 0]] * 2)
    with Unchanged(rig.pool):
        for call in (
            lambda: rig.wrapper.commit(),
            lambda: rig.wrapper.commit([1, 1]),
            lambda: rig.wrapper.commit([1, 1], paths=[[0], [0]]),
        ):
            with pytest.raises(InputError, match="accepted: got a count for a plan of trees"):
                call()
    rig.wrapper.commit(paths=[[0], []])
    rig.start(parts)
    with Unchanged(rig.pool):
        for accepted in (None, [1, 1]):
            with pytest.raises(InputError, match="paths: got paths for a plan of chains"):
                rig.wrapper.commit(accepted, paths=[[0], [0]])
    rig.wrapper.commit([1, 0])
    assert [rig.pool.tokens(s) for s in sequences] == [4, 2]


@pytest.mark.parametrize("history", [1, 4])  # 4: the fold before the tree stands
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_aborted_tree_leaves_no_trace(spec, history, rng):
    rig = Rig(spec, rng)
    twin = Rig(spec, rng, like=rig)
    (a,), (b,) = rig.pool.alloc(), twin.pool.alloc()
    before, after = rig.draw(history), rig.draw(7)
    for r, seq in ((rig, a), (twin, b)):
        r.decode(seq, before)
    rig.start({a: rig.draw(3)}, parents=matrix([random_tree(3, rng)]))
    rig.wrapper.abort()
    if history == 4:
        twin.step({b: after[:0]}, force_fold=np.array([True]))
    check_books(rig.pool)
    assert_same(rig, a, twin, b)
    assert_equal_outputs(rig.decode(a, after, window=2), twin.decode(b, after, window=2))
    assert_same(rig, a, twin, b)


def test_ancestors_are_the_paths(rng):
    trees = [random_tree(n, rng) for n in (7, 5, 0)]
    parents = check_parents(matrix(trees), np.array([7, 5, 0], dtype=np.int32), 7)
    assert (parents[1, 5:] == -1).all()
    reach = ancestors(parents)
    for i, tree in enumerate(trees):
        for node in range(len(tree)):
            assert np.flatnonzero(reach[i, node]).tolist() == path_to(tree, node)
