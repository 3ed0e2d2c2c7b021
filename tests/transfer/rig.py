"""A pool with bound layers that takes tokens as streams, by decoding or by prefill.

A `Stream` is what one sequence is fed in every layer. A `Rig` puts parts of streams through a pool;
two rigs with the same weights and streams that got there differently can be compared bit for bit,
and `Rig.check` holds what came out against the float64 recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from replayinfer import (
    GDNSpec,
    KDASpec,
    Mamba2Spec,
    ReplayDecodeWrapper,
    ReplayPrefillWrapper,
    StatePool,
    materialize,
)
from replayinfer.testing import (
    assert_bitwise_equal,
    assert_no_poison,
    assert_within_budget,
    causal_conv,
    conv_inputs,
    layer_inputs,
    layer_weights,
    recurrence,
)

from ..backends.world import poison_dead
from ..pools.kit import poison_pool

SPECS = {
    "mamba2": Mamba2Spec(heads=4, dim=3, state=5, groups=2),
    "gdn": GDNSpec(heads=4, dim=3, state=5, key_heads=2),
    "kda": KDASpec(heads=4, dim=3, state=5, key_heads=2),
    "kda-bounded": KDASpec(heads=4, dim=3, state=5, key_heads=2, gate="bounded"),
}
FAMILIES = {name: SPECS[name] for name in ("mamba2", "gdn", "kda")}
FORMATS = ("fp32", "fp32_split", "bf16", "fp16")
# For tests that need not see every pair: the lossless formats with each family, since a fold of
# fp32_split solves where one of fp32 does not, and the rounded ones.
CASES = [
    pytest.param(SPECS[family], format, id=f"{family}-{format}")
    for family, format in (
        ("mamba2", "fp32"),
        ("gdn", "fp32"),
        ("kda-bounded", "fp32"),
        ("mamba2", "fp32_split"),
        ("gdn", "fp32_split"),
        ("kda", "fp32_split"),
        ("gdn", "bf16"),
        ("mamba2", "fp16"),
    )
]
LAYERS = (1, 4)
# What the smallest tensors are granted: four roundings of float32.
FLOOR = 2.0**-21

Outputs = dict[str, torch.Tensor]
"""By kind and layer, e.g. ``"y 4"`` or ``"conv 4"``: ``[tokens, ...]`` of one sequence."""


@dataclass(frozen=True)
class Stream:
    """Tokens of one sequence: inputs ``{layer: {name: [tokens, ...]}}`` and convolution rows."""

    inputs: dict[int, dict[str, torch.Tensor]]
    rows: dict[int, torch.Tensor]  # [tokens, channels]

    def __len__(self) -> int:
        return next(iter(self.rows.values())).shape[0]

    def __getitem__(self, index) -> Stream:
        """Some of the tokens, by a slice or a list of positions."""
        inputs = {
            layer: {name: x[index] for name, x in named.items()}
            for layer, named in self.inputs.items()
        }
        return Stream(inputs, {layer: x[index] for layer, x in self.rows.items()})


def draw(spec, tokens, rng, *, dtype=torch.float32, gates="realistic", layers=LAYERS) -> Stream:
    """Fresh tokens."""
    inputs, rows = {}, {}
    for layer in layers:
        args = (spec, tokens, 1, dtype, rng)
        inputs[layer] = {name: x[0] for name, x in layer_inputs(*args, gates).items()}
        rows[layer] = conv_inputs(*args)[0]
    return Stream(inputs, rows)


def join(parts: list[Stream]) -> Stream:
    """The tokens of all parts, one after the other."""
    first = parts[0]
    inputs = {
        layer: {name: torch.cat([p.inputs[layer][name] for p in parts]) for name in named}
        for layer, named in first.inputs.items()
    }
    return Stream(inputs, {n: torch.cat([p.rows[n] for p in parts]) for n in first.rows})


def joined(outputs: list[Outputs]) -> Outputs:
    return {key: torch.cat([out[key] for out in outputs]) for key in outputs[0]}


def padded(parts: list[torch.Tensor], bucket: int, width: int) -> torch.Tensor:
    """``[bucket, width, ...]`` with NaN wherever there is no token."""
    full = parts[0].new_full((bucket, width, *parts[0].shape[1:]), torch.nan)
    for row, part in enumerate(parts):
        full[row, : part.shape[0]] = part
    return full


class Rig:
    """One pool, poisoned, with its two wrappers. `like` shares another rig's weights."""

    def __init__(self, spec, rng, *, like=None, sequences=4, layers=LAYERS, gates="realistic",
                 policy="full", **options) -> None:  # fmt: skip
        self.spec, self.rng, self.layers = spec, rng, layers
        options = {"capacity": 6, "max_window": 3, "page_rows": 2} | options
        pages = -(-options["capacity"] // options["page_rows"])
        options = {
            "checkpoint_pages": 3 * sequences,
            "input_pages": 3 * sequences * pages,
        } | options
        self.pool = StatePool(spec, layers, sequences, **options)
        poison_pool(self.pool)
        self.weights = (
            {layer: layer_weights(spec, rng, gates) for layer in layers}
            if like is None
            else like.weights
        )
        for layer, weights in self.weights.items():
            self.pool.bind(layer, **weights)
        self.wrapper = ReplayDecodeWrapper(self.pool, backend="torch", policy=policy)
        self.prefiller = ReplayPrefillWrapper(self.pool)

    def draw(self, tokens: int, *, gates="realistic") -> Stream:
        """Fresh tokens for the pool's layers, in its type."""
        return draw(
            self.spec, tokens, self.rng, dtype=self.pool.dtype, gates=gates, layers=self.layers
        )

    # Steps --------------------------------------------------------------------------------------

    def start(
        self, parts: dict[int, Stream], *, pads=1, width=None, **options
    ) -> dict[int, Outputs]:
        """Plan, fold and run a step in which every sequence gets its part as the window."""
        sequences, parts_ = list(parts), list(parts.values())
        n = len(sequences)
        plan = self.wrapper.plan(
            sequences, np.array([len(p) for p in parts_]), bucket=n + pads, window=width, **options
        )
        self.wrapper.fold()
        results: dict[int, Outputs] = {seq: {} for seq in sequences}
        for layer in self.layers:
            shape = (n + pads, plan.window)
            got = {}
            if self.spec.conv_width:
                x = padded([p.rows[layer] for p in parts_], *shape)
                got["conv"] = self.wrapper.conv(layer, x, out=torch.full_like(x, torch.nan))
            names = parts_[0].inputs[layer]
            inputs = {k: padded([p.inputs[layer][k] for p in parts_], *shape) for k in names}
            y = torch.full((*shape, self.spec.heads, self.spec.dim), torch.nan)
            got["y"] = self.wrapper.run(layer, out=y, **inputs)
            for kind, out in got.items():
                assert_no_poison(out, kind)
                assert not out[n:].any(), "a pad has an output"
                for row, seq in enumerate(sequences):
                    results[seq][f"{kind} {layer}"] = out[row, : len(parts[seq])]
        return results

    def step(self, parts, *, accepted=None, paths=None, **options) -> dict[int, Outputs]:
        """A whole step; `accepted` or `paths` by sequence."""
        results = self.start(parts, **options)
        if paths is not None:
            self.wrapper.commit(paths=[paths[seq] for seq in parts])
        else:
            counts = {seq: len(part) for seq, part in parts.items()} | (accepted or {})
            self.wrapper.commit([counts[seq] for seq in parts])
        poison_dead(self.pool)
        return results

    def decode(self, seq, stream: Stream, window: int = 1) -> Outputs:
        """Decode a stream in windows."""
        places = range(0, len(stream), window)
        return joined([self.step({seq: stream[t : t + window]})[seq] for t in places])

    # Prefills -----------------------------------------------------------------------------------

    def begin(self, parts: dict[int, Stream], *, layers=None, conv=True) -> dict[int, Outputs]:
        """Plan a prefill of the parts and run `layers` (all) of it."""
        cu = np.cumsum([0, *(len(p) for p in parts.values())])
        self.prefiller.plan(list(parts), cu)
        packed = join(list(parts.values()))
        results: dict[int, Outputs] = {seq: {} for seq in parts}
        for layer in self.layers if layers is None else layers:
            got = {}
            if conv and self.spec.conv_width:
                x = packed.rows[layer]
                got["conv"] = self.prefiller.conv(layer, x, out=torch.full_like(x, torch.nan))
            y = torch.full((int(cu[-1]), self.spec.heads, self.spec.dim), torch.nan)
            got["y"] = self.prefiller.run(layer, out=y, **packed.inputs[layer])
            for kind, out in got.items():
                for i, seq in enumerate(parts):
                    results[seq][f"{kind} {layer}"] = out[cu[i] : cu[i + 1]]
        return results

    def prefill(self, parts: dict[int, Stream]) -> dict[int, Outputs]:
        results = self.begin(parts)
        self.prefiller.commit()
        poison_dead(self.pool)
        return results

    # References ---------------------------------------------------------------------------------

    def reference(self, stream: Stream, dtype=torch.float64, *, readout=False) -> Outputs:
        """The recurrence over a whole sequence from token 0: outputs, and states ``"state 4"``.

        States before the first and after every token. In float32 it is the plain computation that
        sets the budgets: the state rounded after every token to what the pool's format keeps, and
        with `readout` read as a readout of the format reads it.
        """
        fmt = self.pool.format
        rounding = None if fmt.lossless or dtype == torch.float64 else fmt.plane_dtype
        results = {}
        for layer in self.layers:
            inputs, weights = stream.inputs[layer], self.weights[layer]
            state = torch.zeros(self.spec.state_shape)
            trace = [state.to(dtype)]
            y, _ = recurrence(
                self.spec, state, inputs, weights, dtype, state_rounding=rounding, trace=trace
            )
            states = torch.stack(trace)
            if readout and fmt.rounded_readout and dtype != torch.float64:
                tokens = {name: x[:, None] for name, x in inputs.items()}
                before = states[:-1].to(fmt.plane_dtype)
                y, _ = recurrence(self.spec, before, tokens, weights, dtype)
                y = y[:, 0]
            results[f"y {layer}"], results[f"state {layer}"] = y, states
            if self.spec.conv_width:
                results[f"conv {layer}"] = causal_conv(
                    stream.rows[layer], weights["conv_weight"], weights["conv_bias"],
                    self.spec.conv_activation, dtype=dtype,
                )  # fmt: skip
        return results

    def check(self, streams: dict[int, Stream], outputs: dict[int, Outputs], *, decoded=()) -> None:
        """All sequences, fed these streams from token 0, gave and are what float64 says.

        `decoded` holds the tokens, by sequence, that were decoded and not prefilled.
        """
        got, exact, plain = ({"y": [], "conv": [], "state": []} for _ in range(3))
        for seq, stream in streams.items():
            assert self.pool.tokens(seq) == len(stream)
            true, near = self.reference(stream), self.reference(stream, torch.float32)
            if decoded:
                rough = self.reference(stream, torch.float32, readout=True)
                for layer in self.layers:
                    near[f"y {layer}"][decoded[seq]] = rough[f"y {layer}"][decoded[seq]]
            states = materialize(self.pool, seq)
            tail = self.pool.conv_tail(seq)
            for i, layer in enumerate(self.layers):
                outs = outputs[seq] | {f"state {layer}": states[i]}
                for kind in got if self.spec.conv_width else ("y", "state"):
                    key = f"{kind} {layer}"
                    last = -1 if kind == "state" else slice(None)
                    got[kind].append(outs[key].reshape(-1))
                    exact[kind].append(true[key][last].reshape(-1))
                    plain[kind].append(near[key][last].reshape(-1))
                if not self.spec.conv_width:
                    continue
                rows = stream.rows[layer]
                line = torch.cat([rows.new_zeros(self.pool.conv.taps, rows.shape[1]), rows])
                want = line[line.shape[0] - self.pool.conv.taps :].mT
                assert_bitwise_equal(tail[i], want.contiguous(), "convolution window")
        for kind, values in got.items():
            if values:
                assert_within_budget(
                    torch.cat(values), exact=torch.cat(exact[kind]),
                    rounded=torch.cat(plain[kind]).float(), floor=FLOOR, name=kind,
                )  # fmt: skip


def assert_same(rig: Rig, seq: int, other: Rig, twin: int) -> None:
    """Two sequences are the same, bit for bit, in all that continues them."""
    for name in ("tokens", "history"):
        a, b = (getattr(r.pool, name)(s) for r, s in ((rig, seq), (other, twin)))
        assert a == b, name
    assert_bitwise_equal(materialize(rig.pool, seq), materialize(other.pool, twin), "state")
    assert_bitwise_equal(rig.pool.conv_tail(seq), other.pool.conv_tail(twin), "convolution window")


def assert_equal_outputs(got: Outputs, want: Outputs) -> None:
    assert got.keys() == want.keys()
    for key, out in got.items():
        assert_bitwise_equal(out, want[key], key)
