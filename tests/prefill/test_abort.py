"""Until its commit a prefill has changed nothing that anyone can see."""

import pytest
import torch

from replayinfer import CapacityError, PlanError, ReplayDecodeWrapper, ReplayPrefillWrapper
from replayinfer.backends.torch import TorchBackend
from replayinfer.testing import assert_untouched, initial_states, snapshot

from ..pools.kit import Unchanged, books, check_books
from ..transfer.rig import CASES, SPECS, Rig, assert_equal_outputs, assert_same


class NothingSeen:
    """``with NothingSeen(pool):`` fails if anything differs but the content of free pages."""

    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        self.before = snapshot(books(self.pool))

    def __exit__(self, kind, value, traceback):
        if kind is None:
            storage = self.pool.checkpoints.storage
            free = torch.from_numpy(self.pool.checkpoint_ids.refs == 0)
            mask = free.view(1, -1, *(1,) * (storage.dim() - 2)).expand(storage.shape)
            assert_untouched(self.before, books(self.pool), {"checkpoints": mask})


def sequences_of_every_kind(rig, rng):
    """Fresh, fresh and shared, seeded at 0, with rows, folded, forked; with a part each."""
    pool = rig.pool
    fresh, shared, seeded, rows, folded = pool.alloc(5)
    (clone,) = pool.fork(shared)
    states = dict(zip(rig.layers, initial_states(rig.spec, 2, rng), strict=True))
    tails = {layer: torch.ones(rig.spec.conv_channels, 3) for layer in rig.layers}
    pool.seed(seeded, states, tokens=0, conv=tails)
    rig.decode(rows, rig.draw(3))
    rig.decode(folded, rig.draw(8), window=2)
    (forked,) = pool.fork(rows)
    kinds = (fresh, shared, clone, seeded, rows, folded, forked)
    return {seq: rig.draw(3 + i) for i, seq in enumerate(kinds)}


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_an_aborted_prefill_was_never_there(spec, format, rng):
    """Before any layer, between layers and after the last; and the next prefill gives the same."""
    rig, twin = (Rig(spec, rng, sequences=7, format=format, restore="any") for _ in range(2))
    for layer, weights in rig.weights.items():
        twin.pool.bind(layer, **weights)
    state = rng.get_state()
    parts = sequences_of_every_kind(rig, rng)
    rng.set_state(state)
    others = sequences_of_every_kind(twin, rng)
    for layers in ([], rig.layers[:1], rig.layers, rig.layers[1:], [4, 1, 4]):
        with NothingSeen(rig.pool):
            rig.begin(parts, layers=layers, conv=len(layers) != 1)
            rig.prefiller.abort()
        check_books(rig.pool)
    got, want = rig.prefill(parts), twin.prefill(others)
    for a, b in zip(parts, others, strict=True):
        assert_equal_outputs(got[a], want[b])
        assert_same(rig, a, twin, b)


def test_a_rerun_of_a_layer_gives_the_same(rng):
    """A layer that ran begins again from the state before the prefill, in place or not."""
    rig = Rig(SPECS["gdn"], rng)
    fresh, rows = rig.pool.alloc(2)
    rig.decode(rows, rig.draw(4))
    parts = {fresh: rig.draw(5), rows: rig.draw(18)}
    once = rig.begin(parts)
    rig.prefiller.abort()
    again = rig.begin(parts, layers=[1, 4, 1, 4])
    rig.prefiller.commit()
    for seq in parts:
        assert_equal_outputs({k: again[seq][k] for k in once[seq]}, once[seq])


class FailsAtTheSecondStore(TorchBackend):
    def prefill(self, pool, plan, layer, inputs, out):
        store, done = pool.checkpoints.store, []

        def failing(*args):
            if done:
                raise RuntimeError("device lost")
            done.append(store(*args))

        pool.checkpoints.store = failing
        try:
            super().prefill(pool, plan, layer, inputs, out)
        finally:
            pool.checkpoints.store = store


