"""With the checks on, what is right stays right, bit for bit."""

import numpy as np
import pytest

from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import check_books, memory
from ..transfer.rig import CASES, SPECS, Rig, assert_equal_outputs, assert_same
from ..trees.forest import matrix, path_to, random_tree


def both(rigs, action):
    """Do the same in both worlds; what comes back has to be equal."""
    results = [action(rig) for rig in rigs]
    for got, want in zip(*(r.values() for r in results), strict=True):
        assert_equal_outputs(got, want)


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_clean_runs_are_unchecked_runs(spec, format, checked_rig, rng, monkeypatch):
    """Steps, folds, forks, trees, prefills, moves, sleep and resize."""
    plain = Rig(spec, rng, format=format, policy="spread")
    rigs = [checked_rig(spec, rng, like=plain, format=format, policy="spread"), plain]
    names = {id(rig): rig.pool.alloc(2) for rig in rigs}

    def steps(windows, *, accepted=None, **options):
        drawn = [plain.draw(n) for n in windows]
        both(rigs, lambda rig: rig.step(
            dict(zip(names[id(rig)], drawn, strict=True)),
            accepted=accepted and dict(zip(names[id(rig)], accepted, strict=True)), **options,
        ))  # fmt: skip

    for accepted in ([3, 0], [1, 1], [3, 0], [0, 1]):
        steps([3, 1], accepted=accepted)
    for rig in rigs:
        names[id(rig)] += rig.pool.fork(names[id(rig)][0])
    steps([1, 2, 3], accepted=[1, 1, 0])
    steps([1, 1, 1], force_fold=np.array([True, True, False]))
    trees = [random_tree(3, rng), [], random_tree(2, rng)]
    paths = [path_to(trees[0], 2), [], path_to(trees[2], 1)]
    parts = [plain.draw(len(tree)) for tree in trees]
    both(rigs, lambda rig: rig.step(
        dict(zip(names[id(rig)], parts, strict=True)), parents=matrix(trees),
        paths=dict(zip(names[id(rig)], paths, strict=True)),
    ))  # fmt: skip
    pieces = [plain.draw(n) for n in (4, 0, 18)]
    both(rigs, lambda rig: rig.prefill(dict(zip(names[id(rig)], pieces, strict=True))))
    steps([2, 1, 3])
    for rig in rigs:
        rig.pool.sleep()
        rig.pool.wake()
        a, b, c = names[id(rig)]
        snap = rig.pool.export(b)
        rig.pool.free(b)
        with monkeypatch.context() as patch:
            patch.setenv("REPLAYINFER_CHECK", "1" if rig is rigs[0] else "0")
            rig.pool.resize(max_sequences=7, checkpoint_pages=9, input_pages=14)
        names[id(rig)] = [a, rig.pool.import_(snap), c]
    for _ in range(3):
        steps([3, 2, 1])
    for a, b in zip(*names.values(), strict=True):
        assert_same(rigs[0], a, rigs[1], b)
    for rig in rigs:
        check_books(rig.pool)
    for name, tensor in memory(rigs[0].pool).items():
        assert_bitwise_equal(tensor, memory(rigs[1].pool)[name], name)
    assert rigs[0].wrapper.counters == rigs[1].wrapper.counters


def test_guards_cost_what_they_cost(checked_rig, rng):
    """Two pages in every layer of every tensor; what is reported is the usable part."""
    plain, checked = Rig(SPECS["gdn"], rng), checked_rig(SPECS["gdn"], rng)
    for a, b in zip(plain.pool.guarded(), checked.pool.guarded(), strict=True):
        assert a.whole is a.pages
        assert b.whole.shape[1] == b.pages.shape[1] + 2 == a.pages.shape[1] + 2
        assert a.pages.shape == b.pages.shape
    assert checked.pool.nbytes == plain.pool.nbytes == plain.pool.capacity_report().total_bytes
