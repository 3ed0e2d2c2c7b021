"""Prefills that continue sequences: with rows, after folds, between decode steps, beside forks."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from replayinfer.testing import (
    assert_bitwise_equal,
    assert_within_budget,
    conv_inputs,
    initial_states,
    recurrence,
)

from ..backends.world import poison_dead
from ..pools.kit import check_books, random_int
from ..transfer.rig import CASES, FLOOR, SPECS, Rig, assert_equal_outputs, assert_same, join, joined


@pytest.mark.parametrize(("spec", "format"), CASES)
@pytest.mark.parametrize("policy", ["full", "spread"])
def test_prefills_and_decode_steps_in_any_order(spec, format, policy, rng):
    """Every turn some sequences take a piece and the others a window with rejected drafts."""
    rig = Rig(spec, rng, format=format, policy=policy)
    streams = {seq: rig.draw(24) for seq in rig.pool.alloc(2)}
    done, got = dict.fromkeys(streams, 0), {seq: [] for seq in streams}
    decoded = {seq: torch.zeros(24, dtype=torch.bool) for seq in streams}

    def take(seq, outputs, count, by_step):
        got[seq].append({key: y[:count] for key, y in outputs.items()})
        decoded[seq][done[seq] : done[seq] + count] = by_step
        done[seq] += count

    for turn in range(100):
        pieces, windows, accepted = {}, {}, {}
        for i, (seq, stream) in enumerate(streams.items()):
            at, left = done[seq], 24 - done[seq]
            if (turn + i) % 3 == 2:
                pieces[seq] = stream[at : at + min((1, 2, 7, 18)[random_int(rng, 0, 3)], left)]
            else:
                accepted[seq] = min(random_int(rng, int(turn < 2), 3), left)
                junk = rig.draw(random_int(rng, 0, 3 - accepted[seq]), gates="strong")
                windows[seq] = join([stream[at : at + accepted[seq]], junk])
        if windows:
            for seq, outputs in rig.step(windows, accepted=accepted).items():
                take(seq, outputs, accepted[seq], by_step=True)
        if pieces:
            for seq, outputs in rig.prefill(pieces).items():
                assert rig.pool.history(seq) == 0 or not len(pieces[seq])
                take(seq, outputs, len(pieces[seq]), by_step=False)
        check_books(rig.pool)
        if min(done.values()) == 24:
            break
    outputs = {seq: joined(outs) for seq, outs in got.items()}
    rig.check(streams, outputs, decoded=decoded)
    assert any(rows.any() for rows in decoded.values())
    assert not all(rows.all() for rows in decoded.values())
    rig.pool.free(list(streams))
    assert not any(rig.pool.pages_in_use().values())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_prefill_of_one_token_is_a_prefill(spec, rng):
    """Because the caller says so: it ends as a checkpoint, where a decoded token is a row."""
    rig = Rig(spec, rng)
    prefilled, decoded = rig.pool.alloc(2)
    stream = rig.draw(4)
    a = joined([rig.prefill({prefilled: stream[t : t + 1]})[prefilled] for t in range(4)])
    b = rig.decode(decoded, stream)
    tables = rig.pool.cursors.table[[rig.pool.cursors.peek(s) for s in (prefilled, decoded)]]
    assert [rig.pool.history(s) for s in (prefilled, decoded)] == [0, 4]
    assert (tables >= 0).sum(1).tolist() == [0, 2]
    rig.check({prefilled: stream, decoded: stream}, {prefilled: a, decoded: b})


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_of_pieces_shorter_than_its_taps(width, activation, rng):
    """Bit for bit the whole's, whatever the pieces; the decode after them sees the same rows."""
    spec = dataclasses.replace(SPECS["gdn"], conv_width=width, conv_activation=activation)
    rig = Rig(spec, rng)
    whole, pieces = rig.pool.alloc(2)
    stream, after = rig.draw(12), rig.draw(7)
    want = rig.prefill({whole: stream})[whole]
    cuts = [0, 1, 2, 2, 4, 5, 6, 8, 9, 12]
    parts = [stream[a:b] for a, b in itertools.pairwise(cuts)]
    got = joined([rig.prefill({pieces: part})[pieces] for part in parts])
    for layer in rig.layers:
        assert_bitwise_equal(got[f"conv {layer}"], want[f"conv {layer}"])
    assert_bitwise_equal(rig.pool.conv_tail(pieces), rig.pool.conv_tail(whole))
    a, b = (rig.decode(seq, after, window=2) for seq in (whole, pieces))
    for layer in rig.layers:
        assert_bitwise_equal(a[f"conv {layer}"], b[f"conv {layer}"])
    rig.check({whole: join([stream, after])}, {whole: joined([want, a])})


