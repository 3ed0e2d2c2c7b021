"""`mamba2_walk`, `mamba2_ring` and `delta_walk` refuse what does not fit before they write."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError, UnsupportedError, delta_walk, mamba2_ring, mamba2_walk

SLOTS, BATCH, WINDOW, HEADS, GROUPS, DIM, STATE, RING = 4, 2, 2, 4, 2, 8, 16, 6


def mamba2(**changes):
    lead = (BATCH, WINDOW)
    return {
        "state": torch.zeros(SLOTS, HEADS, DIM, STATE), "x": torch.ones(*lead, HEADS, DIM),
        "dt": torch.ones(*lead, HEADS), "B": torch.ones(*lead, GROUPS, STATE),
        "C": torch.ones(*lead, GROUPS, STATE), "A": -torch.ones(HEADS),
    } | changes  # fmt: skip


def rings(**changes):
    return mamba2(
        row_x=torch.zeros(SLOTS, HEADS, RING, DIM), row_B=torch.zeros(SLOTS, GROUPS, RING, STATE),
        row_dt=torch.zeros(SLOTS, HEADS, RING), start=torch.zeros(SLOTS, dtype=torch.int32),
        history=torch.zeros(SLOTS, dtype=torch.int32),
    ) | changes  # fmt: skip


def delta(**changes):
    lead = (BATCH, WINDOW)
    return {
        "state": torch.zeros(SLOTS, HEADS, DIM, STATE), "q": torch.ones(*lead, GROUPS, STATE),
        "k": torch.ones(*lead, GROUPS, STATE), "v": torch.ones(*lead, HEADS, DIM),
        "a": torch.ones(*lead, HEADS), "b": torch.ones(*lead, HEADS),
        "A_log": torch.zeros(HEADS), "dt_bias": torch.zeros(HEADS),
    } | changes  # fmt: skip


ints = {"dtype": torch.int64}
REFUSED = {
    "state rank": (mamba2_walk, mamba2(state=torch.zeros(4, 8, 16)), "state: got .*4 dimensions"),
    "state type": (
        mamba2_walk, mamba2(state=torch.zeros(SLOTS, HEADS, DIM, STATE, dtype=torch.float64)),
        "state: got float64",
    ),
    "integers without a scale": (
        mamba2_walk, mamba2(state=torch.zeros(SLOTS, HEADS, DIM, STATE, dtype=torch.int16)),
        "state: got int16",
    ),
    "rows apart": (
        mamba2_walk, mamba2(state=torch.zeros(SLOTS, HEADS, DIM, 2 * STATE)[..., :STATE]),
        "allowed dense values in the last 2 axes",
    ),
    "slots that overlap": (
        mamba2_walk, mamba2(state=torch.zeros(1, HEADS, DIM, STATE).expand(SLOTS, -1, -1, -1)),
        "elements overlap",
    ),
    "groups": (mamba2_walk, mamba2(B=torch.ones(BATCH, WINDOW, 3, STATE)), "B: got 3 groups"),
    "dt": (mamba2_walk, mamba2(dt=torch.ones(BATCH, WINDOW, HEADS, 1)), r"dt: got \[2, 2, 4, 1\]"),
    "weights": (mamba2_walk, mamba2(A=-torch.ones(HEADS, 1)), r"A: got float32 \[4, 1\]"),
    "window": (mamba2_walk, mamba2(window=3), "window: got 3"),
    "packed without a window": (
        mamba2_walk,
        {n: t.flatten(0, 1) if n in ("x", "dt", "B", "C") else t for n, t in mamba2().items()}
        | {"starts": torch.tensor([0, 1, 4])},
        "window: got None",
    ),
    "write": (mamba2_walk, mamba2(write="some"), "write: got 'some'"),
    "each without a target": (mamba2_walk, mamba2(write="each"), "target none"),
    "narrow target": (
        mamba2_walk, mamba2(write="each", target=torch.zeros(BATCH, 1, **ints)),
        "target: got 1 columns; allowed 2",
    ),
    "source": (mamba2_walk, mamba2(source=torch.zeros(3, **ints)), r"source: got int64 \[3, 1\]"),
    "source type": (mamba2_walk, mamba2(source=torch.zeros(BATCH)), "source: got float32"),
    "out": (mamba2_walk, mamba2(out=torch.zeros(1)), r"out: got float32 \[1\]"),
    "entry": (mamba2_walk, mamba2(entry=torch.zeros(3, **ints)), r"entry: got int64 \[3\]"),
    "one scale": (
        mamba2_walk,
        mamba2(
            state=torch.zeros(SLOTS, HEADS, DIM, STATE, dtype=torch.int16),
            scale=torch.ones(SLOTS, HEADS, DIM),
            each=torch.zeros(BATCH, WINDOW, HEADS, DIM, STATE, dtype=torch.int16),
        ),
        "each_scale: got one of",
    ),
    "backend": (mamba2_walk, mamba2(backend="cuda"), "backend: got 'cuda'"),
    "ring length": (
        mamba2_ring, rings(row_B=torch.zeros(SLOTS, GROUPS, RING + 1, STATE)), "row_B: got float32",
    ),
    "ring cursors": (mamba2_ring, rings(start=torch.zeros(SLOTS, **ints)), "start: got int64"),
    "ring too short": (
        mamba2_ring,
        rings(
            row_x=torch.zeros(SLOTS, HEADS, 3, DIM), row_B=torch.zeros(SLOTS, GROUPS, 3, STATE),
            row_dt=torch.zeros(SLOTS, HEADS, 3),
        ),
        "rings of 3 rows for windows of 2",
    ),
    "slot": (mamba2_ring, rings(slot=torch.zeros(BATCH, 1, **ints)), "slot: got int64"),
    "key heads": (
        delta_walk, delta(k=torch.ones(BATCH, WINDOW, 3, STATE)), "k: got 3 key heads beside 2",
    ),
    "gate": (delta_walk, delta(a=torch.ones(BATCH, WINDOW, 3)), r"a: got float32 \[2, 2, 3\]"),
    "delta write": (delta_walk, delta(write="each"), "write: got 'each', target none"),
    "last column": (
        delta_walk, delta(write="all", target=torch.zeros(BATCH, WINDOW).int()),
        f"target: got {WINDOW} columns; allowed {WINDOW + 1} or more",
    ),
    "entries": (
        delta_walk, delta(each=torch.zeros(1, WINDOW, HEADS, DIM, STATE)), "each: got 1 entries",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case):
    call, arguments, message = REFUSED[case]
    state = arguments["state"].clone()
    with pytest.raises((InputError, UnsupportedError), match=message):
        call(**arguments)
    assert torch.equal(arguments["state"], state)


@pytest.mark.parametrize(("call", "arguments"), [(mamba2_walk, mamba2), (delta_walk, delta)])
def test_a_batch_of_none_is_fine(call, arguments):
    given = arguments()
    sizes = (BATCH, WINDOW)
    empty = {n: t[:0] if t.shape[:2] == sizes else t for n, t in given.items()}
    assert call(**empty).shape == (0, WINDOW, HEADS, DIM)
    assert not given["state"].any()


def test_outputs_in_a_type_of_their_own():
    exact = mamba2_walk(**mamba2())
    out = torch.empty(exact.shape, dtype=torch.bfloat16)
    assert mamba2_walk(**mamba2(out=out)) is out
    assert torch.equal(out, exact.bfloat16())
