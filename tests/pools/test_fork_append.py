"""Both sides of a fork go on, from every fill level, through two folds each.

What each side must hold comes from the dictionary model, whose forks are copies of float64 states.
"""

import pytest
import torch

from replayinfer.testing import assert_bitwise_equal

from .kit import SPECS, World

CAPACITY = 8


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("rows", range(CAPACITY + 1))
@pytest.mark.parametrize(
    ("page_rows", "fmt", "window"), [(2, "fp32", 1), (4, "fp32_split", 3)], ids=["1", "3"]
)
def test_both_sides_at_every_fill_level(family, rows, page_rows, fmt, window, rng):
    world = World(
        SPECS[family], rng, layers=[1], capacity=CAPACITY, page_rows=page_rows, format=fmt,
        max_window=window,
    )  # fmt: skip
    (a,) = world.alloc()
    world.seed(a, tokens=11)
    world.grow(a, rows)
    assert world.pool.history(a) == rows
    (b,) = world.fork(a)
    folds = {a: 0, b: 0}
    # Alone and together, so that folds and appends of the two meet in every order.
    turn = 0
    while min(folds.values()) < 2:
        seqs = [[a], [b], [a, b], [b, a]][turn % 4]
        plan = world.step(dict.fromkeys(seqs, window))
        for row, seq in enumerate(seqs):
            folds[seq] += int(plan.fold[row])
        world.check()
        turn += 1
    assert turn < 40


@pytest.mark.parametrize("family", SPECS)
def test_a_fork_and_its_parent_get_the_bits_of_a_sequence_that_never_forked(family, rng):
    """Alone in its batch, a sequence computes the same bits, whatever pages it shares."""
    options = {"layers": [0], "capacity": 6, "page_rows": 2, "format": "fp32_split"}
    world = World(SPECS[family], rng, **options)
    plain = World(SPECS[family], rng, **options)
    weights = {name: w[0].clone() for name, w in world.pool.weights.items()}
    plain.pool.bind(0, **weights)
    drawn = []

    def step(target, seq, feed=None):
        plan = target.wrapper.plan([seq])
        target.wrapper.fold()
        feed = feed or target.draw(plan)
        outputs = target.run(plan, feed)
        target.wrapper.commit()
        return feed, outputs[0]

    (a,) = world.pool.alloc()
    for _ in range(5):
        drawn.append(step(world, a))
    (b,) = world.pool.fork(a)
    sides = {a: list(drawn), b: list(drawn)}
    for _ in range(15):
        for seq, log in sides.items():
            log.append(step(world, seq))
    for seq, log in sides.items():
        (alone,) = plain.pool.alloc()
        for feed, (conv, y) in log:
            _, (want_conv, want) = step(plain, alone, feed)
            assert_bitwise_equal(conv, want_conv, "convolution")
            assert_bitwise_equal(y, want, "output")
        assert_bitwise_equal(
            world.wrapper.materialize(seq), plain.wrapper.materialize(alone), "state"
        )
        assert torch.equal(world.pool.conv_tail(seq), plain.pool.conv_tail(alone))
        plain.pool.free(alone)
