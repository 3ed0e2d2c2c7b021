"""Two pools as in `delta_pair`, whose readouts convolve over windows that somebody else keeps.

The windows of other slots, and whatever lies between windows, hold NaN. After every step all of
that memory is, bit for bit, what moving the live windows by hand makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from replayinfer import ops
from replayinfer.testing import (
    assert_bitwise_equal,
    conv_inputs,
    delta_inputs,
    relative_error,
)

from .delta_pair import U_EPSILON, DeltaCase, DeltaPair, launching
from .pair import READ_EPSILON

# Elements before and after what is looked at: in a row of `x`, and in a slot.
LAYOUTS = {
    "contiguous": ((0, 0), (0, 0)),
    "slices": ((4, 2), (8, 4)),
    "odd address": ((1, 1), (3, 1)),
    "odd rows": ((4, 1), (0, 0)),
    "odd slots": ((0, 0), (4, 1)),
}
# One unit in the last place: a sum near the middle of two may go to either.
ONE_PLACE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class ConvolvedCase(DeltaCase):
    width: int = 4
    bias: bool = True
    silu: bool = True
    layout: str = "contiguous"
    weight_dtype: torch.dtype | None = None  # None: the pool's
    projected: str = ""  # "by head" or "whole": x and z are parts of one projection

    @property
    def packed(self) -> bool:
        """Whether two channels are read as whole words."""
        types = {self.dtype, self.weight_dtype or self.dtype}
        return types == {torch.bfloat16} and self.width == 4 and "odd" not in self.layout


def place(
    like: torch.Tensor, gaps: tuple[int, int], device="cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view with the values of `like` ``[n, ...]``, and all of its memory, NaN elsewhere."""
    before, after = gaps
    flat = like.flatten(1)
    whole = torch.full(
        (len(like), before + flat.shape[1] + after), float("nan"), dtype=like.dtype, device=device
    )
    view = whole[:, before : before + flat.shape[1]]
    view.copy_(flat)
    return view.unflatten(1, like.shape[1:]), whole


