"""Field report 27: copying a sequence copies or folds the pending rows too."""

import numpy as np
import pytest

from replayinfer.testing import poison_

from ..backends.world import poison_dead
from ..pools.kit import check_books
from ..transfer.rig import SPECS, Rig, assert_equal_outputs, assert_same

L = 6


def fork(rig, seq):
    return rig.pool.fork(seq)[0]


def fork_of_a_fork(rig, seq):
    return fork(rig, fork(rig, seq))


def fork_at_the_last_row(rig, seq):
    return rig.pool.fork(seq, rows=rig.pool.history(seq))[0]


def export_and_import(rig, seq):
    return rig.pool.import_(rig.pool.export(seq))


def fork_then_move_pages(rig, seq):
    child = fork(rig, seq)
    rig.pool.resize(input_pages=60, checkpoint_pages=20)
    rig.pool.sleep()
    rig.pool.wake()
    return child


COPIES = (fork, fork_of_a_fork, fork_at_the_last_row, export_and_import, fork_then_move_pages)


@pytest.mark.parametrize("copy", COPIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("family", "format"), [("mamba2", "fp32"), ("gdn", "fp32"), ("kda", "fp32_split")]
)
def test_a_copy_has_every_pending_row(family, format, copy, rng):
    """At every count of pending rows; then the original goes, and its memory is overwritten."""
    options = {"format": format, "layers": (4,), "sequences": 3 * L + 3}
    rig = Rig(SPECS[family], rng, **options)
    twin = Rig(SPECS[family], rng, like=rig, **options)
    before, after = rig.draw(L + 2), rig.draw(5)
    pairs = []
    for r in (rig, twin):
        seqs = r.pool.alloc(L + 1)
        r.step(dict.fromkeys(seqs, before[:2]))
        r.step(dict.fromkeys(seqs, before[:0]), force_fold=np.full(L + 1, True))
        for t in range(L):
            r.step(dict.fromkeys(seqs[t + 1 :], before[2 + t : 3 + t]))
        assert [r.pool.history(s) for s in seqs] == list(range(L + 1))
        pairs.append(seqs)
    originals, wanted = pairs
    copies = [copy(rig, seq) for seq in originals]
    rig.pool.free([s for s in rig.pool.cursors.handles(rig.pool.cursors.live) if s not in copies])
    check_books(rig.pool)
    free = np.flatnonzero(rig.pool.checkpoint_ids.refs == 0)
    poison_(rig.pool.checkpoints.storage[:, free[0]])
    poison_dead(rig.pool)
    for a, b in zip(copies, wanted, strict=True):
        assert_same(rig, a, twin, b)
    for t in (0, 3):
        got = rig.step(dict.fromkeys(copies, after[t : t + 3]))
        want = twin.step(dict.fromkeys(wanted, after[t : t + 3]))
        for a, b in zip(copies, wanted, strict=True):
            assert_equal_outputs(got[a], want[b])
    for a, b in zip(copies, wanted, strict=True):
        assert_same(rig, a, twin, b)
