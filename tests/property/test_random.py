"""Long random runs of pools, planner and wrapper against the dictionary model."""

import random

import pytest

from .machine import Machine

CONFIGS = [
    ("mamba2", "fp32", "full", "window"),
    ("mamba2", "fp32_split", "spread", "any"),
    ("gdn", "fp32", "spread", "window"),
    ("gdn", "fp32_split", "full", "any"),
    ("kda", "fp32", "full", "any"),
    ("kda", "fp32_split", "spread", "window"),
]
OPERATIONS = 1200


def drive(machine: Machine, pick: random.Random) -> None:
    """One random operation."""
    idle, roll = machine.idle, pick.random()
    if machine.step and roll < 0.65:
        counts = [pick.choice([0, 1, 2, 3, 3]) for _ in machine.step.sequences]
        return machine.advance(counts)
    if machine.step and roll < 0.68:
        return machine.abort()
    if not machine.step and roll < 0.6:
        some = [s for s in pick.sample(idle, len(idle)) if pick.random() < 0.85]
        windows = [pick.choice([0, 1, 2, 3, 3]) for _ in some]
        forced = [pick.random() < 0.1 for _ in some]
        return machine.plan(some, windows, forced, pads=pick.choice([0, 0, 2]))
    kind = pick.choice(
        ["alloc", "alloc", "fork", "fork", "move", "rollback", "seed", "free", "free", "misuse"]
    )
    if kind == "alloc":
        return machine.alloc(pick.choice([1, 1, 2]))
    if kind == "misuse":
        return machine.misuse()
    if not idle or (kind == "free" and len(machine.live) < 3):
        return None
    seq = pick.choice(idle)
    if kind == "fork":
        return machine.fork(seq, pick.choice([1, 1, 1, 2]), drop=pick.choice([0, 0, 1, 2, 5]))
    if kind == "move":
        return machine.move(seq)
    if kind == "rollback":
        return machine.rollback(seq, pick.randrange(1, 8))
    if kind == "seed":
        return machine.seed(seq, pick.choice([0, 1, 5, 1000]))
    return machine.free(pick.sample(idle, pick.choice([1, 1, min(2, len(idle))])))


@pytest.mark.parametrize(("family", "format", "policy", "restore"), CONFIGS)
def test_pool_and_model_agree(family, format, policy, restore, rng):
    machine = Machine(family, rng, format=format, policy=policy, restore=restore)
    pick = random.Random(rng.initial_seed())
    for _ in range(OPERATIONS):
        drive(machine, pick)
        machine.settle()
    for seq in machine.live:
        machine.check(seq)
    machine.finish()
    # It did what it is for: it decoded, folded, and ran out now and then.
    counts = machine.counts
    assert counts["tokens"] > OPERATIONS // 10
    assert counts["folds"] > OPERATIONS // 60
    assert counts["refused"] > OPERATIONS // 200
    print(counts)