@pytest.mark.parametrize("tokens", [0, 9])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_seeded_state_is_continued(spec, tokens, rng):
    """Also one that was seeded at token 0, whose state need not be zero."""
    rig = Rig(spec, rng, sequences=5)
    (seq,) = rig.pool.alloc()
    states = dict(zip(rig.layers, initial_states(spec, 2, rng), strict=True))
    rows = [conv_inputs(spec, 3, 1, torch.float32, rng)[0].mT.contiguous() for _ in rig.layers]
    tails = dict(zip(rig.layers, rows, strict=True))
    rig.pool.seed(seq, states, tokens=tokens, conv=tails)
    (child,) = rig.pool.fork(seq)
    stream = rig.draw(5)
    rig.begin({seq: stream, child: stream})
    rig.prefiller.abort()
    for s in (seq, child):
        assert_bitwise_equal(rig.wrapper.materialize(s), torch.stack(list(states.values())))
    copy, gone = (rig.pool.import_(rig.pool.export(seq)) for _ in range(2))
    (orphan,) = rig.pool.fork(gone)
    rig.pool.free(gone)  # now the orphan alone holds the page
    outputs = rig.prefill(dict.fromkeys((seq, child, copy, orphan), stream))
    for layer in rig.layers:
        arguments = (spec, states[layer], stream.inputs[layer], rig.weights[layer])
        (exact, _), (plain, _) = recurrence(*arguments), recurrence(*arguments, torch.float32)
        y = outputs[seq][f"y {layer}"]
        assert_within_budget(y, exact=exact, rounded=plain, floor=FLOOR)
    for other in (child, copy, orphan):
        assert_equal_outputs(outputs[other], outputs[seq])
        assert_same(rig, other, rig, seq)
        assert rig.pool.tokens(other) == tokens + 5


@pytest.mark.parametrize("history", [0, 4, 9])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_prefill_of_a_fork_leaves_its_siblings_alone(spec, history, rng):
    """Shared checkpoint, shared full pages and a copied partial one; fresh ones too."""
    rig = Rig(spec, rng, layers=(4,))
    twin = Rig(spec, rng, like=rig, layers=(4,))
    before, piece, after = (rig.draw(n) for n in (history, 6, 8))
    (parent,), (lone,) = rig.pool.alloc(), twin.pool.alloc()
    if history:
        rig.decode(parent, before, window=3)
        twin.decode(lone, before, window=3)
    one, two = rig.pool.fork(parent, 2)
    rig.prefill({one: piece})
    check_books(rig.pool)
    for seq in (parent, two):
        assert_same(rig, seq, twin, lone)
    got = rig.prefill({parent: piece})[parent]  # now the parent, beside the child that did not
    assert_same(rig, parent, rig, one)
    assert_same(rig, two, twin, lone)
    want = twin.prefill({lone: piece})[lone]
    assert_equal_outputs(got, want)
    assert_equal_outputs(rig.decode(one, after, window=2), twin.decode(lone, after, window=2))
    rig.pool.free([parent, one, two])
    assert not any(rig.pool.pages_in_use().values())


def test_rows_of_the_prompt_cannot_be_rolled_back(rng):
    """A prefill ends as a checkpoint; what was committed before it is part of that."""
    rig = Rig(SPECS["gdn"], rng, restore="any")
    (seq,) = rig.pool.alloc()
    stream = rig.draw(9)
    rig.decode(seq, stream[:2])
    rig.prefill({seq: stream[2:5]})
    with pytest.raises(ValueError, match=r"rows: got 1 to drop; allowed 0\.\.0"):
        rig.pool.rollback(seq, 1)
    rig.decode(seq, stream[5:])
    rig.pool.rollback(seq, 4)
    outputs = rig.decode(seq, stream[5:])
    exact, plain = rig.reference(stream), rig.reference(stream, torch.float32)
    for layer in rig.layers:
        key = f"y {layer}"
        assert_within_budget(
            outputs[key], exact=exact[key][5:], rounded=plain[key][5:], floor=FLOOR
        )


def test_two_prefillers_and_a_decoder_at_once(rng):
    """Plans over different sequences of one pool do not meet."""
    rig = Rig(SPECS["mamba2"], rng)
    other = Rig(SPECS["mamba2"], rng, like=rig)
    other.pool.free(other.pool.alloc(2))
    streams = [rig.draw(5) for _ in range(3)]
    a, b, c = rig.pool.alloc(3)
    outputs = rig.begin({a: streams[0]})
    second = type(rig.prefiller)(rig.pool)
    second.plan([b], np.array([0, 5]))
    outputs |= rig.start({c: streams[2][:3]})
    for layer in rig.layers:
        second.conv(layer, streams[1].rows[layer])
        second.run(layer, **streams[1].inputs[layer])
    second.commit()
    rig.wrapper.commit()
    rig.prefiller.commit()
    poison_dead(rig.pool)
    x, y, z = other.pool.alloc(3)
    want = other.prefill({x: streams[0], y: streams[1]}) | other.step({z: streams[2][:3]})
    for seq, twin in zip((a, c), (x, z), strict=True):
        assert_equal_outputs(outputs[seq], want[twin])
    for seq, twin in zip((a, b, c), (x, y, z), strict=True):
        assert_same(rig, seq, other, twin)