class ConvolvedPair(DeltaPair):
    """`DeltaPair` by `ops.convolved_readout`; row ``i``'s windows are in slot ``slots[i]``."""

    def __init__(self, case: ConvolvedCase, rng, device="cpu", **options) -> None:
        super().__init__(case, rng, device, **options)
        spec, count = self.spec, case.batch + 3
        self.slots = torch.randperm(count, generator=rng)[: case.batch]
        self.windows = []  # of each world and layer: (view, all of its memory)
        self.weights = []
        channels = spec.conv_channels
        starts = []
        for _ in self.layers:
            weight = torch.randn(channels, case.width, generator=rng) * case.width**-0.5
            bias = 0.1 * torch.randn(channels, generator=rng) if case.bias else None
            dtype = case.weight_dtype or case.dtype
            weight = weight.to(device, dtype)
            self.weights.append((weight, None if bias is None else bias.to(device, dtype)))
            start = torch.full((count, channels, case.width - 1), float("nan"), dtype=case.dtype)
            shape = (case.batch, channels, case.width - 1)
            start[self.slots] = torch.randn(shape, generator=rng).to(case.dtype)
            starts.append(start)
        for _ in self.worlds:
            self.windows.append([place(start, LAYOUTS[case.layout][1], device) for start in starts])

    def conv(self, world: int, layer: int, x: torch.Tensor, slots: torch.Tensor, z=None):
        """Of a line `x`; with `z [bucket, heads * dim]` of a projection that holds both."""
        weight, bias = self.weights[layer]
        gaps, z_out = LAYOUTS[self.case.layout][0], None
        if z is None:
            x = place(x, gaps, self.device)[0]
        elif self.case.projected == "by head":
            parts = torch.cat([*self.split(x), self.by_head(z)], dim=2)
            parts = place(parts, gaps, self.device)[0]
            values = z.shape[1] // self.spec.key_heads
            x, z = parts.split([parts.shape[2] - values, values], dim=2)
        else:
            whole = place(torch.cat([x, z], dim=1), gaps, self.device)[0]
            x, z = whole[:, : x.shape[1]], self.by_head(whole[:, x.shape[1] :])
        if z is not None:
            shape = (len(z), self.spec.heads, self.spec.dim)
            z_out = torch.full(shape, float("nan"), dtype=z.dtype, device=self.device)
        return ops.ShiftedConvolution(
            x=x,
            z=z,
            z_out=z_out,
            states=self.windows[world][layer][0],
            slots=slots.to(self.device),
            weight=weight,
            bias=bias,
            activation="silu" if self.case.silu else None,
        )

    def by_head(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(1, (self.spec.key_heads, -1))

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``q``, ``k`` and ``v`` of a line, each by key head."""
        keys = self.spec.key_heads * self.spec.state
        return [self.by_head(part) for part in x.split([keys, keys, x.shape[1] - 2 * keys], dim=1)]

    def gates(self, gates: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the case has them: by key head they are parts of one projection, too."""
        if self.case.projected != "by head":
            return {name: value.to(self.device) for name, value in gates.items()}
        names = sorted(gates, reverse=True)
        together = torch.cat([self.by_head(gates[name][:, 0]) for name in names], dim=2)
        together = together.to(self.device)
        return dict(zip(names, together.chunk(len(names), dim=2), strict=True))

    def draw(self, live: np.ndarray):
        """Per layer ``x`` and the gates, NaN where nothing is `live`; and slots, absurd there."""
        case, bucket = self.case, len(live)
        dead = torch.from_numpy(~live)
        tokens = []
        for _ in self.layers:
            x = conv_inputs(self.spec, 1, bucket, case.dtype, self.rng)[:, 0]
            gates = delta_inputs(self.spec, 1, bucket, case.dtype, self.rng, case.gates)
            gates = {n: v for n, v in gates.items() if n not in ("q", "k", "v")}
            for value in (x, *gates.values()):
                value[dead] = float("nan")
            tokens.append((x, gates))
        # int64 in every other step, and no slot where none is looked at.
        slots = torch.full((bucket,), 2**31 - 1, dtype=(torch.int32, torch.int64)[self.done % 2])
        slots[1::2] = -(2**31)
        slots[: case.batch] = torch.where(dead[: case.batch], slots[: case.batch], self.slots)
        return tokens, slots

    def output(self, world: int):
        """Given in two of three steps, and of float32 in one of these."""
        case, kind = self.case, self.done % 3
        if kind == 2:
            return None
        dtype = torch.float32 if kind else case.dtype
        shape = (case.batch + case.pads, 1, self.spec.heads, self.spec.dim)
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def step(self, windows) -> None:
        case, bucket = self.case, self.case.batch + self.case.pads
        live = np.zeros(bucket, dtype=bool)
        live[: case.batch] = windows
        tokens, slots = self.draw(live)
        want = self.moved(tokens, live)
        z = None
        if case.projected:
            z = torch.randn(bucket, self.spec.heads * self.spec.dim, generator=self.rng)
            z = z.to(case.dtype)
        got = []
        for world, (pool, sequences, wrapper) in enumerate(self.worlds):
            with launching(case):
                plan = wrapper.plan(sequences, windows, bucket=bucket, window=1)
                wrapper.fold()
                outputs = []
                for i, (layer, (x, gates)) in enumerate(zip(self.layers, tokens, strict=True)):
                    out, conv = self.output(world), self.conv(world, i, x, slots, z)
                    y = ops.convolved_readout(
                        pool, plan, layer, conv, out=out, backend=wrapper.backend,
                        **self.gates(gates),
                    )  # fmt: skip
                    if z is not None:
                        assert_bitwise_equal(conv.z_out.flatten(1).cpu(), z, "z, of pads too")
                    assert out is None or y is out
                    outputs.append(y.flatten(1))
            got.append(outputs)
            for (_, memory), moved in zip(self.windows[world], want, strict=True):
                assert_bitwise_equal(memory, moved, f"windows of world {world}")
        self.done += 1
        self.finish(got, live)

    def moved(self, tokens, live) -> list[torch.Tensor]:
        """The windows' memory of a world after the step, by hand."""
        case, expected = self.case, []
        before, _ = LAYOUTS[case.layout][1]
        for (x, _), (_, memory) in zip(tokens, self.windows[0], strict=True):
            memory = memory.clone()
            taps = case.width - 1
            for i in np.flatnonzero(live):
                window = memory[self.slots[i], before : before + x.shape[1] * taps].view(-1, taps)
                window[:, :-1] = window[:, 1:].clone()
                window[:, -1] = x[i]
            expected.append(memory)
        return expected

    def state_epsilon(self) -> float:
        """Keys and values were convolved: where they are a last place apart, so are the states."""
        return max(super().state_epsilon(), ONE_PLACE[self.case.dtype])

    def check_rows(self) -> None:
        """As in `DeltaPair`; keys and values were convolved, so may be a last place apart."""
        (want, _, _), (have, _, _) = self.worlds
        for name, field in want.inputs.fields.items():
            mine = have.inputs.fields[name]
            dead = field.isnan()
            assert torch.equal(dead, mine.isnan()), f"rows of {name}"
            ours, theirs = (t[~dead].float() for t in (mine, field))
            if name == "u":
                epsilon = max(U_EPSILON[field.dtype], READ_EPSILON[self.case.format])
                assert relative_error(ours, theirs) <= epsilon, "rows of u"
                continue
            rtol = ONE_PLACE[field.dtype if name in ("k", "v") else torch.float32]
            if name == "k_scale":
                rtol = ONE_PLACE[self.case.dtype]
            ours, theirs = (t.clamp_min(-1e30) for t in (ours, theirs))
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-6, msg=f"rows of {name}")
