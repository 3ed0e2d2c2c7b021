"""The comparison: what counts as equal, as a tie, and as wrong."""

from __future__ import annotations

import pytest
import torch

from replayinfer.demo import reference as module
from replayinfer.demo.reference import (
    FP32_BOUND,
    Comparison,
    Reference,
    compare,
    generate,
    logit_bound,
)

BOUND = 0.01


def logits(*best):
    """Rows of four logits: 1 at the given token, else 0."""
    rows = torch.zeros(len(best), 4)
    rows[range(len(best)), list(best)] = 1.0
    return rows


@pytest.fixture
def no_generate(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("no reference had to be made again")

    monkeypatch.setattr(module, "generate", refuse)


def check(reference, tokens, rows, **options):
    options = {"bound": BOUND, **options}
    return compare(None, [1, 2], reference, tokens, list(rows), **options)


def test_the_same_tokens(no_generate):
    right = Reference([3, 0, 2], logits(3, 0, 2))
    got = check(right, [3, 0, 2], logits(3, 0, 2) + 0.5)
    assert got == Comparison(tokens=3, equal=3, ties=0, max_logit_diff=0.5)


def test_nothing_after_a_wrong_token_counts(no_generate):
    right = Reference([3, 0, 2], logits(3, 0, 2))
    got = check(right, [3, 1, 2], logits(3, 1, 2))
    assert got == Comparison(tokens=3, equal=1, ties=0, max_logit_diff=1.0)


def test_leading_tokens_of_a_fork_do_not_count(no_generate):
    right = Reference([3, 0, 2], logits(3, 0, 2))
    got = check(right, [3, 0, 2], logits(1, 0, 2), skip=1)
    assert got == Comparison(tokens=2, equal=2, ties=0, max_logit_diff=0.0)


def test_a_tie_is_followed_and_what_comes_after_is_checked(monkeypatch):
    asked = []

    def again(model, prompt, tokens, *, forced):
        asked.append((prompt, tokens, forced))
        return Reference([3, 1, 1], logits(3, 1, 1))

    monkeypatch.setattr(module, "generate", again)
    rows = logits(3, 0, 2)
    rows[1, 1] = 1 - 1.5 * BOUND  # within rounding of the best
    right = Reference([3, 0, 2], rows)
    served = logits(3, 1, 1)
    served[1] = rows[1]
    got = check(right, [3, 1, 1], served)
    assert asked == [([1, 2], 3, [3, 1])]
    assert (got.equal, got.ties) == (2, 1)
    wrong = check(right, [3, 1, 0], served)
    assert (wrong.equal, wrong.ties) == (1, 1)


def test_what_rounding_cannot_explain_is_no_tie(no_generate):
    rows = logits(3, 0)
    rows[1, 1] = 1 - 3 * BOUND
    got = check(Reference([3, 0], rows), [3, 1], logits(3, 1))
    assert (got.equal, got.ties) == (1, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_fails_any_bound(no_generate, value):
    served = logits(3, 0)
    served[0, 2] = value
    got = check(Reference([3, 0], logits(3, 0)), [3, 0], served)
    assert got.max_logit_diff == float("inf")


def test_a_forced_token_is_equal_where_it_would_have_been_chosen(no_generate):
    right = Reference([3, 0, 2], logits(3, 0, 2))
    got = check(right, [3, 0, 2], logits(3, 1, 2), forced=True)
    assert (got.tokens, got.equal, got.max_logit_diff) == (3, 2, 1.0)


def test_bounds_by_format_and_capacity():
    assert logit_bound("fp32", 1) == logit_bound("fp32", 16) == FP32_BOUND
    # The recurrence of fp32_split is not rounded, so folding more often costs nothing.
    assert logit_bound("fp32_split", 1) == logit_bound("fp32_split", 16) < logit_bound("bf16", 64)
    assert logit_bound("bf16", 16) < logit_bound("bf16", 1) < 1
    assert logit_bound("fp16", 16) == logit_bound("bf16", 16) / 8


def test_comparisons_add_up():
    total = Comparison(tokens=2, equal=1, ties=1, max_logit_diff=0.5)
    total += Comparison(tokens=3, equal=3, max_logit_diff=0.25)
    assert total == Comparison(tokens=5, equal=4, ties=1, max_logit_diff=0.5)


def test_second_best():
    assert Reference([2], torch.tensor([[0.1, 3.0, 4.0, 2.0]])).second_best(0) == 1


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_generate_follows_and_then_decodes(build, name):
    model, prompt = build(name, 0), list(b"If the implementation is hard")
    free = generate(model, prompt, 6)
    assert free.logits.shape == (6, 256)
    assert free.tokens == free.logits.argmax(-1).tolist()
    other = free.second_best(2)
    forced = generate(model, prompt, 6, forced=[*free.tokens[:2], other])
    assert forced.tokens[:3] == [*free.tokens[:2], other]
    assert forced.tokens[3:] == forced.logits[3:].argmax(-1).tolist()
    # The logits are the raw ones, not those that forcing leaves.
    assert torch.equal(forced.logits[:3], free.logits[:3])
