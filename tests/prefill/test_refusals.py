"""What a prefill does not take, and that it is refused before anything changes."""

import dataclasses

import numpy as np
import pytest
import torch

from replayinfer import (
    InputError,
    PlanError,
    ReplayPrefillWrapper,
    StaleHandleError,
    StatePool,
    UnsupportedError,
)
from replayinfer.testing import assert_untouched, poisoned, snapshot

from ..pools.kit import Unchanged, books
from ..transfer.rig import SPECS, Rig


@pytest.fixture
def rig(rng):
    return Rig(SPECS["gdn"], rng)


BAD_CU = {
    "too short": [0, 3],
    "too long": [0, 1, 2, 3],
    "does not start at 0": [1, 2, 3],
    "negative": [0, -1, 2],
    "falls": [0, 5, 3],
    "falls, unsigned": np.array([0, 5, 3], dtype=np.uint32),
    "floats": [0.0, 1.0, 2.0],
    "bools": [False, True, True],
    "two axes": [[0, 1, 2]],
    "lengths of a tensor": torch.tensor([0, 5, 3]),
}


@pytest.mark.parametrize("cu", BAD_CU.values(), ids=BAD_CU)
def test_bad_cu_seqlens(rig, cu):
    sequences = rig.pool.alloc(2)
    with Unchanged(rig.pool), pytest.raises(InputError, match=r"cu_seqlens: got .*; allowed"):
        rig.prefiller.plan(sequences, cu)
    rig.prefiller.plan(sequences, np.array([0, 0, 2], dtype=np.uint8))  # what is right goes on
    rig.prefiller.abort()


def test_bad_sequences(rig):
    a, b = rig.pool.alloc(2)
    rig.pool.free(b)
    foreign = StatePool(rig.spec, [0], 2).alloc()[0]
    with Unchanged(rig.pool):
        for sequences, error in (
            ([a, a], InputError),
            ([a, b], StaleHandleError),
            ([a, foreign], StaleHandleError),
            ([a, -1], StaleHandleError),
            ([0.5, 1.5], InputError),
        ):
            with pytest.raises(error, match="sequence"):
                rig.prefiller.plan(sequences, [0, 1, 2])


def test_unbound_weights(rng):
    pool = StatePool(SPECS["kda"], [0, 1], 2)
    (seq,) = pool.alloc()
    with Unchanged(pool), pytest.raises(PlanError, match=r"got none for layers \[0, 1\]"):
        ReplayPrefillWrapper(pool).plan([seq], [0, 1])


def test_order(rig, rng):
    (seq,) = rig.pool.alloc()
    part = rig.draw(2)
    calls = {
        "conv": lambda: rig.prefiller.conv(1, part.rows[1]),
        "run": lambda: rig.prefiller.run(1, **part.inputs[1]),
        "commit": rig.prefiller.commit,
        "abort": rig.prefiller.abort,
    }

    def all_refused():
        for name, call in calls.items():
            with pytest.raises(PlanError, match=f"{name}: got no plan; allowed between plan and"):
                call()

    all_refused()
    rig.begin({seq: part})
    plan = rig.prefiller._plan
    with pytest.raises(PlanError, match="got a second prefill before the first"):
        rig.prefiller.plan([seq], [0, 1])
    rig.prefiller.commit()
    all_refused()
    for finish in (rig.prefiller.planner.commit, rig.prefiller.planner.abort):
        with pytest.raises(PlanError, match="got a prefill that is committed; allowed once"):
            finish(plan)
    rig.begin({seq: part})
    plan = rig.prefiller._plan
    rig.prefiller.abort()
    all_refused()
    with pytest.raises(PlanError, match="got a prefill that is aborted; allowed once"):
        rig.prefiller.planner.commit(plan)


def test_bad_inputs(rig, rng):
    """Refused by name, with nothing written; the right ones then run."""
    a, b = rig.pool.alloc(2)
    good = rig.draw(5)
    inputs, rows = good.inputs[1], good.rows[1]
    rig.prefiller.plan([a, b], [0, 2, 5])
    out = torch.zeros(5, 4, 3)
    before = snapshot(books(rig.pool) | {"out": out})
    bad = {
        "q": {"q": inputs["q"][:4]},
        "k": {"k": inputs["k"].double()},
        "v": {"v": inputs["v"].expand(1, 5, 4, 3)},
        "a": {"a": None},
        "b": {"b": torch.zeros(4, 5).mT},
        "inputs: got g": {"g": inputs["a"]},
        r"out: got float64": {"out": out.double()},
        r"out: got .* overlap": {"out": torch.zeros(1, 4, 3).expand(5, 4, 3)},
        r"out: got float32 \[4, 4, 3\]": {"out": out[:4]},
    }
    for name, change in bad.items():
        with pytest.raises(InputError, match=f"^{name}"):
            rig.prefiller.run(1, **({"out": out} | inputs | change))
    with pytest.raises(InputError, match=r"tokens=5.*pack the tokens of all sequences"):
        rig.prefiller.run(1, **(inputs | {"q": inputs["q"][:4]}))
    for x in (rows[:4], rows[:, :31], rows[None], rows.half(), rows.mT.contiguous().mT, None):
        with pytest.raises(InputError, match=r"^x: got"):
            rig.prefiller.conv(1, x)
    for layer in (0, -1, 7, "1", None):
        for call, given in ((rig.prefiller.conv, {"x": rows}), (rig.prefiller.run, inputs)):
            with pytest.raises(InputError, match=r"layer: got .*; allowed .* \[1, 4\]"):
                call(layer, **given)
    assert_untouched(before, books(rig.pool) | {"out": out})
    with pytest.raises(PlanError, match=r"got no run of layers \[1, 4\]"):
        rig.prefiller.commit()
    for layer in rig.layers:
        rig.prefiller.conv(layer, good.rows[layer])
        rig.prefiller.run(layer, **good.inputs[layer])
    rig.prefiller.commit()


def test_convolution_of_a_spec_without_one(rng):
    rig = Rig(dataclasses.replace(SPECS["mamba2"], conv_width=0), rng)
    (seq,) = rig.pool.alloc()
    rig.prefiller.plan([seq], [0, 1])
    with pytest.raises(InputError, match="conv: got a spec with conv_width=0; allowed"):
        rig.prefiller.conv(1, poisoned((1, rig.spec.conv_channels)))


def test_backends(rig):
    assert ReplayPrefillWrapper(rig.pool, backend="torch").backend.name == "torch"
    assert ReplayPrefillWrapper(rig.pool).backend.name == "torch"  # on a CPU
    with pytest.raises(UnsupportedError, match="got 'triton'; allowed auto, fla, mamba_ssm, torch"):
        ReplayPrefillWrapper(rig.pool, backend="triton")
    for peer in ("fla", "mamba_ssm"):
        with pytest.raises(UnsupportedError, match=rf"'{peer}'.*refused: {peer} \(device cpu"):
            ReplayPrefillWrapper(rig.pool, backend=peer)

    class Refuses:
        name = "picky"

        def supports(self, pool):
            return "no family that starts with g"

    with pytest.raises(UnsupportedError, match=r"'picky'.*no family that starts with g"):
        ReplayPrefillWrapper(rig.pool, backend=Refuses())
