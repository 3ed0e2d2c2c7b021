"""Speculative sampling keeps the model's distribution, whatever the drafts are.

Frequencies of pairs of new tokens over N independent rounds, against their probabilities. By
Bernstein's inequality ``|f - p|`` stays below ``t + sqrt(t^2 + 6 p (1 - p) t)`` with
``t = log(2 / delta) / (3 N)`` but for a chance of delta, which is 1e-8 a cell.
"""

import math

import pytest
import torch

from replayinfer import InputError, sampled_path

V, N = 4, 3000
SHAPES = {
    "a chain": [-1, 0, 1],
    "siblings": [-1, 0, 0, 0],
    "a tree": [-1, 0, 0, 1, 2, 2],
}


def model(rng):
    """Distributions after nothing, and after each first token."""
    return torch.softmax(1.5 * torch.randn(1 + V, V, generator=rng, dtype=torch.float64), -1)


def draw(rows, rng):
    return int(torch.multinomial(rows, 1, generator=rng))


def rounds(p, q, parents, rng, pick, *, drawn=True):
    """How often each pair of tokens came; `pick` is the rule under test."""
    depth = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        depth[node] = depth[parent] + 1
    counts = torch.zeros(V, V, dtype=torch.float64)
    for _ in range(N):
        tokens = [0]
        for node in range(1, len(parents)):
            above = 0 if depth[node] == 1 else 1 + tokens[parents[node]]
            tokens.append(draw(q[above], rng) if drawn else int(q[above].argmax()))
        # Nodes that are two deep or more only matter through the first of them.
        rows = [0 if depth[n] == 0 else 1 + tokens[n] for n in range(len(parents))]
        before = [0 if depth[n] <= 1 else 1 + tokens[parents[n]] for n in range(len(parents))]
        draft = q[before] if drawn else None
        path, token = pick(tokens, p[rows], parents=parents, draft=draft, generator=rng)
        new = [*(tokens[n] for n in path[1:]), token]
        if len(new) == 1:  # the next round would draw the second token
            new.append(draw(p[1 + new[0]], rng))
        counts[new[0], new[1]] += 1
    return counts / N


def errors(frequencies, p):
    """Of every pair, as a share of what chance allows."""
    expected = p[0][:, None] * p[1:]
    t = math.log(2 / 1e-8) / (3 * N)
    return (frequencies - expected).abs() / (t + (t**2 + 6 * expected * (1 - expected) * t).sqrt())


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_the_distribution_is_the_models(parents, drawn, rng):
    p, q = model(rng), model(rng)
    found = rounds(p, q, parents, rng, sampled_path, drawn=drawn)
    assert errors(found, p).max() < 1


def test_a_wrong_rule_is_seen(rng):
    """Drafts kept as greedy decoding would: the bound above is no formality."""
    p = torch.full((1 + V, V), 1 / V, dtype=torch.float64)
    q = torch.softmax(torch.arange(V, dtype=torch.float64), -1).expand(1 + V, V)

    def keep_all(tokens, target, *, parents, draft, generator):
        return list(range(len(tokens))), draw(target[-1], generator)

    assert errors(rounds(p, q, SHAPES["a chain"], rng, keep_all), p).max() > 1


def test_drafts_from_the_model_itself_are_all_kept(rng):
    p = model(rng)
    for _ in range(50):
        tokens = [0, draw(p[0], rng)]
        tokens.append(draw(p[1 + tokens[1]], rng))
        rows = [0, 1 + tokens[1], 1 + tokens[2]]
        draft = p[[0, 0, 1 + tokens[1]]]
        path, _ = sampled_path(tokens, p[rows], draft=draft, generator=rng)
        assert path == [0, 1, 2]


def test_a_draft_that_the_model_cannot_say_is_never_kept(rng):
    target = torch.tensor([[0.5, 0.5, 0, 0]] * 3)
    for _ in range(50):
        path, token = sampled_path([0, 2, 3], target, parents=[-1, 0, 0], generator=rng)
        assert path == [0]
        assert token in (0, 1)


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (torch.ones(2, V), None, r"target: got \[2, 4\]; allowed \[nodes=3, vocabulary\]"),
        (torch.ones(3), None, r"target: got \[3\]"),
        (torch.ones(3, V), torch.ones(2, V), r"draft: got \[2, 4\]"),
    ],
)
def test_distributions_of_other_shapes(target, draft, message):
    with pytest.raises(InputError, match=message):
        sampled_path([0, 1, 2], target, draft=draft)
