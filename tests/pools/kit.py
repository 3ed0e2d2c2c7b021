"""A pool and its wrapper beside the dictionary model, and the books of a pool.

`World` feeds the same fresh random tokens to both, so that whatever is done to sequences can be
compared afterwards with float64 states that know nothing of pages, rows or folds.
"""

from __future__ import annotations

import numpy as np
import torch

from replayinfer import GDNSpec, Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    DictModel,
    assert_untouched,
    conv_inputs,
    layer_inputs,
    layer_weights,
    poison_,
    poisoned,
    relative_error,
    snapshot,
)

SPECS = {
    "mamba2": Mamba2Spec(heads=4, dim=3, state=5, groups=2),
    "gdn": GDNSpec(heads=4, dim=3, state=5, key_heads=2),
}
FORMATS = ("fp32", "fp32_split", "bf16", "fp16")
# Relative error of a state: about 100 roundings of fp32, or a few of the storage type. A row that
# is missing, doubled or in the wrong place changes the state by 1e-2 or more in these worlds.
STATE_BOUND = {"fp32": 1e-5, "fp32_split": 1e-5, "bf16": 2**-6, "fp16": 2**-8}


def random_int(rng: torch.Generator, low: int, high: int) -> int:
    """A number in low..high, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def memory(pool: StatePool) -> dict[str, torch.Tensor]:
    """The tensors that sequences live in."""
    rows = {f"rows.{name}": field for name, field in pool.inputs.fields.items()}
    return {"checkpoints": pool.checkpoints.storage, "conv": pool.conv.rows, **rows}


def poison_pool(pool: StatePool) -> None:
    """As if every page had been used before; only while no sequence lives."""
    assert pool.cursors.live.size == 0
    for tensor in memory(pool).values():
        poison_(tensor)


def books(pool: StatePool) -> dict[str, torch.Tensor]:
    """All that a refused call may not change: memory, weights, cursors, reference counts."""
    result = {**memory(pool), **{f"weights.{n}": w for n, w in pool.weights.items()}}
    for name, value in vars(pool.cursors).items():
        if isinstance(value, np.ndarray) and name != "_stamp":  # scratch of a duplicate check
            result[f"cursors.{name}"] = torch.from_numpy(value)
    for ids in (pool.slot_ids, pool.checkpoint_ids, pool.input_ids):
        result[f"{ids.name}.refs"] = torch.from_numpy(ids.refs)
        result[f"{ids.name}.free"] = torch.from_numpy(np.sort(ids._stack[: ids.free]))
    return result


class Unchanged:
    """``with Unchanged(pool):`` fails if anything in the books differs afterwards."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool

    def __enter__(self) -> None:
        self.before = snapshot(books(self.pool))

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            assert_untouched(self.before, books(self.pool))


def check_books(pool: StatePool) -> None:
    """Reference counts are what the tables say, and nothing can be written that is shared."""
    cur, live = pool.cursors, pool.cursors.live
    tables = cur.table[live]
    for ids, held in (
        (pool.slot_ids, live),
        (pool.checkpoint_ids, cur.checkpoint[live]),
        (pool.input_ids, tables[tables >= 0]),
    ):
        counts = np.bincount(held, minlength=ids.count)
        assert counts.tolist() == ids.refs.tolist(), ids.name
        free = np.sort(ids._stack[: ids.free])
        assert free.tolist() == np.flatnonzero(counts == 0).tolist(), ids.name
        assert ids.used == np.count_nonzero(counts), ids.name
    rows = pool.sizes.page_rows
    for slot in live:
        table, history = cur.table[slot], int(cur.history[slot])
        full, used = history // rows, -(-history // rows)
        assert 0 <= history <= pool.capacity
        assert cur.undo[slot] >= 0
        assert (table[:used] >= 0).all(), "a committed row has no page"
        rest = table[full:]
        assert (pool.input_ids.refs[rest[rest >= 0]] == 1).all(), "a page to write is shared"


