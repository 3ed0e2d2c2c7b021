"""Two pools of a delta-rule layer with the same sequences: one decoded by the torch backend, one by
Triton's kernels.

Both hold NaN wherever nothing may be read. After every step the outputs and rows agree within
rounding, what is copied bit for bit, and the NaN of both lie in the same places: neither wrote
anything else.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from replayinfer import GDNSpec, KDASpec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    assert_no_poison,
    delta_inputs,
    delta_weights,
    initial_states,
    relative_error,
)

from ..backends.world import poison_dead
from .pair import EPSILON, READ_EPSILON, STATE_EPSILON

SPECS = {"gdn": GDNSpec, "kda": KDASpec}
# A sum of gates as large as 16 is rounded by up to 1e-6, and its exponential by as much.
OUTPUT_EPSILON = EPSILON | {torch.float32: 3e-6}
# Of a 16-bit u. A state that another order of additions rounds to the other side moves a whole one
# by as much again.
U_EPSILON = {torch.float32: 3e-6, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class DeltaCase:
    family: str = "gdn"
    heads: int = 4
    key_heads: int = 2
    dim: int = 8
    state: int = 16
    gate: str = "softplus"
    beta: str = "sigmoid"
    norm: str = "l2"
    scale: float | None = None
    format: str = "fp32_split"
    dtype: torch.dtype = torch.bfloat16
    gates: str = "realistic"
    capacity: int = 3
    page_rows: int = 2
    batch: int = 2
    pads: int = 1
    steps: int = 5
    layers: int = 1
    fused: bool = False
    warps: int = 1
    rows: int = 0  # of a block; 0: as the rule has it

    def __str__(self) -> str:
        base = type(self)()
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("family", "fused") and getattr(self, f.name) != getattr(base, f.name)
        }
        words = [f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()]
        return "-".join([self.family, "fused" if self.fused else "split", *words])

    def but(self, **changes) -> DeltaCase:
        return dataclasses.replace(self, **changes)

    @property
    def spec(self) -> GDNSpec | KDASpec:
        names = ("heads", "key_heads", "dim", "state", "gate", "beta", "norm", "scale")
        return SPECS[self.family](**{name: getattr(self, name) for name in names}, conv_width=0)


@contextmanager
def launching(case: DeltaCase):
    """Take the one kernel or the two, with the blocks of the case, whatever the table says."""
    from replayinfer.kernels.launch import lookup as launch

    shape = launch.LaunchConfig(num_warps=case.warps, rows=case.rows)
    pair = dict.fromkeys(("prepass", "readout", "conv_prepass", "conv_readout"), shape)
    choices = {"fused": shape if case.fused else None, **pair}
    if not case.rows:
        choices = {"fused": choices["fused"]}
    with launch.forced(**choices):
        yield


class DeltaPair:
    """`before` gets each pool before its sequences are made; other options are the pool's.

    In the steps `erase` a given gate is minus infinity.
    """

    def __init__(
        self,
        case: DeltaCase,
        rng: torch.Generator,
        device: str = "cpu",
        *,
        before=None,
        erase=(),
        **options,
    ) -> None:
        self.case, self.rng, self.device = case, rng, device
        self.spec = spec = case.spec
        self.layers = layers = range(2, 2 + case.layers)
        weights = [delta_weights(spec, rng, case.gates) for _ in layers]
        start = [initial_states(spec, case.batch, rng) for _ in layers]
        self.erase, self.done = erase, 0
        self.worlds = []
        for backend in ("torch", "triton"):
            pool = StatePool(
                spec, layers, case.batch + 1, capacity=case.capacity, format=case.format,
                dtype=case.dtype, page_rows=case.page_rows, device=device, **options,
            )  # fmt: skip
            for layer, values in zip(layers, weights, strict=True):
                pool.bind(layer, **{name: v.to(device) for name, v in values.items()})
            if before:
                before(pool)
            sequences = pool.alloc(case.batch)
            poison_dead(pool)
            for i, sequence in enumerate(sequences):
                states = {layer: s[i].to(device) for layer, s in zip(layers, start, strict=True)}
                pool.seed(sequence, states, tokens=3)
            self.worlds.append((pool, sequences, ReplayDecodeWrapper(pool, backend=backend)))

    def step(self, windows) -> None:
        case, spec, bucket = self.case, self.spec, self.case.batch + self.case.pads
        tokens = [
            delta_inputs(spec, 1, bucket, case.dtype, self.rng, case.gates) for _ in self.layers
        ]
        if self.done in self.erase:
            for inputs in tokens:
                inputs["g"].fill_(float("-inf"))
        self.done += 1
        live = np.zeros(bucket, dtype=bool)
        live[: case.batch] = windows
        for inputs in tokens:  # what a pad or an empty window brings may be anything
            for value in inputs.values():
                value[~live] = float("nan")
        got = []
        for _, sequences, wrapper in self.worlds:
            with launching(case):
                wrapper.plan(sequences, windows, bucket=bucket, window=1)
                wrapper.fold()
                outputs = []
                for layer, inputs in zip(self.layers, tokens, strict=True):
                    out = torch.full((bucket, 1, spec.heads, spec.dim), float("nan"))
                    out = out.to(self.device, case.dtype)
                    inputs = {name: v.to(self.device) for name, v in inputs.items()}
                    outputs.append(wrapper.run(layer, out=out, **inputs).flatten(1))
            got.append(outputs)
        self.finish(got, live)

    def finish(self, got, live) -> None:
        """Compare a step's outputs by layer, of both worlds, and its rows; and commit it."""
        case = self.case
        for want, have in zip(*got, strict=True):
            assert_no_poison(have, "outputs")
            assert not have[~torch.from_numpy(live)].any(), "a pad has an output"
            epsilon = max(OUTPUT_EPSILON[case.dtype], READ_EPSILON[case.format])
            error = relative_error(have[: case.batch], want[: case.batch])
            assert error <= epsilon, f"outputs are {error:.1e} apart"
        self.check_rows()
        for pool, _, wrapper in self.worlds:
            wrapper.commit()
            poison_dead(pool)

    def check_rows(self) -> None:
        (want, _, _), (have, _, _) = self.worlds
        for name, field in want.inputs.fields.items():
            mine = have.inputs.fields[name]
            dead = field.isnan()
            assert torch.equal(dead, mine.isnan()), f"rows of {name}"
            ours, theirs = (t[~dead].float() for t in (mine, field))  # few of a large pool's
            if name in ("k", "v"):
                assert torch.equal(ours, theirs), f"rows of {name}"
            elif name == "u":
                epsilon = max(U_EPSILON[field.dtype], READ_EPSILON[self.case.format])
                assert relative_error(ours, theirs) <= epsilon, "rows of u"
            else:  # the exponential of a GPU is off by 1e-5 at -80, where it does not matter
                ours, theirs = (t.clamp_min(-1e30) for t in (ours, theirs))
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, msg=f"rows of {name}")

    def decode(self) -> DeltaPair:
        """Folds, histories that differ, and windows that are empty now and then."""
        for step in range(self.case.steps):
            self.step([int((step + i) % 4 != 3) for i in range(self.case.batch)])
        return self

    def state_epsilon(self) -> float:
        return STATE_EPSILON[self.case.format]

    def check(self) -> None:
        (_, sequences, reference), (_, ours, wrapper) = self.worlds
        for a, b in zip(sequences, ours, strict=True):
            with launching(self.case):
                error = relative_error(wrapper.materialize(b), reference.materialize(a))
            assert error <= self.state_epsilon()
        planes = (w[0].checkpoints.plane.isnan() for w in self.worlds)
        assert torch.equal(*planes), "checkpoint pages"
