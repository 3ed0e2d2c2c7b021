"""A small pool under a wrapper, and the dictionary model that must agree with it after anything.

Operations take plain numbers, so that a seeded driver and hypothesis can both pick them. An
operation that the pool refuses for want of room must leave everything as it was, and is not applied
to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from replayinfer import (
    CapacityError,
    GDNSpec,
    KDASpec,
    LayerSpec,
    Mamba2Spec,
    ReplayDecodeWrapper,
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
    plan: object
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
            checkpoint_pages=5, input_pages=13, restore=restore,
        )  # fmt: skip
        self.model = DictModel(self.spec, LAYERS)
        self.wrapper = ReplayDecodeWrapper(self.pool, policy=policy)
        self.step: Step | None = None
        self.live: list[int] = []
        self.undo: dict[int, int] = {}  # rows that a rollback may drop
        self.counts = dict.fromkeys(("operations", "refused", "tokens", "folds"), 0)
        self.bank = {}
        for layer in LAYERS:
            weights = layer_weights(self.spec, rng)
            self.pool.bind(layer, **weights)
            self.model.bind(layer, **weights)
            self.bank[layer] = layer_inputs(self.spec, BANK, 1, torch.float32, rng)
            self.bank[layer]["rows"] = conv_inputs(self.spec, BANK, 1, torch.float32, rng)
        self.poison()

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

    def fork(self, seq: int, count: int) -> None:
        for child in self.attempt(lambda: self.pool.fork(seq, count)) or []:
            self.model.fork(seq, child)
            self.live.append(child)
            self.undo[child] = self.undo[seq]
            self.check(child)

    def rollback(self, seq: int, rows: int) -> None:
        """At most as many rows as may be dropped."""
        history = self.pool.history(seq)
        limit = history if self.restore == "any" else min(self.undo[seq], history)
        rows = min(rows, limit)
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
                want = self.model.step(seq, inputs, int(accepted[i]), conv=rows)
                for n in LAYERS:
                    error = peak_error(step.y[n][i, :w], want[n])
                    assert error < self.readout_bound, f"outputs of layer {n}: {error}"
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
        """Largest error of an output, relative to the largest output.

        A readout of a plane rounded to 2^-9 of each element sums some ten of these errors; one in
        fp32 some ten of 2^-24. Both leave an order of magnitude for cancellation.
        """
        return 100 * (2**-9 if self.pool.format.rounded_readout else 2**-24)

    def attempt(self, call):
        """Call; a refusal for want of room must be true and must change nothing."""
        before = snapshot(self.everything())
        try:
            return call()
        except CapacityError as error:
            assert_untouched(before, self.everything())
            assert error.needed > error.free >= 0
            assert error.free == self.allocators()[error.pool].free
            self.counts["refused"] += 1
            return None

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
        self.check_references()
        if not self.step or not self.step.y:
            self.poison()

    def allocators(self):
        ids = (self.pool.slot_ids, self.pool.checkpoint_ids, self.pool.input_ids)
        return {p.name: p for p in ids}

    def check_references(self) -> None:
        """Counts equal occurrences; what the next rows overwrite is private; nothing is lost."""
        pool, cur = self.pool, self.pool.cursors
        live, R = cur.live, pool.sizes.page_rows
        planned = self.step.plan if self.step and self.step.plan.state == "planned" else None
        held = {
            "sequence slots": [live],
            "checkpoint pages": [cur.checkpoint[live]],
            "input pages": [cur.table[live][cur.table[live] >= 0]],
        }
        if planned:  # pages that a plan has taken and no cursor shows yet
            held["checkpoint pages"].append(planned.taken_checkpoints)
            held["input pages"].append(planned.taken_inputs)
        for name, ids in self.allocators().items():
            counts = np.bincount(np.concatenate(held[name]), minlength=ids.count)
            assert (ids.refs == counts).all(), f"{name}: {ids.refs} for {counts}"
            assert ids.free + ids.used == ids.count
            stack = ids._stack[: ids.free]
            assert sorted(stack) == np.flatnonzero(counts == 0).tolist(), f"{name}: free list"
        assert len(live) == len(self.live)

        history, table = cur.history[live], cur.table[live]
        assert ((history >= 0) & (history <= pool.capacity)).all()
        place = np.arange(table.shape[1])
        assert (table[place < -(-history[:, None] // R)] >= 0).all(), "a row without a page"
        writable = (place >= history[:, None] // R) & (table >= 0)
        assert (pool.input_ids.refs[table[writable]] == 1).all(), "the next row is in a shared page"
        slots = [cur.peek(s) for s in (self.step.sequences if self.step else [])]
        assert set(np.flatnonzero(cur.busy)) == set(slots)
        if self.step:
            plan = self.step.plan
            for i in range(plan.batch):
                row = plan.starts[i] + np.arange(plan.windows[i])
                assert (pool.input_ids.refs[plan.table[i][row // R]] == 1).all(), "window rows"
            if planned:
                target = plan.pages[plan.fold_index]
                assert (pool.checkpoint_ids.refs[target] == 1).all(), "a fold into a shared page"

    def everything(self) -> dict[str, torch.Tensor]:
        """All that a refused call must leave alone."""
        pool, cur = self.pool, self.pool.cursors
        named = {"checkpoints": pool.checkpoints.storage, "conv": pool.conv.rows}
        named |= {f"row {name}": t for name, t in pool.inputs.fields.items()}
        for name in ("base", "history", "undo", "checkpoint", "table", "generation", "busy"):
            named[f"cursor {name}"] = torch.from_numpy(getattr(cur, name))
        for name, ids in self.allocators().items():
            named[f"{name} refs"] = torch.from_numpy(ids.refs)
            named[f"{name} stack"] = torch.from_numpy(ids._stack[: ids.free])
        return named

    def poison(self) -> None:
        """NaN into dead rows, free pages, and rings but for the rows that are still needed."""
        pool, cur = self.pool, self.pool.cursors
        live, R = cur.live, pool.sizes.page_rows
        kept = torch.zeros(pool.sizes.input_pages, R, dtype=torch.bool)
        seq, row = np.nonzero(np.arange(pool.capacity) < cur.history[live][:, None])
        kept[cur.table[live][seq, row // R], row % R] = True
        for values in pool.inputs.fields.values():
            values[:, ~kept] = np.nan
        free = torch.from_numpy(pool.checkpoint_ids.refs == 0)
        nan = 0x7FC0 if pool.checkpoints.storage.dtype == torch.int16 else np.nan
        pool.checkpoints.storage[:, free] = nan
        tokens = cur.base[live] + cur.history[live]
        oldest = pool.conv.taps + (cur.history if self.restore == "any" else cur.undo)[live]
        age = np.arange(1, pool.conv.ring + 1)
        seq, back = np.nonzero(age <= oldest[:, None])
        ring = torch.zeros(pool.sizes.max_sequences, pool.conv.ring, dtype=torch.bool)
        ring[live[seq], (tokens[seq] - age[back]) % pool.conv.ring] = True
        pool.conv.rows[:, ~ring] = np.nan
