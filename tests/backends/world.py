"""One layer decoded through the wrapper, with NaN wherever nothing may be read.

A `Case` says what is decoded, a `World` decodes it: mixed windows whose rejected drafts are junk, a
padded bucket, NaN in pads, dead tokens, outputs, dead rows, free pages and old convolution rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from replayinfer import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    assert_no_poison,
    assert_within_budget,
    initial_states,
    layer_inputs,
    layer_weights,
    poison_,
    recurrence,
    relative_error,
)

# The base layer of every family; all tests of this folder run over it. Six heads, so that each of
# the extreme decay rates has one.
FAMILIES: dict[str, LayerSpec] = {
    "mamba2": Mamba2Spec(heads=6, dim=8, state=16, groups=3, conv_width=0),
    "gdn": GDNSpec(heads=6, dim=8, state=16, key_heads=3, conv_width=0),
    "kda": KDASpec(heads=6, dim=8, state=16, key_heads=3, conv_width=0),
}
SEEDED_TOKENS = 7
LAYER = 5
EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case:
    spec: LayerSpec
    tokens: int = 40
    batch: int = 3
    pads: int = 2
    capacity: int = 8
    max_window: int = 3
    page_rows: int | None = 4
    format: str = "fp32"
    dtype: torch.dtype = torch.float32  # of the activations
    gate_dtype: torch.dtype | None = None  # of dt, a, g, b; None: as the activations
    gates: str = "realistic"
    policy: str = "full"
    z: bool = False
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.spec.family

    def but(self, **changes) -> Case:
        """This case with other values of its own fields or of its spec's."""
        own = {f.name for f in dataclasses.fields(self)}
        inner = {name: value for name, value in changes.items() if name not in own}
        outer = {name: value for name, value in changes.items() if name in own}
        if inner:
            outer["spec"] = dataclasses.replace(outer.get("spec", self.spec), **inner)
        shown = ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changes.items())
        return dataclasses.replace(self, label=f"{self.spec.family}-{shown}", **outer)


BASES = [Case(spec) for spec in FAMILIES.values()]


def vary(bases, **choices) -> list[Case]:
    """Each base with every one of the choices, one at a time; names a spec lacks are skipped."""
    cases = []
    for base, (name, values) in itertools.product(bases, choices.items()):
        if hasattr(base, name) or hasattr(base.spec, name):
            cases += [base.but(**{name: value}) for value in values]
    return cases


