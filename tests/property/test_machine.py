"""The same machine under hypothesis, which shrinks a failure to its shortest run."""

import pytest
import torch

from .machine import SPECS, Machine

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

number = st.integers(0, 7)
windows = st.lists(st.integers(0, 3), min_size=6, max_size=6)
flags = st.integers(0, 63)


class PoolMachine(RuleBasedStateMachine):
    """Sequences are named by number, modulo those that there are."""

    machine: Machine | None = None

    @initialize(
        seed=st.integers(0, 2**20),
        family=st.sampled_from(sorted(SPECS)),
        format=st.sampled_from(["fp32", "fp32_split"]),
        policy=st.sampled_from(["full", "spread"]),
        restore=st.sampled_from(["window", "any"]),
        sequences=st.integers(1, 3),
    )
    def start(self, seed, sequences, **config):
        self.machine = Machine(rng=torch.Generator().manual_seed(seed), **config)
        self.machine.alloc(sequences)

    def pick(self, n):
        return self.machine.idle[n % len(self.machine.idle)]

    def some_idle(self):
        return bool(self.machine and self.machine.idle)

    def in_step(self):
        return bool(self.machine and self.machine.step)

    @rule(count=st.integers(1, 2))
    def alloc(self, count):
        self.machine.alloc(count)

    @precondition(some_idle)
    @rule(n=number)
    def free(self, n):
        self.machine.free([self.pick(n)])

    @precondition(some_idle)
    @rule(n=number, count=st.integers(1, 2), drop=number)
    def fork(self, n, count, drop):
        self.machine.fork(self.pick(n), count, drop)

    @precondition(some_idle)
    @rule(n=number)
    def move(self, n):
        self.machine.move(self.pick(n))

    @precondition(some_idle)
    @rule(n=number, rows=number)
    def rollback(self, n, rows):
        self.machine.rollback(self.pick(n), rows)

    @precondition(some_idle)
    @rule(n=number, tokens=st.sampled_from([0, 1, 1000]))
    def seed(self, n, tokens):
        self.machine.seed(self.pick(n), tokens)

    @precondition(lambda self: self.some_idle() and not self.in_step())
    @rule(chosen=flags, windows=windows, forced=flags, pads=st.integers(0, 2))
    def plan(self, chosen, windows, forced, pads):
        some = [s for i, s in enumerate(self.machine.idle) if not chosen >> i & 1]
        forced = [bool(forced >> i & 1) for i in range(len(some))]
        self.machine.plan(some, windows[: len(some)], forced, pads)

    @precondition(in_step)
    @rule(accepted=windows)
    def advance(self, accepted):
        self.machine.advance(accepted[: len(self.machine.step.sequences)])

    @precondition(in_step)
    @rule(accepted=windows)
    def complete(self, accepted):
        step = self.machine.step
        while self.machine.step is step:
            self.machine.advance(accepted[: len(step.sequences)])

    @precondition(in_step)
    @rule()
    def abort(self):
        self.machine.abort()

    @rule()
    def misuse(self):
        self.machine.misuse()

    @invariant()
    def settle(self):
        if self.machine:
            self.machine.settle()

    def teardown(self):
        if self.machine:
            self.machine.finish()


PoolMachine.TestCase.settings = hypothesis.settings(
    max_examples=12,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestPoolMachine = PoolMachine.TestCase