def test_a_layer_that_failed_half_way(rng):
    """It wrote the first of two fresh sequences in place; the abort takes that back too."""
    rig = Rig(SPECS["mamba2"], rng)
    parts = {seq: rig.draw(4) for seq in rig.pool.alloc(2)}
    rig.prefiller = ReplayPrefillWrapper(rig.pool, backend=FailsAtTheSecondStore())
    with NothingSeen(rig.pool):
        with pytest.raises(RuntimeError, match="device lost"):
            rig.begin(parts)
        assert any(rig.wrapper.materialize(seq).any() for seq in parts)
        with pytest.raises(PlanError, match=r"got no run of layers \[1, 4\]"):
            rig.prefiller.commit()
        rig.prefiller.abort()
    assert not any(rig.wrapper.materialize(seq).any() for seq in parts)


def test_commit_wants_every_layer(rng):
    rig = Rig(SPECS["kda"], rng)
    (seq,) = rig.pool.alloc()
    part = rig.draw(3)
    with NothingSeen(rig.pool):
        rig.begin({seq: part}, layers=[1])
        with pytest.raises(PlanError, match=r"commit: got no run of layers \[4\]; allowed after"):
            rig.prefiller.commit()
        rig.prefiller.run(4, **part.inputs[4])
        with pytest.raises(PlanError, match=r"commit: got no conv of layers \[4\]; .*call conv"):
            rig.prefiller.commit()
        rig.prefiller.abort()
    rig.begin({seq: part}, layers=[1])
    rig.prefiller.conv(4, part.rows[4])
    rig.prefiller.run(4, **part.inputs[4])
    rig.prefiller.commit()
    rig.check({seq: part}, {seq: rig.reference(part, torch.float32)})


def test_exhaustion_changes_nothing(rng):
    """Only sequences that are moved need a page; fresh ones are prefilled on a full pool."""
    rig = Rig(SPECS["gdn"], rng, checkpoint_pages=4)
    pool = rig.pool
    a, b, c = pool.alloc(3)
    first = {seq: rig.draw(2) for seq in (a, b, c)}
    rig.prefill(first)
    (d,) = pool.alloc()
    rig.decode(b, rig.draw(1))
    pool.free(a)
    more = {seq: rig.draw(2) for seq in (b, c)}
    with (
        Unchanged(pool),
        pytest.raises(CapacityError, match=r"checkpoint pages.*need of 2.*1 \(free"),
    ):
        rig.begin(more)
    assert not pool.cursors.busy.any()
    with pytest.raises(PlanError, match="run: got no plan"):
        rig.prefiller.run(1)
    rig.prefill({b: more[b]})
    rig.prefill({c: more[c][:0], d: rig.draw(3)})
    assert [pool.tokens(s) for s in (b, c, d)] == [5, 2, 3]
    check_books(pool)


def test_nobody_else_may_touch_its_sequences(rng):
    rig = Rig(SPECS["mamba2"], rng)
    pool = rig.pool
    fresh, rows, free = pool.alloc(3)
    rig.decode(rows, rig.draw(2))
    parts = {fresh: rig.draw(3), rows: rig.draw(3)}
    rig.begin(parts)
    second = ReplayPrefillWrapper(pool)
    snap = pool.export(free)
    calls = {
        "fork": lambda seq: pool.fork(seq),
        "free": lambda seq: pool.free(seq),
        "free with others": lambda seq: pool.free([free, seq]),
        "rollback": lambda seq: pool.rollback(seq, 0),
        "seed": lambda seq: pool.seed(seq, {}, tokens=0),
        "export": lambda seq: pool.export(seq),
        "plan": lambda seq: ReplayDecodeWrapper(pool).plan([free, seq]),
        "prefill": lambda seq: second.plan([seq], [0, 1]),
        "sleep": lambda seq: pool.sleep(),
        "sleep and drop": lambda seq: pool.sleep(keep=False),
        "resize": lambda seq: pool.resize(max_sequences=9),
    }
    with Unchanged(pool):
        for seq in parts:
            for call in calls.values():
                with pytest.raises(PlanError, match="a plan"):
                    call(seq)
    rig.prefiller.commit()
    pool.free([fresh, rows, free])
    pool.import_(snap)