def poison_dead(pool: StatePool) -> None:
    """Put NaN wherever a pool may hold anything: dead rows, free pages, old convolution rows."""
    pool.refresh()
    cur, rows = pool.cursors, pool.sizes.page_rows
    live = cur.live
    kept = torch.zeros(pool.sizes.input_pages, rows, dtype=torch.bool)
    seq, row = np.nonzero(np.arange(pool.capacity) < cur.history[live][:, None])
    kept[cur.table[live][seq, row // rows], row % rows] = True
    for field in pool.inputs.fields.values():
        field[:, ~kept] = float("nan")
    free = torch.from_numpy(pool.checkpoint_ids.refs == 0)
    pool.checkpoints.storage[:, free] = poison_(pool.checkpoints.storage.new_empty(()))
    if pool.conv.taps:
        tokens = cur.base[live] + cur.history[live]
        oldest = pool.conv.taps + (cur.history if pool.restore == "any" else cur.undo)[live]
        age = np.arange(1, pool.conv.ring + 1)
        seq, back = np.nonzero(age <= oldest[:, None])
        kept = torch.zeros(pool.sizes.max_sequences, pool.conv.ring, dtype=torch.bool)
        kept[live[seq], (tokens[seq] - age[back]) % pool.conv.ring] = True
        pool.conv.rows[:, ~kept] = float("nan")


class World:
    """`case.batch` sequences of one layer, and for each a stream of tokens to decode.

    `weights`, `stream` and `start` replace what would be drawn; other options are the pool's.
    """

    def __init__(
        self,
        case: Case,
        rng: torch.Generator,
        *,
        weights=None,
        stream=None,
        start=None,
        backend="auto",
        **options,
    ) -> None:
        self.case, self.rng = case, rng
        spec, n = case.spec, case.batch
        self.pool = pool = StatePool(
            spec, [LAYER], n, capacity=case.capacity, max_window=case.max_window,
            format=case.format, dtype=case.dtype, page_rows=case.page_rows, **options,
        )  # fmt: skip
        poison_dead(pool)
        self.weights = layer_weights(spec, rng, case.gates) if weights is None else weights
        pool.bind(LAYER, **self.weights)
        self.wrapper = ReplayDecodeWrapper(pool, policy=case.policy, backend=backend)
        self.stream = self.draw(case.tokens, case.gates) if stream is None else stream
        # After the stream: junk for rejected drafts, then one token of NaN.
        junk = self.draw(8, "strong")
        activations = {f.name for f in spec.input_fields if f.kind == "activation"}
        self._feed = {
            name: torch.cat(
                [t, junk[name] * (8 if name in activations else 1), t[:, :1] * np.nan], 1
            )
            for name, t in self.stream.items()
        }
        self.start = initial_states(spec, n, rng) if start is None else start
        self.sequences = pool.alloc(n)
        for seq, state in zip(self.sequences, self.start, strict=True):
            pool.seed(seq, {LAYER: state}, tokens=SEEDED_TOKENS)
        self.done = np.zeros(n, dtype=np.int64)  # committed tokens of each stream
        self.y = torch.full((n, case.tokens, spec.heads, spec.dim), np.nan)

    def draw(self, tokens: int, gates: str) -> dict[str, torch.Tensor]:
        """Fresh inputs ``[batch, tokens, ...]``."""
        case, gate_dtype = self.case, self.case.gate_dtype or self.case.dtype
        inputs = layer_inputs(case.spec, tokens, case.batch, torch.float32, self.rng, gates)
        if case.z:
            inputs["z"] = torch.randn(inputs["x"].shape, generator=self.rng)
        kinds = {field.name: field.kind for field in case.spec.input_fields}
        return {
            name: t.to(gate_dtype if kinds[name] == "gate" else case.dtype)
            for name, t in inputs.items()
        }

    def feed(self, who, windows, accepted, bucket: int, width: int) -> dict[str, torch.Tensor]:
        """The padded inputs of a step: accepted tokens, junk for the rejected ones, NaN beyond."""
        tokens, token = self.case.tokens, np.arange(width)
        index = self.done[who, None] + token
        index = np.where(token < accepted[:, None], index, tokens + token % 8)
        index = np.where(token < windows[:, None], index, tokens + 8)
        rows, index = torch.from_numpy(who)[:, None], torch.from_numpy(index)
        inputs = {}
        for name, feed in self._feed.items():
            inputs[name] = feed.new_full((bucket, width, *feed.shape[2:]), np.nan)
            inputs[name][: who.size] = feed[rows, index]
        return inputs

    def step(self, windows, accepted, *, who=None, pads=None, **options) -> torch.Tensor:
        """One step of the sequences `who` (all), of which each takes `accepted` of its stream.

        Returns the outputs ``[bucket, window, heads, dim]``.
        """
        windows, accepted = (np.asarray(a, dtype=np.int64) for a in (windows, accepted))
        who = np.arange(self.case.batch) if who is None else np.asarray(who)
        bucket = who.size + (self.case.pads if pads is None else pads)
        sequences = [self.sequences[i] for i in who]
        plan = self.wrapper.plan(sequences, windows, bucket=bucket, **options)
        self.wrapper.fold()
        out = torch.full((bucket, plan.window, *self.y.shape[2:]), np.nan)
        self.wrapper.run(LAYER, out=out, **self.feed(who, windows, accepted, bucket, plan.window))
        live = torch.zeros(bucket, plan.window, dtype=torch.bool)
        live[: who.size] = torch.from_numpy(np.arange(plan.window) < windows[:, None])
        assert_no_poison(out, "out")
        assert not out[~live].any(), "a pad or a dead token has an output"
        for row, i in enumerate(who):
            self.y[i, self.done[i] : self.done[i] + accepted[row]] = out[row, : accepted[row]]
        self.wrapper.commit(accepted)
        self.done[who] += accepted
        poison_dead(self.pool)
        return out

    def random_step(self) -> None:
        """A step with mixed windows, of which a random part is accepted."""
        most, left = self.case.max_window, self.case.tokens - self.done
        pick = torch.randint(0, 20, (2, self.case.batch), generator=self.rng).numpy()
        # Mostly whole windows; one in twenty is empty, so that all sequences drift apart.
        windows = np.where(pick[0] < 14, most, np.minimum(pick[0] - 14, most))
        accepted = np.where(pick[1] < 12, windows, pick[1] % (windows + 1))
        self.step(windows, np.minimum(accepted, left))

    def decode(self) -> World:
        """Decode all streams to their ends."""
        while (self.done < self.case.tokens).any():
            self.random_step()
        assert_no_poison(self.y)
        return self

    # What it should be ------------------------------------------------------------------------

    def oracle(self, dtype: torch.dtype = torch.float64, trace: list | None = None):
        """The family's recurrence over the streams: outputs and final states.

        In float32 it rounds the state to what the format keeps, at the start (a seed is rounded
        too) and after every token. `trace` takes the states, the first one included.
        """
        fmt, start = self.pool.format, self.start
        rounding = None if fmt.lossless or dtype == torch.float64 else fmt.plane_dtype
        if rounding:
            start = start.to(rounding).float()
        if trace is not None:
            trace.append(start.to(dtype))
        return recurrence(
            self.case.spec, start, self.stream, self.weights, dtype,
            state_rounding=rounding, trace=trace,
        )  # fmt: skip

    def trace(self, dtype: torch.dtype) -> torch.Tensor:
        """The states before the first and after every token: ``[batch, 1 + tokens, ...]``."""
        states: list[torch.Tensor] = []
        self.oracle(dtype, states)
        return torch.stack(states, dim=1)

    @cached_property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.oracle()

    @cached_property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of a plain fp32 computation that rounds where the format rounds."""
        y, state = self.oracle(torch.float32)
        if self.pool.format.rounded_readout:
            # A kernel that keeps the state in fp32 and reads it rounded, token by token.
            before = self.trace(torch.float32)[:, :-1].to(self.pool.format.plane_dtype)
            tokens = {name: t[:, :, None] for name, t in self.stream.items()}
            y, _ = recurrence(self.case.spec, before, tokens, self.weights, torch.float32)
            y = y[:, :, 0]
        return y, state

    def states(self) -> torch.Tensor:
        """The pool's states after all committed tokens, ``[batch, heads, dim, state]``."""
        return torch.stack([self.wrapper.materialize(s)[0] for s in self.sequences])

    def check(self, factor: float = 3.0, floor: float = EPSILON) -> None:
        """Outputs and states are as near to the oracle as the format allows, in every head.

        An error of `floor` is always granted.
        """
        for name, got, exact, plain in zip(
            ("y", "state"), (self.y, self.states()), self.exact, self.plain, strict=True
        ):
            least = max(floor, torch.finfo(got.dtype).eps)
            assert_within_budget(
                got, exact=exact, rounded=plain, factor=factor, floor=least, name=name
            )
            head = 2 if name == "y" else 1
            for h in range(self.case.spec.heads):
                g, e, p = (t.select(head, h) for t in (got, exact, plain))
                error, budget = relative_error(g, e), factor * relative_error(p, e)
                assert error <= max(budget, floor), f"{name}, head {h}: {error} > {budget}"
