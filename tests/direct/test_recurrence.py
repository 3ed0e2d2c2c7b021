"""Direct steps give the recurrence: alone, mixed with replay, and bit for bit where that can be."""

import numpy as np
import pytest
import torch

from replayinfer.testing import assert_bitwise_equal, relative_error

from ..pools.kit import FORMATS, STATE_BOUND, check_books
from ..transfer.rig import CASES, FAMILIES, SPECS, Rig, joined

# As STATE_BOUND, for outputs: a replayed readout of split planes sees the state rounded to bf16.
OUTPUT_BOUND = STATE_BOUND | {"fp32_split": 2**-6}


def walk(rig, streams, modes, rng):
    """Decode all streams to their ends, each step direct or replayed as `modes` says in turn.

    Windows are mixed, empty ones included, and some drafts of replayed steps are rejected. Returns
    the outputs, and by sequence which of its tokens were replayed.
    """
    outputs, replayed = {seq: [] for seq in streams}, {seq: [] for seq in streams}
    done = dict.fromkeys(streams, 0)
    step = 0
    while any(done[seq] < len(stream) for seq, stream in streams.items()):
        direct = modes[step % len(modes)]
        parts, accepted = {}, {}
        for seq, stream in streams.items():
            left = len(stream) - done[seq]
            window, kept = torch.randint(0, 4, (2,), generator=rng).tolist()
            window = min(window, 1 if direct else 3, left)
            parts[seq] = stream[done[seq] : done[seq] + window]
            accepted[seq] = window if direct else min(window, kept)
        results = rig.step(parts, accepted=accepted, direct=direct, width=None)
        check_books(rig.pool)
        for seq, count in accepted.items():
            outputs[seq].append({key: out[:count] for key, out in results[seq].items()})
            replayed[seq] += [] if direct else range(done[seq], done[seq] + count)
            done[seq] += count
        step += 1
    return {seq: joined(parts) for seq, parts in outputs.items()}, replayed


@pytest.mark.parametrize("gates", ["realistic", "near_one", "strong", "extreme"])
@pytest.mark.parametrize(("spec", "format"), CASES)
def test_direct_steps_alone(spec, format, gates, rng):
    """No rows are ever written, and outputs are of the unrounded state in every format."""
    rig = Rig(spec, rng, format=format, gates=gates)
    streams = {seq: rig.draw(12, gates=gates) for seq in rig.pool.alloc(3)}
    outputs, _ = walk(rig, streams, [True], rng)
    rig.check(streams, outputs)
    assert rig.pool.pages_in_use()["input pages"] == 0
    assert [rig.pool.history(seq) for seq in streams] == [0, 0, 0]
    counters = rig.wrapper.counters
    assert counters.direct_steps == counters.steps >= 12
    assert counters.folds == 0


@pytest.mark.parametrize("modes", [(False, True), (True, True, False, False, False)], ids=str)
@pytest.mark.parametrize(("spec", "format"), CASES)
def test_switching_between_direct_and_replay(spec, format, modes, rng):
    rig = Rig(spec, rng, format=format)
    streams = {seq: rig.draw(30) for seq in rig.pool.alloc(3)}
    outputs, replayed = walk(rig, streams, modes, rng)
    assert any(replayed.values())
    rig.check(streams, outputs, decoded=replayed)
    counters = rig.wrapper.counters
    assert 0 < counters.direct_steps < counters.steps
    assert counters.forced_folds


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_direct_is_replay_within_rounding(spec, dtype, format, rng):
    """The same streams through both, from a seeded state."""
    plain = Rig(spec, rng, format=format, dtype=dtype, max_window=1)
    stream = plain.draw(20)
    rigs = [plain, Rig(spec, rng, like=plain, format=format, dtype=dtype, max_window=1)]
    before = plain.draw(9)
    outs, states = [], []
    for rig, direct in zip(rigs, (False, True), strict=True):
        (seq,) = rig.pool.alloc()
        rig.prefill({seq: before})
        steps = [rig.step({seq: stream[t : t + 1]}, direct=direct)[seq] for t in range(20)]
        outs.append(joined(steps))
        states.append(rig.wrapper.materialize(seq))
    assert relative_error(states[1], states[0]) <= STATE_BOUND[format]
    for key, want in outs[0].items():
        bound = 0 if key.startswith("conv") else OUTPUT_BOUND[format]
        assert relative_error(outs[1][key], want) <= bound, key


@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_those_of_a_fold_after_every_token(format, rng):
    """Mamba-2 folds one row by the plain recurrence, so the states have to be equal."""
    rig = Rig(SPECS["mamba2"], rng, format=format, gates="strong")
    twin = Rig(SPECS["mamba2"], rng, like=rig, format=format)
    (a,), (b,) = rig.pool.alloc(), twin.pool.alloc()
    stream = rig.draw(10, gates="strong")
    for t in range(len(stream)):
        rig.step({a: stream[t : t + 1]}, direct=True)
        twin.step({b: stream[t : t + 1]})
        twin.step({b: stream[:0]}, force_fold=True)
        assert_bitwise_equal(rig.wrapper.materialize(a), twin.wrapper.materialize(b))
    assert_bitwise_equal(rig.pool.conv_tail(a), twin.pool.conv_tail(b))
    assert rig.pool.tokens(a) == twin.pool.tokens(b) == 10


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_bits_do_not_depend_on_who_shares_the_batch(spec, rng):
    crowd = Rig(spec, rng, format="fp32_split")
    alone = Rig(spec, rng, like=crowd, format="fp32_split")
    seqs, (single,) = crowd.pool.alloc(4), alone.pool.alloc()
    stream = crowd.draw(6)
    for t in range(6):
        parts = {seq: crowd.draw(1)[: (t + i) % 2] for i, seq in enumerate(seqs)}
        parts[seqs[2]] = stream[t : t + 1]
        outs = crowd.step(parts, pads=t, direct=True)[seqs[2]]
        for key, out in alone.step({single: stream[t : t + 1]}, pads=0, direct=True)[
            single
        ].items():
            assert_bitwise_equal(outs[key], out, key)
    assert_bitwise_equal(crowd.wrapper.materialize(seqs[2]), alone.wrapper.materialize(single))


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_an_empty_window_changes_nothing(spec, rng):
    """Not even where the sequence has rows: it keeps them, and what a rollback may drop."""
    rig = Rig(spec, rng, restore="any")
    idle, busy = rig.pool.alloc(2)
    stream = rig.draw(4)
    rig.step({idle: stream[:3], busy: rig.draw(2)})
    slot = rig.pool.cursors.one(idle)
    page, table = rig.pool.cursors.checkpoint[slot], rig.pool.cursors.table[slot].copy()
    state = rig.wrapper.materialize(idle)
    for _ in range(3):
        rig.step({idle: stream[:0], busy: rig.draw(1)}, direct=True)
    assert rig.pool.history(idle) == 3
    assert rig.pool.cursors.checkpoint[slot] == page
    assert np.array_equal(rig.pool.cursors.table[slot], table)
    assert_bitwise_equal(rig.wrapper.materialize(idle), state)
    rig.pool.rollback(idle, 2)
    outputs = {
        idle: joined([rig.step({idle: stream[1:3]})[idle], rig.step({idle: stream[3:]})[idle]])
    }
    want = rig.reference(stream)
    for layer in rig.layers:
        got = outputs[idle][f"y {layer}"]
        assert relative_error(got, want[f"y {layer}"][1:]) <= STATE_BOUND["fp32"]
