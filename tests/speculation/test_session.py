"""The loop: whatever is drafted, the tokens are those of plain decoding."""

import numpy as np
import pytest
import torch

from replayinfer import Draft, InputError, NGramDrafter, PlanError, SpeculativeSession, materialize
from replayinfer.testing import assert_bitwise_equal, relative_error

from ..pools.kit import Unchanged, check_books
from ..transfer.rig import SPECS
from .toy import VOCABULARY, Guesser, Toy

NEW = 14
FAMILIES = ("mamba2", "gdn", "kda")


def texts(rng, count):
    """Prompts of differing lengths."""
    return [torch.randint(0, VOCABULARY, (n,), generator=rng).tolist() for n in range(1, count + 1)]


def begin(toy, drafter, prompts, **options):
    """A session over sequences that have taken their prompts in, the last tokens apart."""
    session = SpeculativeSession(toy.target, drafter, **options)
    handles = toy.pool.alloc(len(prompts))
    for handle, prompt in zip(handles, prompts, strict=True):
        for start in range(0, len(prompt) - 1, toy.pool.max_window):
            part = prompt[:-1][start : start + toy.pool.max_window]
            toy.target.verify([handle], [part])
            toy.target.accept([range(len(part))])
        session.add(handle, prompt)
    return session, handles


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_decoding(family, trees, rng):
    toy = Toy(SPECS[family], rng)
    prompts = texts(rng, 3)
    drafter = Guesser(toy, rng, trees=trees)
    session, handles = begin(toy, drafter, prompts)
    rounds = 0
    while any(len(session.text(h)) < len(p) + NEW for h, p in zip(handles, prompts, strict=True)):
        some = handles if rounds % 3 else handles[::-1]  # in any order
        new = session.step(some)
        assert list(new) == some
        assert all(new.values())
        rounds += 1
        check_books(toy.pool)
    for handle, prompt in zip(handles, prompts, strict=True):
        text = session.remove(handle)
        toy.assert_greedy(prompt, text)
        assert toy.pool.tokens(handle) == len(text) - 1
    counters = session.counters
    assert counters.rounds == 3 * rounds
    assert 0 < counters.accepted < counters.drafts
    assert 1 < counters.accepted_per_round < toy.pool.max_window
    assert toy.wrapper.counters.folds > 0
    assert drafter.asked == rounds


def test_after_a_session_a_sequence_is_one_that_never_drafted(rng):
    """Where both folded alike; the upper layer's rows met another order of the same sums."""
    toy = Toy(SPECS["gdn"], rng, capacity=64)
    session, (a,) = begin(toy, Guesser(toy, rng), texts(rng, 1))
    while toy.pool.tokens(a) < 20:
        session.step()
    (b,) = toy.pool.alloc()
    for token in session.text(a)[:-1]:
        toy.target.verify([b], [[token]])
        toy.target.accept([[0]])
    assert toy.pool.tokens(a) == toy.pool.tokens(b) == toy.pool.history(b)
    tails, states = ((f(a), f(b)) for f in (toy.pool.conv_tail, toy.wrapper.materialize))
    assert_bitwise_equal(tails[0][0], tails[1][0])
    assert relative_error(*tails, keep=(0,)) < 1e-5
    assert relative_error(*states, keep=(0, 1)) < 1e-4


def test_sampled_tokens_follow_the_seed_and_the_model(rng):
    """With one likely token everywhere, sampling is greedy: the drafts' mistakes are refused."""
    toy = Toy(SPECS["mamba2"], rng)
    prompts = texts(rng, 2)
    session, handles = begin(
        toy, Guesser(toy, rng), prompts, generator=torch.Generator().manual_seed(1),
        distribution=lambda logits: torch.softmax(1e6 * logits, -1),
    )  # fmt: skip
    for _ in range(8):
        session.step()
    for handle, prompt in zip(handles, prompts, strict=True):
        text = session.text(handle)
        toy.assert_greedy(prompt, text)
    assert 0 < session.counters.accepted < session.counters.drafts


def test_probabilities_of_drafts_reach_the_rule(rng):
    """A draft that its drafter was sure of, and the model is not, is kept as often as it says."""
    toy = Toy(SPECS["mamba2"], rng, max_sequences=400)
    seen = []

    def drafter(contexts):
        q = torch.full((1, VOCABULARY), 1 / VOCABULARY)
        seen.append(len(contexts))
        return {s: Draft((int(torch.multinomial(q, 1, generator=rng)),), None, q) for s in contexts}

    session, _ = begin(
        toy, drafter, [[3]] * 400, generator=torch.Generator().manual_seed(1),
        distribution=lambda logits: torch.full_like(logits, 1 / VOCABULARY),
    )  # fmt: skip
    session.step()
    assert seen == [400]
    assert session.counters.accepted == 400  # p equals q everywhere


