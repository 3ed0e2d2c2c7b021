"""Long random runs against the dictionary model, each step direct or replayed as it comes."""

import random

import numpy as np
import pytest

from replayinfer import InputError, PlanError
from replayinfer.testing import assert_untouched, snapshot

from ..property.invariants import everything
from ..property.machine import Machine, Step
from ..property.test_random import drive

OPERATIONS = 400


class DirectMachine(Machine):
    """Every other step that can be is direct; what must be refused in it is tried first."""

    def __init__(self, family, rng, **config):
        super().__init__(family, rng, policy="full", **config)
        self.counts |= {"direct": 0, "dropped": 0}

    def plan(self, sequences, windows, forced, pads=0):
        if self.counts["operations"] % 2:
            super().plan(sequences, windows, forced, pads)
            return
        windows = np.minimum(np.array(windows, dtype=np.int64), 1)
        plan = self.attempt(
            lambda: self.wrapper.plan(
                sequences, windows, force_fold=np.array(forced, dtype=bool),
                bucket=len(sequences) + pads or None, direct=True,
            )
        )  # fmt: skip
        if plan is not None:
            assert plan.direct
            assert not plan.taken_inputs.size
            self.step = Step(sequences, windows, plan)
            self.counts["direct"] += 1

    def commit(self, accepted):
        step = self.step
        if not step.plan.direct:
            super().commit(accepted)
            return
        super().commit(step.windows)
        for seq in step.sequences:
            self.undo[seq] = 0

    def abort(self):
        if not self.step.plan.moved:
            super().abort()
            return
        self.refused()
        step, self.step = self.step, None
        self.wrapper.abort(free=True)
        for seq, window in zip(step.sequences, step.windows, strict=True):
            if window:
                self.model.free(seq)
                self.live.remove(seq)
                self.stale.append(seq)
                self.counts["dropped"] += 1
            else:
                self.undo[seq] = min(self.undo[seq], self.pool.max_window)
                self.check(seq)

    def refused(self):
        """What a step whose states have moved does not do."""
        step, wrapper = self.step, self.wrapper
        layer, inputs = next(iter(step.inputs.items()))
        for error, call in [
            (PlanError, wrapper.abort),
            (InputError, lambda: wrapper.commit(0 * step.windows)),
            (PlanError, lambda: wrapper.run(layer, **inputs)),
        ]:
            before = snapshot(everything(self.pool))
            with pytest.raises(error):
                call()
            assert_untouched(before, everything(self.pool))


@pytest.mark.parametrize(
    ("family", "format", "restore"),
    [("mamba2", "fp32", "any"), ("gdn", "fp32_split", "window"), ("kda", "fp32_split", "any")],
)
def test_pool_and_model_agree(family, format, restore, rng):
    machine = DirectMachine(family, rng, format=format, restore=restore)
    pick = random.Random(rng.initial_seed())
    for _ in range(OPERATIONS):
        drive(machine, pick)
        machine.settle()
    if machine.step and machine.step.plan.moved:
        machine.advance(machine.step.windows)
    for seq in machine.live:
        machine.check(seq)
    machine.finish()
    counts = machine.counts
    assert counts["direct"] > OPERATIONS // 40
    assert counts["tokens"] > OPERATIONS // 20
    assert counts["folds"] > OPERATIONS // 60
