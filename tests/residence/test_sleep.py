"""Pools that give their device memory back, and take it again with every bit or with none."""

import pytest

from replayinfer import PlanError, ReplayDecodeWrapper, ReplayPrefillWrapper, materialize
from replayinfer.testing import assert_bitwise_equal, snapshot

from ..pools.kit import Unchanged, check_books, memory
from ..transfer.rig import CASES, SPECS, Rig, assert_equal_outputs, assert_same


def twins(spec, rng, **options):
    """Two pools with the same two sequences, one of them forked; and their handles."""
    options = {"layers": (4,)} | options
    rig = Rig(spec, rng, **options)
    twin = Rig(spec, rng, like=rig, **options)
    before = rig.draw(9)
    handles = []
    for r in (rig, twin):
        a, b = r.pool.alloc(2)
        r.decode(a, before, window=3)
        r.step({b: before[:3]})
        handles.append([a, b, *r.pool.fork(a)])
    return rig, twin, *handles


def held_bytes(pool):
    return sum(guarded.whole.untyped_storage().nbytes() for guarded in pool.guarded())


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_kept_states_are_back_with_every_bit(spec, format, rng):
    rig, twin, here, there = twins(spec, rng, format=format)
    before = snapshot(memory(rig.pool))
    size = held_bytes(rig.pool)
    assert size == rig.pool.nbytes - sum(w.nbytes for w in rig.pool.weights.values())
    with Unchanged(rig.pool):
        rig.pool.sleep()
        assert held_bytes(rig.pool) == 0
        rig.pool.wake()
        assert held_bytes(rig.pool) == size
    for name, tensor in memory(rig.pool).items():
        assert_bitwise_equal(tensor, before[name], name)
    stream = rig.draw(7)
    for a, b in zip(here, there, strict=True):
        assert_same(rig, a, twin, b)
        assert_equal_outputs(rig.decode(a, stream, window=3), twin.decode(b, stream, window=3))


def test_a_wrapper_made_before_goes_on_and_so_does_the_pool(rng):
    """Twice in a row, with everything that a pool does in between."""
    rig, twin, here, there = twins(SPECS["kda"], rng, format="fp32_split", restore="any")
    for _ in range(2):
        rig.pool.sleep(keep=True)
        rig.pool.wake()
        for r, handles in ((rig, here), (twin, there)):
            r.pool.rollback(handles[1], 1)
            r.pool.free(handles[2])
        here, there = ([a, b, *r.pool.fork(b)] for r, (a, b, _) in ((rig, here), (twin, there)))
        stream = rig.draw(5)
        parts = [dict.fromkeys(seqs[1:], stream) for seqs in (here, there)]
        got, want = rig.prefill(parts[0]), twin.prefill(parts[1])
        got |= rig.step({here[0]: stream[:3]})
        want |= twin.step({there[0]: stream[:3]})
        got |= rig.step({here[1]: stream[:2]})
        want |= twin.step({there[1]: stream[:2]})
        for a, b in zip(here, there, strict=True):
            assert_equal_outputs(got[a], want[b])
            assert_same(rig, a, twin, b)


@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_dropped_states_leave_an_empty_pool(format, rng):
    rig, twin, here, _ = twins(SPECS["gdn"], rng, format=format)
    rig.pool.sleep(keep=False)
    assert held_bytes(rig.pool) == 0
    rig.pool.wake()
    assert not any(rig.pool.pages_in_use().values())
    check_books(rig.pool)
    assert not any(tensor.any() for tensor in memory(rig.pool).values())
    for handle in here:
        with pytest.raises(RuntimeError, match="was freed"):
            rig.pool.tokens(handle)
    stream = rig.draw(9)  # weights stayed
    (a,), (b,) = rig.pool.alloc(), twin.pool.alloc()
    assert_equal_outputs(rig.decode(a, stream, window=2), twin.decode(b, stream, window=2))


def test_everything_is_refused_meanwhile(rng):
    rig, _, (a, b, c), _ = twins(SPECS["mamba2"], rng)
    pool = rig.pool
    snap = pool.export(a)
    pool.sleep()
    calls = {
        "alloc": pool.alloc,
        "seed": lambda: pool.seed(a, {}, tokens=0),
        "fork": lambda: pool.fork(a),
        "free": lambda: pool.free([a, b]),
        "free none": lambda: pool.free([]),
        "rollback": lambda: pool.rollback(a, 0),
        "tokens": lambda: pool.tokens(a),
        "history": lambda: pool.history(a),
        "conv_tail": lambda: pool.conv_tail(a),
        "materialize": lambda: materialize(pool, a),
        "export": lambda: pool.export(a),
        "import": lambda: pool.import_(snap),
        "plan": lambda: rig.wrapper.plan([a, b]),
        "plan of none": lambda: ReplayDecodeWrapper(pool).plan([]),
        "prefill": lambda: rig.prefiller.plan([c], [0, 1]),
        "prefill of none": lambda: ReplayPrefillWrapper(pool).plan([], [0]),
        "sleep": pool.sleep,
        "sleep and drop": lambda: pool.sleep(keep=False),
        "resize": lambda: pool.resize(max_sequences=9),
    }
    for call in calls.values():
        with pytest.raises(PlanError, match="sleep"):
            call()
    pool.wake()
    check_books(pool)
    assert pool.slot_ids.used == 3
    with pytest.raises(PlanError, match="wake: got a pool that is awake; allowed after sleep"):
        pool.wake()
    pool.free([a, b, c])


def test_not_while_a_plan_holds_a_sequence(rng):
    rig, _, (a, *_), _ = twins(SPECS["gdn"], rng)
    part = rig.draw(2)

    def refused():
        with Unchanged(rig.pool):
            for keep in (True, False):
                with pytest.raises(PlanError, match="sleep: got a pool with a plan in progress"):
                    rig.pool.sleep(keep=keep)

    rig.start({a: part})
    refused()
    rig.wrapper.commit()
    rig.begin({a: part})
    refused()
    rig.prefiller.abort()
    rig.pool.sleep(keep=False)
