"""REPLAYINFER_CHECK around direct steps: clean ones pass, others are found before they write."""

import numpy as np
import pytest
import torch

from replayinfer import CheckError, NonFiniteStateError
from replayinfer.debug import check_plan
from replayinfer.testing import assert_bitwise_equal

from ..pools.kit import check_books
from ..transfer.rig import CASES, LAYERS, SPECS, Rig


@pytest.fixture
def checked(monkeypatch):
    """Makes rigs whose pools and wrappers were made with the checks on."""

    def make(*args, **options):
        with monkeypatch.context() as patch:
            patch.setenv("REPLAYINFER_CHECK", "1")
            return Rig(*args, **options)

    return make


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_clean_runs_are_unchecked_runs(spec, format, checked, rng):
    plain = Rig(spec, rng, format=format)
    rigs = [checked(spec, rng, like=plain, format=format), plain]
    names = [rig.pool.alloc(2) for rig in rigs]
    for seqs, rig in zip(names, rigs, strict=True):
        seqs += rig.pool.fork(seqs[0])
    for direct in (True, True, False, False, True):
        parts = [plain.draw(1), plain.draw(1)[:0], plain.draw(1)]
        outs = [
            rig.step(dict(zip(seqs, parts, strict=True)), direct=direct)
            for seqs, rig in zip(names, rigs, strict=True)
        ]
        for a, b in zip(*names, strict=True):
            for key, out in outs[0][a].items():
                assert_bitwise_equal(out, outs[1][b][key], key)
    check_books(rigs[0].pool)
    assert rigs[0].wrapper.counters == rigs[1].wrapper.counters


FAULTS = {
    "a page that somebody else holds": (
        lambda rig, plan: plan.pages.__setitem__(0, rig.pool.cursors.checkpoint[2]),
        "checkpoint page is written that another sequence holds",
    ),
    "one page for two": (
        lambda rig, plan: plan.pages.__setitem__(0, plan.pages[1]),
        "one checkpoint page is written for two",
    ),
    "a free page": (
        lambda rig, plan: plan.pages.__setitem__(
            0, np.flatnonzero(rig.pool.checkpoint_ids.refs == 0)[0]
        ),
        "checkpoint page is written that another sequence holds",
    ),
    "another sequence's page": (
        lambda rig, plan: plan.pages.__setitem__(0, rig.pool.cursors.checkpoint[4]),
        "checkpoint page is written that is another sequence's",
    ),
    "rows before it": (
        lambda rig, plan: plan.starts.__setitem__(1, 2),
        "a direct step has rows before it",
    ),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
def test_tampered_plans(fault, message, checked, rng):
    """Sequences 0 and 1 step; 2 and 3 share a page; 4 has one of its own."""
    rig = checked(SPECS["gdn"], rng, sequences=5)
    a, b, c = rig.pool.alloc(3)
    rig.pool.fork(c)
    rig.pool.alloc()
    plan = rig.wrapper.plan([a, b], direct=True)
    fault(rig, plan)
    with pytest.raises(CheckError, match=message):
        check_plan(rig.pool, plan)


@pytest.mark.parametrize("format", ["fp32", "fp32_split", "bf16"])
def test_a_state_that_is_not_finite(format, checked, rng):
    """It is named at its layer, the step can be finished, and the others are not affected."""
    rig = checked(SPECS["mamba2"], rng, format=format)
    twin = Rig(SPECS["mamba2"], rng, like=rig, format=format)
    bad, good = rig.pool.alloc(2)
    (want,) = twin.pool.alloc()
    part, poor = rig.draw(1), rig.draw(1)
    twin.step({want: part}, direct=True)
    rig.wrapper.plan([bad, good], direct=True)
    rig.wrapper.fold()
    for layer in LAYERS:
        rig.wrapper.conv(layer, torch.stack([poor.rows[layer], part.rows[layer]]))
        names = part.inputs[layer]
        inputs = {n: torch.stack([poor.inputs[layer][n], part.inputs[layer][n]]) for n in names}
        if layer == LAYERS[1]:
            rig.wrapper.run(layer, **inputs)
            continue
        inputs["B"][0, 0, 0, 0] = torch.inf
        with pytest.raises(
            NonFiniteStateError, match=rf"state of layer {layer}.*commit and"
        ) as error:
            rig.wrapper.run(layer, **inputs)
        assert error.value.sequences == [bad]
    rig.wrapper.commit()
    rig.pool.free(bad)
    assert_bitwise_equal(rig.wrapper.materialize(good), twin.wrapper.materialize(want))
