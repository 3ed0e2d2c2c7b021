"""Packed prompts of any length, whole and in pieces, against the float64 recurrence."""

import dataclasses

import pytest
import torch

from replayinfer.testing import assert_bitwise_equal, assert_within_budget

from ..pools.kit import check_books, random_int
from ..transfer.rig import CASES, FLOOR, FORMATS, SPECS, Rig, assert_equal_outputs, joined

LENGTHS = (17, 0, 1, 33, 2, 16)  # around a chunk of the reference, around the convolution
GATES = ("near_one", "strong", "extreme")


def prompts(rig, lengths, rng, **options):
    sequences = rig.pool.alloc(len(lengths))
    drawn = [rig.draw(n, **options) for n in lengths]
    return dict(zip(sequences, drawn, strict=True))


def check_pages(rig, sequences):
    """A checkpoint each and no rows; and all of it is given back."""
    check_books(rig.pool)
    assert rig.pool.pages_in_use()["checkpoint pages"] == len(sequences)
    assert rig.pool.pages_in_use()["input pages"] == 0
    assert all(rig.pool.history(seq) == 0 for seq in sequences)
    rig.pool.free(sequences)
    assert not any(rig.pool.pages_in_use().values())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_whole_prompts(spec, format, rng):
    rig = Rig(spec, rng, sequences=6, format=format)
    streams = prompts(rig, LENGTHS, rng)
    rig.check(streams, rig.prefill(streams))
    check_pages(rig, list(streams))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_kind_of_gate(spec, gates, rng):
    rig = Rig(spec, rng, sequences=3, gates=gates)
    streams = prompts(rig, (33, 1, 18), rng, gates=gates)
    rig.check(streams, rig.prefill(streams))


@pytest.mark.parametrize("gate", ["log", "softplus"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_given_gates_norms_and_betas(family, gate, rng):
    spec = dataclasses.replace(SPECS[family], gate=gate, norm="none", beta="sigmoid2", scale=0.3)
    rig = Rig(spec, rng)
    streams = prompts(rig, (20, 3), rng)
    rig.check(streams, rig.prefill(streams))


def test_output_gate(rng):
    """Mamba-2's optional ``z``."""
    rig = Rig(SPECS["mamba2"], rng)
    streams = prompts(rig, (20, 1), rng)
    for stream in streams.values():
        for inputs in stream.inputs.values():
            inputs["z"] = torch.randn(inputs["x"].shape, generator=rng)
    rig.check(streams, rig.prefill(streams))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_narrow_activations(spec, dtype, rng):
    """Computed in float32 from exact inputs; the default output is rounded once, at the end."""
    rig = Rig(spec, rng, dtype=dtype)
    (seq,) = rig.pool.alloc()
    stream = rig.draw(21)
    exact, plain = (rig.reference(stream, t) for t in (torch.float64, torch.float32))
    rig.prefiller.plan([seq], [0, 21])
    for layer in rig.layers:
        inputs, key = stream.inputs[layer], f"y {layer}"
        wide = torch.full((21, spec.heads, spec.dim), torch.nan)
        rig.prefiller.run(layer, out=wide, **inputs)
        assert_within_budget(wide, exact=exact[key], rounded=plain[key], floor=FLOOR)
        y = rig.prefiller.run(layer, **inputs)
        assert_bitwise_equal(y, wide.to(dtype), "rounded once")
        rig.prefiller.conv(layer, stream.rows[layer])
    rig.prefiller.commit()
    for i, layer in enumerate(rig.layers):
        key, state = f"state {layer}", rig.wrapper.materialize(seq)[i]
        assert_within_budget(state, exact=exact[key][-1], rounded=plain[key][-1], floor=FLOOR)
        assert_bitwise_equal(rig.pool.conv_tail(seq)[i].mT, stream.rows[layer][-3:])


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_pieces_of_any_size(spec, format, rng):
    """Three prompts in pieces that do not line up, some of them empty or of one token."""
    rig = Rig(spec, rng, format=format)
    streams = prompts(rig, (40, 19, 7), rng)
    done, got = dict.fromkeys(streams, 0), {seq: [] for seq in streams}
    for turn in range(100):
        sizes = {
            seq: min((0, 1, 2, 5, 17)[random_int(rng, turn % 2, 4)], len(streams[seq]) - done[seq])
            for seq in streams
        }
        parts = {s: streams[s][done[s] : done[s] + n] for s, n in sizes.items()}
        for seq, outputs in rig.prefill(parts).items():
            got[seq].append(outputs)
            done[seq] += sizes[seq]
        if all(done[seq] == len(streams[seq]) for seq in streams):
            break
    rig.check(streams, {seq: joined(outputs) for seq, outputs in got.items()})
    check_pages(rig, list(streams))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bits_do_not_depend_on_who_is_packed_beside(spec, rng):
    """A neighbour full of NaN, an empty one, or none: the same bits."""
    rig = Rig(spec, rng, sequences=4)
    a, b, c, alone = rig.pool.alloc(4)
    stream, other = rig.draw(19), rig.draw(5)
    for inputs in other.inputs.values():
        for x in inputs.values():
            x.fill_(torch.nan)
    packed = rig.begin({a: other, b: stream, c: stream[:0]})
    rig.prefiller.commit()
    by_itself = rig.prefill({alone: stream})
    assert_equal_outputs(packed[b], by_itself[alone])
    states = [rig.wrapper.materialize(seq) for seq in (b, alone, c)]
    assert_bitwise_equal(states[0], states[1], "state")
    assert not states[2].any()


def test_without_a_convolution(rng):
    rig = Rig(dataclasses.replace(SPECS["gdn"], conv_width=0), rng)
    streams = prompts(rig, (18, 1), rng)
    rig.check(streams, rig.prefill(streams))


def test_nothing_to_do(rng):
    rig = Rig(SPECS["kda"], rng)
    rig.prefiller.plan([], [0])
    rig.prefiller.commit()
    (seq,) = rig.pool.alloc()
    rig.prefiller.plan([seq], torch.tensor([0, 0]))  # no layer has to run
    rig.prefiller.commit()
    assert (rig.pool.tokens(seq), rig.pool.history(seq)) == (0, 0)
    assert not rig.wrapper.materialize(seq).any()
    check_pages(rig, [seq])
