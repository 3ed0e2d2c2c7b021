"""A snapshot of a sequence continues with the same bits in another pool of that description."""

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, PlanError, StaleHandleError, materialize
from replayinfer.testing import assert_bitwise_equal, poison_

from ..pools.kit import Unchanged, check_books, memory
from .rig import CASES, FAMILIES, FORMATS, SPECS, Rig, assert_equal_outputs, assert_same

HISTORIES = (0, 5, 8)  # as many rows after the checkpoint, or 2 with a capacity of 6


def grown(rig, tokens, rng):
    (seq,) = rig.pool.alloc()
    stream = rig.draw(tokens)
    if tokens:
        rig.decode(seq, stream, window=1)
    return seq


def used_pool(spec, rng, **options):
    """A pool all of whose pages were used before, were freed out of order and hold NaN."""
    rig = Rig(spec, rng, **options)
    sequences = rig.pool.alloc(4)
    rig.step(dict.fromkeys(sequences, rig.draw(3)))
    rig.pool.free([sequences[i] for i in (2, 0, 3)])
    kept = rig.pool.export(sequences[1])
    rig.pool.free(sequences[1])
    for tensor in memory(rig.pool).values():
        poison_(tensor)
    rig.pool.import_(kept)  # a neighbour, so that ids do not begin at 0
    return rig


@pytest.mark.parametrize("tokens", HISTORIES)
@pytest.mark.parametrize(("spec", "format"), CASES)
def test_it_continues_with_the_same_bits(spec, format, tokens, rng):
    """With other page sizes, other page ids and another largest window."""
    rig = Rig(spec, rng, format=format)
    seq = grown(rig, tokens, rng)
    other = used_pool(spec, rng, like=rig, format=format, page_rows=(4, 1)[tokens % 2],
                      max_window=5, sequences=5)  # fmt: skip
    snap = rig.pool.export(seq)
    assert (snap.tokens, snap.header["history"]) == (tokens, rig.pool.history(seq))
    assert snap.nbytes == sum(t.numel() * t.element_size() for t in snap.tensors.values())
    copy = other.pool.import_(snap)
    check_books(other.pool)
    assert_same(rig, seq, other, copy)
    stream = rig.draw(8)
    for size, part in ((1, stream[:2]), (3, stream[2:])):
        want = rig.decode(seq, part, window=size)
        assert_equal_outputs(other.decode(copy, part, window=size), want)
    assert_same(rig, seq, other, copy)
    (child,) = other.pool.fork(copy)
    piece = rig.draw(5)
    assert_equal_outputs(other.prefill({child: piece})[child], rig.prefill({seq: piece})[seq])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_narrow_rows(spec, dtype, rng):
    rig = Rig(spec, rng, dtype=dtype, format="fp32_split")
    other = used_pool(spec, rng, like=rig, dtype=dtype, format="fp32_split")
    seq = grown(rig, 4, rng)
    copy = other.pool.import_(rig.pool.export(seq))
    stream = rig.draw(5)
    assert_equal_outputs(other.decode(copy, stream), rig.decode(seq, stream))
    assert_same(rig, seq, other, copy)


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_every_row_can_still_be_taken_back(spec, rng):
    """``restore="any"`` exports the older convolution rows, too."""
    options = {"restore": "any", "layers": (4,)}
    rig = Rig(spec, rng, **options)
    other = used_pool(spec, rng, like=rig, page_rows=4, **options)
    seq = grown(rig, 11, rng)
    stream = rig.draw(3)
    snap = rig.pool.export(seq)
    for rows in range(rig.pool.history(seq) + 1):
        copy = other.pool.import_(snap)
        (child,) = rig.pool.fork(seq)
        other.pool.rollback(copy, rows)
        rig.pool.rollback(child, rows)
        assert_same(rig, child, other, copy)
        assert_equal_outputs(other.decode(copy, stream), rig.decode(child, stream))
        assert_same(rig, child, other, copy)
        other.pool.free(copy)
        rig.pool.free(child)


