"""Which steps go direct: the wrapper's argument, the backend's word, and what a step allows."""

import inspect

import pytest

from replayinfer import CapacityError, InputError, ReplayDecodeWrapper
from replayinfer.backends.torch import TorchBackend

from ..pools.kit import Unchanged, check_books
from ..transfer.rig import SPECS, Rig


class PrefersUpTo(TorchBackend):
    """Says that direct steps pay up to a bucket, and remembers what it was asked."""

    def __init__(self, limit):
        self.limit, self.asked = limit, []

    def prefers_direct(self, pool, bucket):
        self.asked.append(bucket)
        return bucket <= self.limit


@pytest.fixture
def rig(rng):
    return Rig(SPECS["mamba2"], rng, sequences=6)


def chosen(wrapper, sequences, *args, **options):
    """Whether a step would be direct; it is dropped again."""
    plan = wrapper.plan(sequences, *args, **options)
    wrapper.abort()
    return plan.direct


def test_auto_is_the_default_and_asks_the_backend(rig):
    assert inspect.signature(ReplayDecodeWrapper).parameters["direct"].default == "auto"
    backend = PrefersUpTo(4)
    wrapper = ReplayDecodeWrapper(rig.pool, backend=backend, buckets=[2, 4, 8])
    seqs = rig.pool.alloc(6)
    got = [chosen(wrapper, seqs[:n]) for n in (1, 2, 3, 4, 5, 6)]
    assert got == [True, True, True, True, False, False]
    assert backend.asked == [2, 2, 4, 4, 8, 8]  # buckets, not batches


def test_the_reference_always_replays(rig):
    assert not TorchBackend().prefers_direct(rig.pool, 1)
    assert not chosen(ReplayDecodeWrapper(rig.pool), rig.pool.alloc(1))


@pytest.mark.parametrize(
    ("direct", "want"),
    [("never", [0, 0, 0]), ("always", [1, 1, 1]), (1, [1, 0, 0]), (2, [1, 1, 0])],
)
def test_other_choices_do_not_ask(rig, direct, want):
    backend = PrefersUpTo(100)
    wrapper = ReplayDecodeWrapper(rig.pool, backend=backend, direct=direct)
    seqs = rig.pool.alloc(3)
    assert [chosen(wrapper, seqs[:n]) for n in (1, 2, 3)] == want
    assert backend.asked == []
    assert chosen(wrapper, seqs, direct=True)
    assert not chosen(wrapper, seqs[:1], direct=False)


REPLAYED = {
    "a longer window": {"windows": [1, 2]},
    "a wider step": {"windows": [1, 1], "window": 2},
    "a tree": {"windows": [1, 1], "parents": [[-1], [-1]]},
    "a tree of one": {"windows": [2, 0], "parents": [[-1, 0], [-1, -1]]},
}


@pytest.mark.parametrize("direct", ["auto", 100])
@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_steps_that_cannot_are_replayed(rig, direct, options):
    wrapper = ReplayDecodeWrapper(rig.pool, backend=PrefersUpTo(100), direct=direct)
    seqs = rig.pool.alloc(2)
    assert not chosen(wrapper, seqs, **options)
    assert chosen(wrapper, seqs)
    assert chosen(wrapper, seqs, [1, 0])
    always = ReplayDecodeWrapper(rig.pool, direct="always")
    with Unchanged(rig.pool), pytest.raises(InputError, match="for a direct step"):
        always.plan(seqs, **options)


@pytest.mark.parametrize("direct", ["auto", 100])
def test_without_pages_for_the_sharers_it_replays(direct, rng):
    """Six sharers of one page, and only five free ones: replay needs none of them."""
    rig = Rig(SPECS["gdn"], rng, sequences=6, checkpoint_pages=6)
    rig.wrapper = ReplayDecodeWrapper(rig.pool, backend=PrefersUpTo(100), direct=direct)
    (a,) = rig.pool.alloc()
    rig.prefill({a: rig.draw(3)})
    everyone = [a, *rig.pool.fork(a, 5)]
    with Unchanged(rig.pool), pytest.raises(CapacityError, match="checkpoint pages: got a need of"):
        rig.wrapper.plan(everyone, direct=True)
    plan = rig.wrapper.plan(everyone)
    assert (plan.direct, plan.fold_count) == (False, 0)
    rig.wrapper.abort()
    check_books(rig.pool)
    assert chosen(rig.wrapper, everyone[:5])
    part = rig.draw(1)
    rig.step(dict.fromkeys(everyone, part))
    assert [rig.pool.history(seq) for seq in everyone] == [1] * 6


@pytest.mark.parametrize("direct", [0, -1, True, False, 2.0, "Auto", "", None, [4]], ids=repr)
def test_wrong_choices(rig, direct):
    with pytest.raises(InputError, match=r"^direct: got .+; allowed auto, never, always or an int"):
        ReplayDecodeWrapper(rig.pool, direct=direct)


@pytest.mark.parametrize(
    ("format", "stored", "standard"), [("fp32", 4, 4), ("fp32_split", 4, 4), ("bf16", 2, 2)]
)
def test_bytes(format, stored, standard, rng):
    """A direct step moves what the standard kernel moves, and what its folds cost comes on top."""
    rig = Rig(SPECS["gdn"], rng, format=format)
    counters, layers, state = rig.wrapper.counters, 2, 4 * 3 * 5
    row = rig.spec.row_bytes(rig.pool.dtype, rig.pool.format)
    a, b, c = rig.pool.alloc(3)
    rig.step({a: rig.draw(2)})
    counters.reset()
    rig.step({a: rig.draw(1), b: rig.draw(1), c: rig.draw(0)}, direct=True)
    want = layers * (2 * 2 * state * stored + 2 * state * stored + 2 * row)
    assert counters.as_dict() == {
        "steps": 1,
        "tokens": 2,
        "direct_steps": 1,
        "folds": 1,
        "forced_folds": 1,
        "early_folds": 0,
        "rows_rejected": 0,
        "aborted": 0,
        "state_bytes": want,
        "state_bytes_standard": layers * 2 * 2 * state * standard,
    }
    rig.pool.fork(b)
    counters.reset()
    rig.step({b: rig.draw(1)}, direct=True)  # copies the page before it moves
    assert counters.state_bytes == layers * 4 * state * stored
    assert (counters.folds, counters.forced_folds) == (1, 1)
    counters.reset()
    rig.step({b: rig.draw(1)}, direct=True)
    assert counters.state_bytes == counters.state_bytes_standard == layers * 2 * state * stored
    assert counters.folds == 0


def test_folds_that_replay_needs_too_are_not_forced(rng):
    rig = Rig(SPECS["mamba2"], rng, policy="spread")
    (a,) = rig.pool.alloc()
    for _ in range(2):
        rig.step({a: rig.draw(3)})
    rig.step({a: rig.draw(1)}, direct=True)
    counters = rig.wrapper.counters
    assert (counters.folds, counters.forced_folds, counters.early_folds) == (1, 0, 0)