class World:
    """A poisoned pool with bound layers, its wrapper, and the dictionary model of the same."""

    def __init__(
        self,
        spec,
        rng,
        *,
        layers=(1, 4),
        policy="full",
        buckets=None,
        max_sequences=6,
        spare=4,
        gates="realistic",
        **options,
    ) -> None:
        self.rng, self.spec, self.gates = rng, spec, gates
        capacity, rows = options.get("capacity", 16), options.get("page_rows", 8)
        options.setdefault("checkpoint_pages", spare * max_sequences)
        options.setdefault("input_pages", spare * max_sequences * -(-capacity // rows))
        self.pool = StatePool(spec, layers, max_sequences, **options)
        poison_pool(self.pool)
        self.wrapper = ReplayDecodeWrapper(
            self.pool, backend="torch", policy=policy, buckets=buckets
        )
        self.model = DictModel(spec, list(layers))
        for layer in layers:
            weights = layer_weights(spec, rng, gates)
            self.pool.bind(layer, **weights)
            self.model.bind(layer, **weights)
        self.bound = STATE_BOUND[self.pool.format.name]
        plane = torch.finfo(self.pool.format.plane_dtype).eps
        self.output_bound = max(self.bound, 4 * plane, 4 * torch.finfo(self.pool.dtype).eps)

    # Sequences ----------------------------------------------------------------------------------

    def alloc(self, count=1):
        handles = self.pool.alloc(count)
        for handle in handles:
            self.model.alloc(handle)
        return handles

    def fork(self, seq, count=1):
        handles = self.pool.fork(seq, count)
        for handle in handles:
            self.model.fork(seq, handle)
        return handles

    def free(self, seqs):
        self.pool.free(seqs)
        for seq in [seqs] if isinstance(seqs, int) else seqs:
            self.model.free(seq)

    def rollback(self, seq, rows):
        self.pool.rollback(seq, rows)
        self.model.rollback(seq, rows)

    def seed(self, seq, *, tokens, states=None, conv=None, layout="vk"):
        """Seed from given or from fresh random states and tails."""
        heads, dim, state = self.spec.state_shape
        shape = (heads, dim, state) if layout == "vk" else (heads, state, dim)
        channels, taps = self.spec.conv_channels, max(self.spec.conv_width - 1, 0)
        for layer in self.pool.layers:
            if states is None or layer not in states:
                states = {**(states or {}), layer: self.normal(*shape)}
            if taps and (conv is None or layer not in conv):
                conv = {**(conv or {}), layer: self.normal(channels, taps).to(self.pool.dtype)}
        self.pool.seed(seq, states, conv=conv, tokens=tokens, layout=layout)
        self.model.seed(seq, states, conv=conv, tokens=tokens, layout=layout)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.rng)

    # Steps --------------------------------------------------------------------------------------

    def draw(self, plan):
        """Inputs and pre-convolution rows of a plan by layer; NaN in pads and dead tokens."""
        pool = self.pool
        live = torch.arange(plan.window) < torch.from_numpy(plan.windows)[:, None]

        def padded(x):
            full = poisoned((plan.bucket, *x.shape[1:]), x.dtype)
            keep = live.view(*live.shape, *(1,) * (x.dim() - 2))
            full[: plan.batch] = torch.where(keep, x, torch.nan)
            return full

        result = {}
        for layer in pool.layers:
            args = (self.spec, plan.window, plan.batch, pool.dtype, self.rng)
            inputs = {n: padded(x) for n, x in layer_inputs(*args, self.gates).items()}
            result[layer] = (inputs, padded(conv_inputs(*args)) if self.spec.conv_width else None)
        return result

    def run(self, plan, drawn):
        """Every layer's convolution and readout: ``{layer: (conv or None, y)}``."""
        outputs = {}
        for layer, (inputs, rows) in drawn.items():
            conv = None if rows is None else self.wrapper.conv(layer, rows)
            outputs[layer] = (conv, self.wrapper.run(layer, **inputs))
        return outputs

    def step(self, windows, accepted=None, *, force=(), bucket=None, width=None):
        """One step on both sides, outputs compared: `windows` and `accepted` by handle."""
        if not isinstance(windows, dict):
            windows = dict.fromkeys(windows, 1)
        seqs = list(windows)
        plan = self.wrapper.plan(
            seqs,
            np.array(list(windows.values()), dtype=np.int64),
            bucket=bucket,
            window=width,
            force_fold=np.array([seq in force for seq in seqs], dtype=bool),
        )
        self.wrapper.fold()
        drawn = self.draw(plan)
        outputs = self.run(plan, drawn)
        counts = [(accepted or windows).get(seq, windows[seq]) for seq in seqs]
        self.wrapper.commit(np.array(counts, dtype=np.int64))
        for row, seq in enumerate(seqs):
            self._follow(row, seq, windows[seq], counts[row], drawn, outputs)
        return plan

    def _follow(self, row, seq, window, accepted, drawn, outputs):
        inputs = {
            layer: {name: x[row, :window] for name, x in given.items()}
            for layer, (given, _) in drawn.items()
        }
        rows = None
        if self.spec.conv_width:
            rows = {layer: conv[row, :window] for layer, (_, conv) in drawn.items()}
            for layer, given in rows.items():
                want = self.model.conv(seq, layer, given)
                got = outputs[layer][0][row, :window]
                assert relative_error(got, want) < self.output_bound, "convolution"
        wanted = self.model.step(seq, inputs, accepted, conv=rows)
        for layer, want in wanted.items():
            got = outputs[layer][1][row, :window]
            assert relative_error(got, want) < self.output_bound, f"output of layer {layer}"

    # Comparison ---------------------------------------------------------------------------------

    def check(self, *seqs):
        """State, tokens and convolution window of sequences (all live ones) are the model's."""
        pool, model = self.pool, self.model
        assert len(model.live()) == pool.slot_ids.used
        for seq in seqs or model.live():
            assert pool.tokens(seq) == model.tokens(seq)
            error = relative_error(self.wrapper.materialize(seq), model.materialize(seq), keep=[0])
            assert error < self.bound, f"state of {seq}: {error}"
            if self.spec.conv_width:
                want = torch.stack([model.conv_window(seq, layer) for layer in pool.layers])
                assert torch.equal(pool.conv_tail(seq), want.mT.to(pool.dtype)), f"tail of {seq}"
        check_books(pool)

    def grow(self, seq, rows):
        """Commit `rows` tokens, in windows of at most max_window."""
        while rows > 0:
            window = min(rows, self.pool.max_window)
            self.step({seq: window})
            rows -= window
