"""Two pools with the same sequences, one decoded by the torch backend and one by Triton's kernels.

Both hold NaN wherever nothing may be read. Afterwards the outputs and states agree within rounding,
the rows bit for bit, and the NaN of both lie in the same places: neither wrote anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from replayinfer import Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    assert_no_poison,
    conv_inputs,
    initial_states,
    layer_weights,
    mamba2_inputs,
    relative_error,
)

# Rounding of an output, and of a state where the kernels' order of additions turns a tie around.
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
STATE_EPSILON = {"fp32": 1e-6, "fp32_split": 1e-6, "bf16": 2e-3, "fp16": 2e-4}
READ_EPSILON = STATE_EPSILON | {"fp32_split": 2e-3}  # its readout sees the state in bf16


@dataclass(frozen=True)
class Case:
    heads: int = 2
    dim: int = 8
    state: int = 16
    groups: int = 1
    format: str = "fp32_split"
    dtype: torch.dtype = torch.bfloat16
    capacity: int = 3
    page_rows: int = 2
    batch: int = 2
    pads: int = 1
    steps: int = 5
    layers: int = 1
    z: bool = False
    softplus: bool = True
    fused: bool | None = None  # None: as the table has it

    def __str__(self) -> str:
        shape = f"{self.heads}x{self.dim}x{self.state}/{self.groups}"
        kind = {None: "auto", True: "fused", False: "split"}[self.fused]
        return f"{shape}-{self.format}-{str(self.dtype).removeprefix('torch.')}-{kind}"


def begin(pool: StatePool, weights, start, before=None) -> list[int]:
    """Bind the layers' weights, and seed sequences with `start` ``[batch, ...]`` of each layer."""
    for layer, values in zip(pool.layers, weights, strict=True):
        pool.bind(layer, **{name: v.to(pool.device) for name, v in values.items()})
    if before:
        before(pool)
    sequences = pool.alloc(len(start[0]))
    taps = torch.zeros(pool.spec.conv_channels, 3, device=pool.device)
    for i, sequence in enumerate(sequences):
        states = {n: s[i].to(pool.device) for n, s in zip(pool.layers, start, strict=True)}
        pool.seed(sequence, states, tokens=3, conv=dict.fromkeys(pool.layers, taps))
    return sequences


def assert_same_rows(want: StatePool, have: StatePool) -> None:
    """Bit for bit, NaN in the same places; ``dt`` is computed, so within rounding."""
    for name, field in want.inputs.fields.items():
        mine = have.inputs.fields[name]
        assert torch.equal(field.isnan(), mine.isnan()), f"rows of {name}"
        if name == "dt":
            assert relative_error(mine.nan_to_num(), field.nan_to_num()) <= 1e-6, "rows of dt"
        else:
            assert torch.equal(field.nan_to_num(), mine.nan_to_num()), f"rows of {name}"


class Pair:
    """`before` gets each pool before its sequences are made; other options are the pool's."""

    def __init__(
        self, case: Case, rng: torch.Generator, device: str = "cpu", *, before=None, **options
    ) -> None:
        self.case, self.rng, self.device = case, rng, device
        self.spec = spec = Mamba2Spec(
            heads=case.heads, dim=case.dim, state=case.state, groups=case.groups,
            dt_softplus=case.softplus,
        )  # fmt: skip
        self.layers = layers = range(2, 2 + case.layers)
        weights = [layer_weights(spec, rng) for _ in layers]
        start = [initial_states(spec, case.batch, rng) for _ in layers]
        self.worlds = []
        for backend in ("torch", "triton"):
            pool = StatePool(
                spec, layers, case.batch + 1, capacity=case.capacity, format=case.format,
                dtype=case.dtype, page_rows=case.page_rows, device=device, **options,
            )  # fmt: skip
            for field in pool.inputs.fields.values():
                field.fill_(float("nan"))
            if case.format == "fp32_split":
                pool.checkpoints.storage.fill_(-1)  # a NaN in both planes
            else:
                pool.checkpoints.storage.fill_(float("nan"))
            sequences = begin(pool, weights, start, before)
            self.worlds.append((pool, sequences, ReplayDecodeWrapper(pool, backend=backend)))

    def step(self, windows) -> None:
        case, spec, bucket = self.case, self.spec, self.case.batch + self.case.pads
        tokens = [
            mamba2_inputs(spec, 1, bucket, case.dtype, self.rng, with_z=case.z) for _ in self.layers
        ]
        before = conv_inputs(spec, 1, bucket, case.dtype, self.rng).to(self.device)
        live = np.zeros(bucket, dtype=bool)
        live[: case.batch] = windows
        for inputs in tokens:  # what a pad or an empty window brings may be anything
            for value in inputs.values():
                value[~live] = float("nan")
        got = []
        for _, sequences, wrapper in self.worlds:
            wrapper.plan(sequences, windows, bucket=bucket, window=1)
            wrapper.fold()
            outputs = []
            for layer, inputs in zip(self.layers, tokens, strict=True):
                out = torch.full((bucket, 1, spec.heads, spec.dim), float("nan"))
                out = out.to(self.device, case.dtype)
                inputs = {name: v.to(self.device) for name, v in inputs.items()}
                outputs.append(wrapper.run(layer, out=out, **inputs).flatten(1))
                outputs.append(wrapper.conv(layer, before).flatten(1))
            wrapper.commit()
            got.append(outputs)
        for want, have in zip(*got, strict=True):
            assert_no_poison(have, "outputs")
            assert not have[~torch.from_numpy(live)].any(), "a pad has an output"
            epsilon = max(EPSILON[case.dtype], READ_EPSILON[case.format])
            assert relative_error(have[: case.batch], want[: case.batch]) <= epsilon

    def decode(self) -> Pair:
        for step in range(self.case.steps):
            self.step([int((step + i) % 4 != 3) for i in range(self.case.batch)])
        return self

    def check(self) -> None:
        (want, sequences, reference), (have, ours, wrapper) = self.worlds
        for a, b in zip(sequences, ours, strict=True):
            state = wrapper.materialize(b)
            error = relative_error(state, reference.materialize(a))
            assert error <= STATE_EPSILON[self.case.format]
        assert_same_rows(want, have)
        planes = (p.checkpoints.plane.isnan() for p in (want, have))
        assert torch.equal(*planes), "checkpoint pages"
