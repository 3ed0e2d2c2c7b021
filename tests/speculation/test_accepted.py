"""Accepted prefixes and paths: against a walk in plain Python, and what they refuse."""

import doctest
import itertools

import pytest
import torch

from replayinfer import (
    InputError,
    NGramDrafter,
    accepted_path,
    accepted_paths,
    accepted_prefix,
)
from replayinfer.speculation import accepted

from ..trees.forest import path_to


def ints(rng, limit, *shape):
    return torch.randint(0, limit, shape, generator=rng)


def test_the_examples():
    result = doctest.testmod(accepted)
    assert result.attempted >= 3
    assert not result.failed


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_prefix_is_what_a_loop_finds(width, rng):
    tokens, choices = ints(rng, 2, 60, width), ints(rng, 2, 60, width)
    windows = ints(rng, width + 1, 60)
    counts = accepted_prefix(tokens, choices, windows)
    assert counts.shape == (60,)
    for i in range(60):
        want = min(1, int(windows[i]))
        while 0 < want < windows[i] and tokens[i, want] == choices[i, want - 1]:
            want += 1
        assert counts[i] == want
    full = accepted_prefix(tokens, choices)
    assert torch.equal(full, accepted_prefix(tokens, choices, torch.full((60,), width)))
    assert accepted_prefix(tokens[0], choices[0]) == full[0]


def test_a_path_is_the_longest_chain_from_the_root_that_was_chosen(rng):
    for _ in range(200):
        count = int(ints(rng, 7)) + 1
        parents = [-1, *(int(ints(rng, t)) for t in range(1, count))]
        tokens, choices = ints(rng, 3, count).tolist(), ints(rng, 3, count).tolist()
        path = accepted_path(tokens, parents, choices)
        right = [
            line
            for line in (path_to(parents, node) for node in range(count))
            if all(tokens[b] == choices[a] for a, b in itertools.pairwise(line))
        ]
        assert path in right
        # Among siblings that say the same the first is taken; nothing continues it.
        assert not any(len(line) > len(path) and line[: len(path)] == path for line in right)


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_many_paths_are_each_trees_own(width, rng):
    count = 80
    tokens, choices = ints(rng, 2, count, width), ints(rng, 2, count, width)
    windows = ints(rng, width + 1, count)
    parents = torch.full((count, width), 99)  # what lies beyond a window is nobody's
    for i in range(count):
        for t in range(int(windows[i])):
            parents[i, t] = int(ints(rng, t)) if t else -1
    paths = accepted_paths(tokens, parents.int(), choices, windows)
    assert paths.dtype is torch.int32
    for i in range(count):
        n = int(windows[i])
        tree = (tokens[i, :n].tolist(), parents[i, :n].tolist(), choices[i, :n].tolist())
        want = accepted_path(*tree) if n else []
        assert paths[i].tolist() == want + [-1] * (width - len(want))


def test_a_chain_is_a_tree_without_branches(rng):
    for _ in range(50):
        tokens, choices = ints(rng, 2, 6), ints(rng, 2, 6)
        path = accepted_path(tokens.tolist(), range(-1, 5), choices.tolist())
        assert path == list(range(int(accepted_prefix(tokens, choices))))


@pytest.mark.parametrize(
    ("tokens", "parents", "choices", "message"),
    [
        ([], [], [], "parents: got 0 for 0 tokens"),
        ([1, 2], [-1], [1, 2], "parents: got 1 for 2 tokens"),
        ([1, 2], [-1, -1], [1, 2], "allowed -1 for node 0 alone"),
        ([1, 2], [-1, 1], [1, 2], "parents: got 1 for node 1"),
        ([1, 2], [0, 0], [1, 2], "parents: got 0 for node 0"),
        ([1, 2], [-1, 0], [1], "choices: got 1 for 2 nodes"),
    ],
)
def test_what_is_no_tree(tokens, parents, choices, message):
    with pytest.raises(InputError, match=message):
        accepted_path(tokens, parents, choices)


def test_windows_of_other_shapes():
    with pytest.raises(InputError, match=r"choices: got \[3\] for tokens \[4\]"):
        accepted_prefix(torch.zeros(4), torch.zeros(3))
    with pytest.raises(InputError, match=r"tokens: got \[4\] with parents \[3\]"):
        accepted_paths(torch.zeros(4), torch.zeros(3).int(), torch.zeros(4))


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], (9, 1)),  # the longest end that was seen before
        ([5, 3, 7, 3, 8, 3], (8, 3)),  # the latest of several
        ([4, 4, 4], (4,)),  # an end that overlaps itself
        ([1, 2, 3], ()),
        ([1], ()),
    ],
)
def test_ngrams(text, drafts):
    assert NGramDrafter(2)({7: text})[7].tokens == drafts


def test_ngrams_no_shorter_than_asked():
    text = [1, 2, 9, 9, 3, 2]
    assert NGramDrafter(2)({0: text})[0].tokens == (9, 9)
    assert NGramDrafter(2, shortest=2)({0: text})[0].tokens == ()
    for options in ({"drafts": 0}, {"drafts": 1, "longest": 1, "shortest": 2}):
        with pytest.raises(InputError, match="allowed an integer"):
            NGramDrafter(**options)
