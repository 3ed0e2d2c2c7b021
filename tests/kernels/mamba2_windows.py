"""Two Mamba-2 pools with the same sequences, one stepped by torch, one by Triton's kernels.

Windows of several tokens, mixed in a batch, chains or trees, of which a random part is accepted.
Both hold NaN wherever nothing may be read: in pads, absent tokens, dead rows and free pages.
"""

from __future__ import annotations

import dataclasses
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

from ..backends.world import poison_dead
from ..trees.forest import matrix, path_to, random_tree
from .pair import EPSILON, READ_EPSILON, STATE_EPSILON, assert_same_rows, begin


@dataclass(frozen=True)
class Windows:
    window: int = 4
    heads: int = 2
    dim: int = 16
    state: int = 16
    groups: int = 1
    format: str = "fp32_split"
    dtype: torch.dtype = torch.bfloat16
    capacity: int = 7
    page_rows: int = 2
    conv_width: int = 4
    batch: int = 2
    pads: int = 1
    steps: int = 3
    layers: int = 1
    tree: bool = False
    z: bool = False
    softplus: bool = True
    out: torch.dtype | None = None  # None: as the activations

    def __str__(self) -> str:
        base, own = vars(Windows()), vars(self)
        changed = {k: v for k, v in own.items() if v != base[k]}
        return (
            ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()) or "base"
        )

    def but(self, **changes) -> Windows:
        return dataclasses.replace(self, **changes)


class WindowPair:
    """`before` gets each pool before its sequences are made; other options are the pool's."""

    def __init__(
        self, case: Windows, rng: torch.Generator, device: str = "cpu", *, before=None, **options
    ) -> None:
        self.case, self.rng, self.device = case, rng, device
        self.numbers = np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))
        self.spec = spec = Mamba2Spec(
            heads=case.heads, dim=case.dim, state=case.state, groups=case.groups,
            dt_softplus=case.softplus, conv_width=case.conv_width,
        )  # fmt: skip
        self.layers = layers = range(2, 2 + case.layers)
        weights = [layer_weights(spec, rng) for _ in layers]
        start = [initial_states(spec, case.batch, rng) for _ in layers]
        self.worlds = []
        for backend in ("torch", "triton"):
            pool = StatePool(
                spec, layers, case.batch + 1, capacity=case.capacity, max_window=case.window,
                format=case.format, dtype=case.dtype, page_rows=case.page_rows, device=device,
                **options,
            )  # fmt: skip
            sequences = begin(pool, weights, start, before)
            poison_dead(pool)
            self.worlds.append((pool, sequences, ReplayDecodeWrapper(pool, backend=backend)))

    def draw(self) -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
        """Windows of any length, trees of them, and the paths that are accepted."""
        case, numbers = self.case, self.numbers
        windows = numbers.integers(0, case.window + 1, case.batch)
        windows[numbers.integers(case.batch)] = case.window
        trees = [
            random_tree(int(n), self.rng) if case.tree else list(range(-1, int(n) - 1))
            for n in windows
        ]
        return windows, trees, [path_to(t, int(numbers.integers(-1, len(t)))) for t in trees]

    def step(self) -> None:
        case, spec, bucket, width = self.case, self.spec, self.bucket, self.case.window
        windows, trees, paths = self.draw()
        live = np.zeros((bucket, width), dtype=bool)
        live[: case.batch] = np.arange(width) < windows[:, None]
        tokens = [
            mamba2_inputs(spec, width, bucket, case.dtype, self.rng, with_z=case.z)
            for _ in self.layers
        ]
        rows = conv_inputs(spec, width, bucket, case.dtype, self.rng) if case.conv_width else None
        for value in (v for inputs in (*tokens, {"rows": rows}) for v in inputs.values()):
            if value is not None:
                value[~live] = float("nan")
        epsilon = max(EPSILON[case.out or case.dtype], READ_EPSILON[case.format])
        if self.device != "cpu":
            epsilon = max(epsilon, 3e-6)  # the matrix units cut a sum where others round it
        got = []
        for pool, sequences, wrapper in self.worlds:
            parents = matrix(trees, width) if case.tree else None
            wrapper.plan(sequences, windows, bucket=bucket, window=width, parents=parents)
            wrapper.fold()
            outputs = []
            for layer, inputs in zip(self.layers, tokens, strict=True):
                shape = (bucket, width, spec.heads, spec.dim)
                out = torch.full(shape, float("nan"), dtype=case.out or case.dtype)
                inputs = {name: v.to(self.device) for name, v in inputs.items()}
                y = wrapper.run(layer, out=out.to(self.device), **inputs)
                outputs.append((y.cpu().flatten(2), epsilon))
                if rows is not None:
                    convolved = wrapper.conv(layer, rows.to(self.device)).cpu()
                    outputs.append((convolved, EPSILON[case.dtype]))
            if case.tree:
                wrapper.commit(paths=paths)
            else:
                wrapper.commit([len(p) for p in paths])
            poison_dead(pool)
            got.append(outputs)
        for (want, bound), (have, _) in zip(*got, strict=True):
            assert_no_poison(have, "outputs")
            assert not have[~torch.from_numpy(live)].any(), "a pad or an absent token has an output"
            assert relative_error(have, want) <= bound

    @property
    def bucket(self) -> int:
        return self.case.batch + self.case.pads

    def decode(self) -> WindowPair:
        for _ in range(self.case.steps):
            self.step()
        return self

    def check(self) -> None:
        """Rows and rings bit for bit (``dt`` is computed), states within rounding."""
        (want, sequences, reference), (have, ours, wrapper) = self.worlds
        assert [want.history(s) for s in sequences] == [have.history(s) for s in ours]
        assert_same_rows(want, have)
        assert torch.equal(want.conv.rows.nan_to_num(), have.conv.rows.nan_to_num()), "rings"
        for a, b in zip(sequences, ours, strict=True):
            error = relative_error(wrapper.materialize(b), reference.materialize(a))
            assert error <= STATE_EPSILON[self.case.format]