def test_without_the_rows_for_it_nothing_can_be_taken_back(rng):
    rig = Rig(SPECS["mamba2"], rng)
    seq = grown(rig, 2, rng)
    copy = rig.pool.import_(rig.pool.export(seq))
    rig.pool.rollback(seq, 1)
    with pytest.raises(ValueError, match=r"rows: got 1 to drop; allowed 0\.\.0 of 2"):
        rig.pool.rollback(copy, 1)


def test_an_export_changes_nothing_and_is_a_copy(rng):
    rig = Rig(SPECS["gdn"], rng, format="fp32_split")
    seq = grown(rig, 4, rng)
    (child,) = rig.pool.fork(seq)  # shared pages are read as they are
    with Unchanged(rig.pool):
        snap = rig.pool.export(seq)
        twin = rig.pool.export(child)
    held = {name: t.clone() for name, t in snap.tensors.items()}
    for name, tensor in held.items():
        assert_bitwise_equal(twin.tensors[name], tensor, name)
    rig.decode(seq, rig.draw(9), window=3)
    rig.pool.free([seq, child])
    for tensor in memory(rig.pool).values():
        poison_(tensor)
    for name, tensor in snap.tensors.items():
        assert_bitwise_equal(tensor, held[name], name)
        assert tensor.device.type == "cpu"
    first, second = (rig.pool.import_(snap) for _ in range(2))  # as often as one likes
    stream = rig.draw(4)
    assert_equal_outputs(rig.decode(first, stream), rig.decode(second, stream))


def test_any_bits_of_a_state_come_through(rng):
    """The planes are stored bits, also those of NaN, infinities and negative zero."""
    for format in FORMATS:
        rig = Rig(SPECS["mamba2"], rng, format=format, layers=(4,))
        (seq,) = rig.pool.alloc()
        state = torch.randn(rig.spec.state_shape, generator=rng)
        state.view(-1)[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38])
        rig.pool.seed(seq, {4: state}, tokens=1, conv={4: torch.zeros(rig.spec.conv_channels, 3)})
        copy = rig.pool.import_(rig.pool.export(seq))
        pages = rig.pool.cursors.checkpoint[[rig.pool.cursors.peek(s) for s in (seq, copy)]]
        assert pages[0] != pages[1]
        assert_bitwise_equal(*(rig.pool.checkpoints.storage[:, p] for p in pages.tolist()))


def test_refusals(rng):
    rig = Rig(SPECS["kda"], rng, sequences=2, checkpoint_pages=3, input_pages=4)
    seq = grown(rig, 5, rng)
    snap = rig.pool.export(seq)
    rig.start({seq: rig.draw(1)})
    with Unchanged(rig.pool), pytest.raises(PlanError, match="which a plan holds"):
        rig.pool.export(seq)
    rig.wrapper.abort()
    with (
        Unchanged(rig.pool),
        pytest.raises(CapacityError, match=r"input pages: got a need of 3; allowed 1 \(free"),
    ):
        rig.pool.import_(snap)
    rig.step({seq: rig.draw(0)}, force_fold=np.array([True]))
    small = rig.pool.export(seq)
    (child,) = rig.pool.fork(seq)
    with Unchanged(rig.pool), pytest.raises(CapacityError, match="sequence slots"):
        rig.pool.import_(small)
    rig.pool.free(child)
    rig.pool.checkpoint_ids.take(2)
    with Unchanged(rig.pool), pytest.raises(CapacityError, match="checkpoint pages"):
        rig.pool.import_(small)
    rig.pool.free(seq)
    with pytest.raises(StaleHandleError, match="was freed"):
        rig.pool.export(seq)
    copy = rig.pool.import_(small)
    assert_bitwise_equal(materialize(rig.pool, copy), rig.pool.checkpoints.load(
        slice(None), torch.tensor([int(rig.pool.cursors.checkpoint[rig.pool.cursors.peek(copy)])])
    )[:, 0])  # fmt: skip
