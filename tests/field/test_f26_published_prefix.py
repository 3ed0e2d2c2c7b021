"""Field report 26: a published prefix carries its token count and layout; a mismatch is refused."""

import dataclasses

import pytest
import torch

from replayinfer import InputError, SequenceSnapshot, StatePool
from replayinfer.offload import load_sequence, save_sequence
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import Unchanged, check_books
from ..transfer.rig import CASES, SPECS, Rig, assert_equal_outputs, assert_same, joined


def published(spec, rng, **options):
    """A prefix of 23 tokens: a prompt, some decoded tokens, and a sequence that went on from it."""
    rig = Rig(spec, rng, **options)
    (seq,) = rig.pool.alloc()
    rig.prefill({seq: rig.draw(19)})
    rig.decode(seq, rig.draw(4))
    snap = rig.pool.export(seq)
    (on,) = rig.pool.fork(seq)
    rig.decode(on, rig.draw(5))
    return rig, seq, snap


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_the_token_count_is_the_prefix_own(spec, format, tmp_path, rng):
    """Not that of what came after it, nor a multiple of a page; and a user continues there."""
    pytest.importorskip("safetensors")
    rig, seq, snap = published(spec, rng, format=format)
    assert (snap.tokens, snap.header["history"], snap.header["layout_version"]) == (23, 4, 1)
    save_sequence(snap, tmp_path / "prefix.safetensors")
    loaded = load_sequence(tmp_path / "prefix.safetensors")
    assert loaded.tokens == 23
    users = [rig.pool.import_(loaded) for _ in range(2)]
    assert [rig.pool.tokens(user) for user in users] == [23, 23]
    for user in users:
        assert_same(rig, user, rig, seq)
    question = rig.draw(7)
    want = joined([rig.prefill({seq: question[:5]})[seq], rig.decode(seq, question[5:])])
    for user in users:
        got = joined([rig.prefill({user: question[:5]})[user], rig.decode(user, question[5:])])
        assert_equal_outputs(got, want)
        assert rig.pool.tokens(user) == 30
    check_books(rig.pool)


# The kinds of the reports: another type, other sizes, another capacity, another layout.
MISMATCHES = {
    "activation type": ({"dtype": torch.bfloat16}, "dtype is 'float32', here 'bfloat16'"),
    "state type": ({"format": "fp32_split"}, "format is 'fp32', here 'fp32_split'"),
    "capacity": ({"capacity": 8}, "capacity is 6, here 8"),
    "restart": ({"restore": "any"}, "restore is 'window', here 'any'"),
    "layers": ({"layers": [1, 5]}, r"layers is \[1, 4\], here \[1, 5\]"),
    "heads": ({"heads": 8}, r"spec\.heads is 4, here 8"),
    "state size": ({"state": 6}, r"spec\.state is 5, here 6"),
    "gate": ({"gate": "log"}, r"spec\.gate is 'softplus', here 'log'"),
}


@pytest.mark.parametrize(("change", "reason"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_refused_by_name(change, reason, rng):
    _, _, snap = published(SPECS["gdn"], rng)
    fields = {f.name for f in dataclasses.fields(SPECS["gdn"])}
    spec = dataclasses.replace(SPECS["gdn"], **{k: v for k, v in change.items() if k in fields})
    options = {"layers": [1, 4], "capacity": 6, "max_window": 3, "page_rows": 2}
    options |= {k: v for k, v in change.items() if k not in fields}
    pool = StatePool(spec, max_sequences=2, **options)
    with Unchanged(pool), pytest.raises(InputError, match=f"snapshot: got one where {reason}; all"):
        pool.import_(snap)


def test_a_layout_of_another_time_is_refused(rng):
    """Of the same sizes: only the version says that the bytes mean something else."""
    rig, seq, snap = published(SPECS["kda"], rng)
    later = SequenceSnapshot(dict(snap.header) | {"layout_version": 2}, snap.tensors)
    with Unchanged(rig.pool), pytest.raises(InputError, match="layout_version is 2, here 1"):
        rig.pool.import_(later)
    copy = rig.pool.import_(snap)
    assert_bitwise_equal(rig.wrapper.materialize(copy), rig.wrapper.materialize(seq))
