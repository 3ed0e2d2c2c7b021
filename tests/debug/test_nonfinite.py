"""A sequence whose state turns non-finite is named, and can be dropped without the others."""

import dataclasses

import numpy as np
import pytest
import torch

from replayinfer import NonFiniteStateError, ReplayDecodeWrapper

from ..pools.kit import check_books
from ..transfer.rig import CASES, FAMILIES, LAYERS, SPECS, Rig, assert_equal_outputs, assert_same

FIELDS = [(n, f.name) for n, s in FAMILIES.items() for f in s.input_fields if not f.optional]


def spoiled(stream, layer, name, token, value):
    """The stream with one value in one head or channel of one token."""
    inputs = {n: {k: x.clone() for k, x in named.items()} for n, named in stream.inputs.items()}
    inputs[layer][name][token].view(-1)[-1] = value
    return dataclasses.replace(stream, inputs=inputs)


@pytest.mark.parametrize(("family", "name"), FIELDS)
def test_a_nan_input_names_its_sequence(family, name, checked_rig, rng):
    """Also in a step that folds; then the others go on as if it had never been there."""
    spec, layer = SPECS[family], LAYERS[len(name) % 2]
    rig = checked_rig(spec, rng)
    twin = Rig(spec, rng, like=rig)
    seqs, twins = rig.pool.alloc(3), twin.pool.alloc(3)
    streams = [rig.draw(11) for _ in seqs]
    done, broken = [0, 0, 0], seqs[1]
    for step, windows in enumerate(([3, 3, 1], [2, 3, 3], [3, 1, 3])):
        parts = [s[a : a + n] for s, a, n in zip(streams, done, windows, strict=True)]
        if step == 2:  # which folds all of them first
            bad = spoiled(parts[1], layer, name, 0, torch.nan)
            with pytest.raises(NonFiniteStateError, match=f"output of layer {layer} .*") as error:
                rig.start(dict(zip(seqs, [parts[0], bad, parts[2]], strict=True)))
            assert error.value.sequences == [broken]
            assert f"sequences [{broken}]" in str(error.value)
            rig.wrapper.abort()
            rig.pool.free(broken)
            check_books(rig.pool)
        mine = {s: p for s, p in zip(seqs, parts, strict=True) if is_live(rig, s)}
        got = rig.step(mine)
        want = twin.step(dict(zip(twins, parts, strict=True)))
        for s in mine:
            assert_equal_outputs(got[s], want[twins[seqs.index(s)]])
        done = [a + n for a, n in zip(done, windows, strict=True)]
    assert broken not in mine
    (fresh,), (other,) = rig.pool.alloc(), twin.pool.alloc()  # in what it left
    mine, theirs = [seqs[0], seqs[2], fresh], [twins[0], twins[2], other]
    for part in (rig.draw(3), rig.draw(2), rig.draw(3)):
        got, want = rig.step(dict.fromkeys(mine, part)), twin.step(dict.fromkeys(theirs, part))
        for s, t in zip(mine, theirs, strict=True):
            assert_equal_outputs(got[s], want[t])
    for s, t in zip(mine, theirs, strict=True):
        assert_same(rig, s, twin, t)


def is_live(rig, seq):
    return seq in rig.pool.cursors.handles(rig.pool.cursors.live)


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_without_checks_it_goes_unnoticed(spec, rng):
    """What the checks are for."""
    rig = Rig(spec, rng)
    a, b = rig.pool.alloc(2)
    name = "x" if spec.family == "mamba2" else "v"
    bad = spoiled(rig.draw(2), 1, name, 0, torch.nan)
    with pytest.raises(AssertionError, match="poison"):  # of the rig, not of the library
        rig.start({a: bad, b: rig.draw(2)})
    rig.wrapper.run(4, **{k: torch.stack([x, x, x]) for k, x in bad.inputs[4].items()})
    assert rig.wrapper.commit().tolist() == [2, 2]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("spec", "format"), CASES)
def test_a_state_that_was_broken_before_is_named_by_its_fold(spec, format, value, checked_rig, rng):
    """Rows that got in while nobody looked, in one layer; all sequences fold, one is named."""
    rig = checked_rig(spec, rng, format=format)
    twin = Rig(spec, rng, like=rig, format=format)
    seqs, twins = rig.pool.alloc(3), twin.pool.alloc(3)
    parts = [rig.draw(2) for _ in seqs]
    rig.step(dict(zip(seqs, parts, strict=True)))
    twin.step(dict(zip(twins, parts, strict=True)))
    slot = rig.pool.cursors.peek(seqs[2])
    page = int(rig.pool.cursors.table[slot, 0])
    field = "x" if spec.family == "mamba2" else ("v" if "v" in rig.pool.inputs.fields else "u")
    rig.pool.inputs.fields[field][1, page, 1, 0, 0] = value
    rig.wrapper.plan(seqs, 1, force_fold=np.array([True, True, True]))
    with pytest.raises(NonFiniteStateError, match="fold: got a state that is not finite") as error:
        rig.wrapper.fold()
    assert error.value.sequences == [seqs[2]]
    rig.wrapper.abort()
    rig.pool.free(seqs[2])
    check_books(rig.pool)
    twin.step({t: p[:0] for t, p in zip(twins, parts, strict=True)}, force_fold=np.full(3, True))
    rest = rig.draw(7)
    for s, t in zip(seqs[:2], twins[:2], strict=True):
        assert_same(rig, s, twin, t)
        assert_equal_outputs(rig.decode(s, rest, window=3), twin.decode(t, rest, window=3))


def test_a_state_that_overflows_behind_finite_outputs(checked_rig, rng):
    """A key at right angles to the query hides it from every readout until the fold."""
    spec = dataclasses.replace(SPECS["gdn"], conv_width=0, norm="none", beta="given")
    rig = checked_rig(spec, rng)
    a, b = rig.pool.alloc(2)
    part = rig.draw(1)
    huge = rig.draw(1)
    for named in huge.inputs.values():
        named["q"], named["k"] = (torch.zeros_like(named["q"]) for _ in range(2))
        named["q"][..., 0], named["k"][..., 1] = 1.0, 1e19
        named["v"], named["b"] = torch.full_like(named["v"], 1e30), torch.ones_like(named["b"])
    out = rig.step({a: part, b: huge})
    assert all(torch.isfinite(y).all() for y in out[b].values())
    rig.wrapper.plan([a, b], 0, force_fold=np.array([True, True]))
    with pytest.raises(NonFiniteStateError) as error:
        rig.wrapper.fold()
    assert error.value.sequences == [b]
    rig.wrapper.abort()
    rig.pool.free(b)
    rig.step({a: part})


def test_several_are_all_named_and_pads_never(checked_rig, rng):
    spec = SPECS["kda"]
    rig = checked_rig(spec, rng)
    seqs = rig.pool.alloc(4)
    parts = [rig.draw(n) for n in (2, 0, 1, 3)]
    for i in (0, 3):
        parts[i] = spoiled(parts[i], 1, "k", len(parts[i]) - 1, torch.nan)
    with pytest.raises(NonFiniteStateError) as error:
        rig.start(dict(zip(seqs, parts, strict=True)), pads=3)
    assert error.value.sequences == [seqs[0], seqs[3]]
    rig.wrapper.abort()
    with pytest.raises(NonFiniteStateError) as error:  # the wrapper of its own reads the variable
        rig.start({seqs[3]: parts[3]})
    assert error.value.sequences == [seqs[3]]
    rig.wrapper.abort()
    unchecked = ReplayDecodeWrapper(rig.pool)
    unchecked.plan(seqs)
    unchecked.abort()