def test_limits_bound_what_a_round_adds(rng):
    toy = Toy(SPECS["gdn"], rng)
    session, (a, b) = begin(toy, Guesser(toy, rng, right=1.0), texts(rng, 2))
    for _ in range(6):
        new = session.step(limits={a: 1})
        assert len(new[a]) == 1
    assert len(session.text(b)) > len(session.text(a)) + 1
    with pytest.raises(InputError, match="limits: got 0"):
        session.step(limits={a: 0})


def test_long_drafts_are_cut_to_the_window(rng):
    toy = Toy(SPECS["mamba2"], rng, max_window=3, capacity=3)
    prompts = texts(rng, 1)
    session, (a,) = begin(
        toy, lambda contexts: {s: Draft(tuple(toy.decode(t, 9))) for s, t in contexts.items()},
        prompts,
    )  # fmt: skip
    assert session.step() == {a: toy.decode(prompts[0], 3)}


def test_no_drafts_is_plain_decoding(rng):
    toy = Toy(SPECS["kda"], rng)
    prompts = texts(rng, 2)
    session, handles = begin(toy, lambda contexts: {}, prompts)
    for _ in range(NEW):
        session.step()
    assert session.counters.accepted_per_round == 1
    for handle, prompt in zip(handles, prompts, strict=True):
        toy.assert_greedy(prompt, session.text(handle))


@pytest.mark.parametrize("where", ["drafter", "forward", "choice"])
def test_an_error_leaves_everything_as_it_was(where, rng):
    toy = Toy(SPECS["gdn"], rng)
    options = {}
    drafter = NGramDrafter(4)
    broken = False

    def fail(*args):
        if broken:
            raise RuntimeError("no")
        return good(*args)

    if where == "drafter":
        good, drafter = drafter, fail
    elif where == "choice":
        good = lambda logits: torch.softmax(logits, -1)  # noqa: E731
        options["distribution"] = fail
    session, (a,) = begin(toy, drafter, [[1, 2, 1]], **options)
    if where == "forward":
        good, toy.target._forward = toy.target._forward, fail
    session.step()
    text, state = session.text(a), materialize(toy.pool, a)
    broken = True
    with pytest.raises(RuntimeError, match="no"):
        session.step()
    assert session.text(a) == text
    assert_bitwise_equal(materialize(toy.pool, a), state)
    broken = False
    session.step()
    check_books(toy.pool)


def test_what_is_refused(rng):
    toy = Toy(SPECS["mamba2"], rng)
    session, (a,) = begin(toy, NGramDrafter(2), [[1]])
    with Unchanged(toy.pool):
        with pytest.raises(InputError, match="allowed one that is not in the session yet"):
            session.add(a, [1])
        with pytest.raises(InputError, match=r"sequence: got \d+ with 0 tokens"):
            session.add(a + 1, [])
        with pytest.raises(PlanError, match="allowed those that were added"):
            session.step([a + 1])
        with pytest.raises(InputError, match="allowed each once"):
            session.step([a, a])
        bad = Draft((1, 2), (-1,))
        session.drafter = lambda contexts: {a: bad}
        with pytest.raises(InputError, match="parents: got 1 for 2 drafts"):
            session.step()
        session.drafter = lambda contexts: {a: Draft((1, 2), (-1, 1))}
        with pytest.raises(InputError, match="parents: got 2 for node 2"):
            session.step()
    assert session.step([]) == {}


def test_pads_of_a_bucket_reach_the_forward_as_zeros(rng):
    toy = Toy(SPECS["gdn"], rng)
    toy.wrapper.planner.buckets = (4,)
    seen = []
    inner = toy.target._forward

    def noting(plan, tokens):
        seen.append(tokens.clone())
        return inner(plan, tokens)

    toy.target._forward = noting
    session, _ = begin(
        toy, lambda c: {s: Draft((5,) * (i + 1)) for i, s in enumerate(c)}, [[1]] * 2
    )
    session.step()
    assert np.array_equal(seen[-1], [[1, 5, 0], [1, 5, 5], [0, 0, 0], [0, 0, 0]])
