"""Who may write what: rejected rows leave no trace, readouts read, folds touch their pages."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from replayinfer import ReplayDecodeWrapper, StatePool
from replayinfer.formats import to_storage
from replayinfer.testing import (
    assert_bitwise_equal,
    assert_untouched,
    conv_inputs,
    layer_inputs,
    layer_weights,
    snapshot,
)

from .world import BASES, LAYER, World, poison_dead, vary

FORMATS = ["fp32", "fp32_split"]
L, T = 6, 3


def tensors(pool: StatePool) -> dict[str, torch.Tensor]:
    """Everything on the device that a step may write."""
    named = {"checkpoints": pool.checkpoints.storage, "conv": pool.conv.rows}
    return named | {f"row.{name}": field for name, field in pool.inputs.fields.items()}


def held_rows(pool: StatePool, sequence: int) -> dict[str, torch.Tensor]:
    """The committed rows of a sequence, by field: ``[layers, history, ...]``."""
    row = np.arange(pool.history(sequence))
    page = pool.cursors.table[pool.cursors.peek(sequence)][row // pool.sizes.page_rows]
    return {name: f[:, page, row % pool.sizes.page_rows] for name, f in pool.inputs.fields.items()}


class Side:
    """A pool whose sequences stand at every fill level, one for each accepted count."""

    def __init__(self, case, inputs, rows, weights):
        spec = dataclasses.replace(case.spec, conv_width=4)
        self.inputs, self.rows = inputs, rows
        self.levels = list(itertools.product(range(L + 1), range(T + 1)))
        n = len(self.levels)
        self.pool = StatePool(
            spec, [LAYER], n, capacity=L, max_window=T, format=case.format, page_rows=4
        )
        self.pool.bind(LAYER, **weights)
        self.wrapper = ReplayDecodeWrapper(self.pool)
        self.sequences = self.pool.alloc(n)
        self.place = np.zeros(n, dtype=np.int64)

    def step(self, windows, accepted, *, junk=0.0):
        """Each sequence takes `accepted` tokens of its stream; the rest of its window is junk."""
        windows, accepted = np.asarray(windows), np.asarray(accepted)
        self.wrapper.plan(self.sequences, windows, window=T)
        self.wrapper.fold()
        index = torch.from_numpy(self.place[:, None] + np.arange(T))
        real = torch.from_numpy(np.arange(T) < accepted[:, None])

        def pick(stream):
            x = stream[torch.arange(len(index))[:, None], index]
            return torch.where(real.view(*real.shape, *(1,) * (x.dim() - 2)), x, junk + 1)

        self.wrapper.conv(LAYER, pick(self.rows))
        y = self.wrapper.run(LAYER, **{name: pick(stream) for name, stream in self.inputs.items()})
        self.wrapper.commit(accepted)
        self.place += accepted
        poison_dead(self.pool)
        return torch.where(real[..., None, None], y, 0.0)

    def fill(self):
        """Bring every sequence to its level, one row at a time."""
        levels = np.array([level for level, _ in self.levels])
        for row in range(L):
            one = (row < levels).astype(int)
            self.step(one, one)
        assert (self.pool.cursors.history == levels).all()


@pytest.mark.parametrize("case", vary(BASES, format=FORMATS), ids=str)
def test_rejected_rows_leave_no_trace(case, rng):
    """A window of T of which a are accepted leaves what a window of just those a leaves."""
    spec = dataclasses.replace(case.spec, conv_width=4)
    n = (L + 1) * (T + 1)
    inputs = layer_inputs(spec, L + 3 * T, n, torch.float32, rng)
    rows = conv_inputs(spec, L + 3 * T, n, torch.float32, rng)
    weights = layer_weights(spec, rng)
    verified, plain = (Side(case, inputs, rows, weights) for _ in range(2))
    accepted = np.array([a for _, a in plain.levels])
    for side in (verified, plain):
        side.fill()
    # Both fold at the same places: before the window of T. A fold earlier would round elsewhere.
    fold = np.array([level + T > L for level, _ in plain.levels])
    plain.wrapper.plan(plain.sequences, np.zeros(n, dtype=int), force_fold=fold)
    plain.wrapper.fold()
    plain.wrapper.commit()
    got = verified.step(np.full(n, T), accepted, junk=9.0)
    want = plain.step(accepted, accepted)
    assert verified.wrapper.counters.rows_rejected == (T - accepted).sum()

    def compare():
        for name in ("base", "history"):
            a, b = (getattr(side.pool.cursors, name) for side in (verified, plain))
            assert (a == b).all(), name
        for a, b in zip(verified.sequences, plain.sequences, strict=True):
            state = plain.wrapper.materialize(b)
            assert_bitwise_equal(verified.wrapper.materialize(a), state, "state")
            tail = plain.pool.conv_tail(b)
            assert_bitwise_equal(verified.pool.conv_tail(a), tail, "convolution window")
            rows = held_rows(verified.pool, a)
            for name, field in held_rows(plain.pool, b).items():
                assert_bitwise_equal(rows[name], field, f"row {name}")

    assert_bitwise_equal(got, want, "outputs of the accepted tokens")
    compare()
    # And what comes after is the same, through another fold.
    for _ in range(2):
        again = [side.step(np.full(n, T), np.full(n, T)) for side in (verified, plain)]
        assert_bitwise_equal(*again, "outputs after")
    compare()


@pytest.mark.parametrize("case", vary(BASES, format=[*FORMATS, "bf16"]), ids=str)
def test_readouts_write_window_rows_and_nothing_else(case, rng):
    world = World(case.but(max_window=3, tokens=60), rng)
    pool, cur = world.pool, world.pool.cursors
    run, written = world.wrapper.run, []

    def watched(layer, **inputs):
        plan = world.wrapper._plan
        before = snapshot(tensors(pool))
        y = run(layer, **inputs)
        rows = torch.zeros(pool.sizes.input_pages, pool.sizes.page_rows, dtype=torch.bool)
        for i, slot in enumerate(plan.slots):
            row = cur.history[slot] + np.arange(plan.windows[i])
            page = cur.table[slot][row // pool.sizes.page_rows]
            rows[page, row % pool.sizes.page_rows] = True
        masks = {
            name: rows.view(1, *rows.shape, *(1,) * (t.dim() - 3)).expand(t.shape)
            for name, t in before.items()
            if name.startswith("row.")
        }
        assert_untouched(before, tensors(pool), masks)
        written.append(int(rows.sum()))
        return y

    world.wrapper.run = watched
    world.decode()
    assert sum(written) > case.batch * 60


@pytest.mark.parametrize("case", vary(BASES, format=[*FORMATS, "fp16"]), ids=str)
def test_folds_write_their_destinations_and_nothing_else(case, rng):
    """A sharer folds into a fresh page and leaves the shared one; one that shares nothing folds
    in place; one that does not fold is not touched."""
    world = World(case.but(max_window=1, batch=3, tokens=20), rng, checkpoint_pages=6)
    pool, wrapper = world.pool, world.wrapper
    for _ in range(5):
        world.step([1, 1, 1], [1, 1, 1])
    pool.free(world.sequences[2])
    (child,) = pool.fork(world.sequences[0])
    sequences = [world.sequences[0], world.sequences[1], child]
    states = [wrapper.materialize(s) for s in sequences]
    shared = pool.cursors.checkpoint[pool.cursors.peek(child)]
    before = snapshot(tensors(pool))
    plan = wrapper.plan(sequences, 0, force_fold=np.array([False, True, True]))
    wrapper.fold()
    target = plan.arrays.fold_target[: plan.fold_count].tolist()
    source = plan.arrays.fold_source[: plan.fold_count].tolist()
    assert source[0] == target[0]
    assert source[1] == shared != target[1]
    written = torch.zeros(pool.sizes.checkpoint_pages, dtype=torch.bool)
    written[target] = True
    storage = pool.checkpoints.storage
    mask = written.view(1, -1, *(1,) * (storage.dim() - 2)).expand(storage.shape)
    assert_untouched(before, tensors(pool), {"checkpoints": mask})
    wrapper.commit()
    for sequence, state, folded in zip(sequences, states, plan.fold, strict=True):
        if folded and not pool.format.lossless:
            state = to_storage(state, pool.format).float()  # rounded, once
        assert_bitwise_equal(wrapper.materialize(sequence), state)
    assert pool.history(child) == pool.history(world.sequences[1]) == 0
    assert pool.history(world.sequences[0]) == 5
