"""A small pool under a wrapper, and the dictionary model that must agree with it after anything.

Operations take plain numbers, so that a seeded driver and hypothesis can both pick them. An
operation that the pool refuses for want of room must leave everything as it was, and is not applied
to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from replayinfer import (
    CapacityError,
    GDNSpec,
    InputError,
    KDASpec,
    LayerSpec,
    Mamba2Spec,
    Plan,
    PlanError,
    ReplayDecodeWrapper,
    StaleHandleError,
    StatePool,
)
from replayinfer.testing import (
    DictModel,
    assert_bitwise_equal,
    assert_untouched,
    conv_inputs,
    initial_states,
    layer_inputs,
    layer_weights,
    peak_error,
    relative_error,
    snapshot,
    split_channels,
)

from .invariants import allocators, check_references, everything, poison

LAYERS = [0, 3]
EPSILON = torch.finfo(torch.float32).eps
BANK = 61  # tokens that windows are drawn from

SPECS: dict[str, LayerSpec] = {
    "mamba2": Mamba2Spec(heads=2, dim=4, state=8, conv_width=3),
    "gdn": GDNSpec(heads=2, dim=4, state=8, key_heads=1, conv_width=3),
    "kda": KDASpec(heads=2, dim=4, state=8, key_heads=2, conv_width=3),
}


@dataclass
class Step:
    """A plan between its calls."""

    sequences: list[int]
    windows: np.ndarray
    plan: Plan
    rows: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, before the convolution
    inputs: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    y: dict[int, torch.Tensor] = field(default_factory=dict)


class Machine:
    """Pages are scarce on purpose: fewer than the sequences need that share nothing."""

    def __init__(
        self, family: str, rng: torch.Generator, *, format: str, policy: str, restore: str
    ):
        self.spec, self.rng, self.restore = SPECS[family], rng, restore
        self.pool = StatePool(
            self.spec, LAYERS, 6, capacity=7, max_window=3, page_rows=2, format=format,
            checkpoint_pages=5, input_pages=15, restore=restore,
        )  # fmt: skip
        self.model = DictModel(self.spec, LAYERS)
        self.wrapper = ReplayDecodeWrapper(self.pool, policy=policy)
        self.step: Step | None = None
        self.live: list[int] = []
        self.stale: list[int] = []
        self.undo: dict[int, int] = {}  # rows that the last commit added, what was dropped apart
        self.counts = dict.fromkeys(("operations", "refused", "tokens", "folds"), 0)
        self.bank = {}
        for layer in LAYERS:
            weights = layer_weights(self.spec, rng)
            self.pool.bind(layer, **weights)
            self.model.bind(layer, **weights)
            self.bank[layer] = layer_inputs(self.spec, BANK, 1, torch.float32, rng)
            self.bank[layer]["rows"] = conv_inputs(self.spec, BANK, 1, torch.float32, rng)
        poison(self.pool)

    # Operations -------------------------------------------------------------------------------

    @property
    def idle(self) -> list[int]:
        """Sequences that no plan holds."""
        held = self.step.sequences if self.step else []
        return [s for s in self.live if s not in held]

    def alloc(self, count: int) -> None:
        for seq in self.attempt(lambda: self.pool.alloc(count)) or []:
            self.model.alloc(seq)
            self.live.append(seq)
            self.undo[seq] = 0
            self.check(seq)

    def free(self, sequences: list[int]) -> None:
        self.pool.free(sequences)
        for seq in sequences:
            self.model.free(seq)
            self.live.remove(seq)
            self.stale.append(seq)

    def fork(self, seq: int, count: int, drop: int = 0) -> None:
        """Copies; with `drop`, of the sequence as it was some rows earlier."""
        drop = min(drop, self.limit(seq))
        rows = self.pool.history(seq) - drop if drop else None
        for child in self.attempt(lambda: self.pool.fork(seq, count, rows=rows)) or []:
            self.model.fork(seq, child)
            self.model.rollback(child, drop)
            self.live.append(child)
            self.undo[child] = max(self.undo[seq] - drop, 0)
            self.check(child)

    def move(self, seq: int) -> None:
        """A copy by way of the host."""
        taken = self.pool.export(seq)
        copy = self.attempt(lambda: self.pool.import_(taken))
        if copy is not None:
            self.model.fork(seq, copy)
            self.live.append(copy)
            self.undo[copy] = 0
            self.check(copy)

    def limit(self, seq: int) -> int:
        """How many rows a rollback may drop."""
        history = self.pool.history(seq)
        return history if self.restore == "any" else min(self.undo[seq], history)

    def rollback(self, seq: int, rows: int) -> None:
        """At most as many rows as may be dropped."""
        rows = min(rows, self.limit(seq))
        if self.attempt(lambda: self.pool.rollback(seq, rows) or True):
            self.model.rollback(seq, rows)
            self.undo[seq] = max(self.undo[seq] - rows, 0)
            self.check(seq)

    def seed(self, seq: int, tokens: int) -> None:
        states = {n: initial_states(self.spec, 1, self.rng)[0] for n in LAYERS}
        tail = {n: self.bank[n]["rows"][0, tokens % 50 :][:2].mT.contiguous() for n in LAYERS}
        if self.attempt(lambda: self.pool.seed(seq, states, tokens=tokens, conv=tail) or True):
            self.model.seed(seq, states, conv=tail, tokens=tokens)
            self.undo[seq] = 0
            self.check(seq)

    def plan(self, sequences: list[int], windows, forced, pads: int = 0) -> None:
        windows, forced = np.array(windows, dtype=np.int64), np.array(forced, dtype=bool)
        bucket = len(sequences) + pads
        plan = self.attempt(
            lambda: self.wrapper.plan(sequences, windows, force_fold=forced, bucket=bucket or None)
        )
        if plan is not None:
            self.step = Step(sequences, windows, plan)

    def fold(self) -> None:
        self.wrapper.fold()
        self.counts["folds"] += self.step.plan.fold_count
        for seq in self.step.sequences:
            self.check(seq)

    def run(self) -> None:
        """All layers: the convolution of fresh rows, and the readout of what it gives."""
        step, plan = self.step, self.step.plan
        for layer in LAYERS:
            index = torch.randint(0, BANK, (plan.bucket, plan.window), generator=self.rng)
            drawn = {name: t[0][index] for name, t in self.bank[layer].items()}
            step.rows[layer] = drawn.pop("rows")
            out = torch.full(step.rows[layer].shape, np.nan)
            convolved = self.wrapper.conv(layer, step.rows[layer], out=out)
            for i, seq in enumerate(step.sequences):
                if w := step.windows[i]:
                    want = self.model.conv(seq, layer, step.rows[layer][i, :w])
                    assert peak_error(convolved[i, :w], want) < 16 * EPSILON, "convolution"
            step.inputs[layer] = drawn | split_channels(self.spec, convolved)
            out = torch.full((plan.bucket, plan.window, self.spec.heads, self.spec.dim), np.nan)
            step.y[layer] = self.wrapper.run(layer, out=out, **step.inputs[layer])

    def commit(self, accepted) -> None:
        step, self.step = self.step, None
        accepted = np.minimum(np.array(accepted, dtype=np.int64), step.windows)
        self.wrapper.commit(accepted)
        self.counts["tokens"] += int(accepted.sum())
        for i, (seq, w) in enumerate(zip(step.sequences, step.windows, strict=True)):
            self.undo[seq] = int(accepted[i])
            for y in step.y.values():
                assert not y[i, w:].any(), "a dead token has an output"
            if w:
                inputs = {n: {name: t[i, :w] for name, t in step.inputs[n].items()} for n in LAYERS}
                rows = {n: step.rows[n][i, :w] for n in LAYERS}
                want = self.model.step(seq, inputs, conv=rows)
                for n in LAYERS:
                    # Outputs may cancel; what counts is the size of what they are sums of.
                    size = self.model.state(seq, n).norm() * self.spec.state**-0.5
                    size = max(size, want[n].abs().max())
                    error = (step.y[n][i, :w] - want[n]).abs().max() / size
                    assert error < self.readout_bound, f"outputs of layer {n}: {error}"
                self.model.rollback(seq, int(w - accepted[i]))
            self.check(seq)
        for y in step.y.values():
            assert not y[len(step.sequences) :].any(), "a pad has an output"

    def abort(self) -> None:
        step, self.step = self.step, None
        if step.plan.state == "folded":
            room = self.pool.max_window - step.windows
            for seq, left in zip(step.sequences, room, strict=True):
                self.undo[seq] = min(self.undo[seq], int(left))
        self.wrapper.abort()
        for seq in step.sequences:
            self.check(seq)

    def advance(self, accepted) -> None:
        """The next call of the step."""
        if self.step.plan.state == "planned":
            self.fold()
        elif not self.step.y and self.step.windows.any():
            self.run()
        else:
            self.commit(accepted)

    def finish(self) -> None:
        """End everything; nothing may be left."""
        if self.step:
            self.abort()
        self.free(list(self.live))
        self.settle()
        assert not any(self.pool.pages_in_use().values()), "pages leaked"

    # What must hold ---------------------------------------------------------------------------

    @property
    def readout_bound(self) -> float:
        """Largest error of an output, relative to the terms that it is a sum of.

        Each of some ten terms is rounded by 2^-24, or by 2^-9 where readouts see a rounded plane.
        """
        return 30 * (2**-9 if self.pool.format.rounded_readout else 2**-24)

    def attempt(self, call):
        """Call; a refusal for want of room must be true and must change nothing."""
        before, refusal = snapshot(everything(self.pool)), None
        try:
            return call()
        except CapacityError as error:
            refusal = error
        assert_untouched(before, everything(self.pool))
        assert refusal.needed > refusal.free >= 0
        assert refusal.free == allocators(self.pool)[refusal.pool].free
        self.counts["refused"] += 1
        return None

    def misuse(self) -> None:
        """Everything that may not be called now is refused and changes nothing."""
        pool, wrapper, step = self.pool, self.wrapper, self.step
        wrong = []
        for seq in self.stale[-1:]:
            wrong += [(StaleHandleError, lambda s=seq: pool.free([*self.idle, s]))]
            wrong += [(StaleHandleError, lambda s=seq: pool.fork(s))]
        for seq in self.idle[:1]:
            over = self.limit(seq) + 1
            wrong += [(InputError, lambda s=seq, r=over: pool.rollback(s, r))]
            wrong += [(InputError, lambda s=seq: pool.free([s, s]))]
            if not step:
                wrong += [(InputError, lambda s=seq: wrapper.plan([s], 4))]
                wrong += [(InputError, lambda s=seq: wrapper.plan([s], 1, bucket=0))]
        if step:
            wrong += [(PlanError, lambda: wrapper.plan(self.idle))]
            for seq in step.sequences[:1]:
                wrong += [(PlanError, lambda s=seq: pool.free([*self.idle, s]))]
                wrong += [(PlanError, lambda s=seq: pool.rollback(s, 0))]
            if step.plan.state == "planned" or (not step.y and step.windows.any()):
                wrong += [(PlanError, wrapper.commit)]
            elif step.sequences:
                wrong += [(InputError, lambda: wrapper.commit(step.windows + 1))]
        for error, call in wrong:
            before = snapshot(everything(self.pool))
            with pytest.raises(error):
                call()
            assert_untouched(before, everything(self.pool))

    def check(self, seq: int) -> None:
        """One sequence is what the model says: tokens, states, convolution windows."""
        assert self.pool.tokens(seq) == self.model.tokens(seq)
        states, tails = self.wrapper.materialize(seq), self.pool.conv_tail(seq)
        # Every token adds a few roundings of the size of the state, and none of them grows.
        bound = EPSILON * (16 + self.model.committed(seq))
        for i, layer in enumerate(LAYERS):
            error = relative_error(states[i], self.model.state(seq, layer))
            assert error < bound, f"state of layer {layer}: {error} > {bound}"
            assert_bitwise_equal(tails[i].mT, self.model.conv_window(seq, layer).float())

    def settle(self) -> None:
        """After every operation: the invariants, then NaN wherever nothing may be read."""
        self.counts["operations"] += 1
        check_references(self.pool, self.step.plan if self.step else None)
        assert set(self.live) == set(self.model.live())
        assert self.pool.slot_ids.used == len(self.live)
        if not self.step or not self.step.y:  # the rows of a window that ran are wanted
            poison(self.pool)
