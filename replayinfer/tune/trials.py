"""Trials on a GPU: pools in their steady state, results held against the rule's, graphs timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..backends import ShiftedConvolution
from ..backends.triton import TritonBackend
from ..bench.timing import capture, interleaved
from ..bench.work import make_tokens, make_weights
from ..errors import UnsupportedError
from ..planner import HostPlanner, Plan
from ..pools import StatePool
from ..testing import initial_states
from .choose import Choices, Part
from .run import TuneCase

__all__ = ["GraphTrials", "World", "disagreement"]

_COLD_BYTES = 512 << 20  # states of all layers together, so that no layer finds its own in the L2
_CHECKED_BATCH = 128  # what is compared fits into memory a few times over
_WIDTH = 4  # of an engine's convolution, where the layer's is not known


class GraphTrials:
    """See `Trials`: correctness on two layers and at most 128 sequences, times on cold layers.

    Windows of each length have a pool of their own, and plain decode has one.
    """

    def __init__(self, case: TuneCase, device: torch.device, rule: Choices) -> None:
        self._case, self._device, self._rule = case, device, rule
        self._made: dict[tuple[int, bool], World] = {}
        self._wanted: dict[tuple[Part, int], dict[str, torch.Tensor]] = {}

    def asked(self, part: Part, choices: Choices) -> set[str]:
        """Which choices `part` looks up; see `Trials`."""
        from replayinfer.kernels.launch.dry import dry_launches
        from replayinfer.kernels.launch.lookup import forced

        with forced(**choices) as ops, dry_launches():
            for world in self._worlds(part):
                if world.has(part):
                    world.launches[part]()
        return ops

    def wrong(self, part: Part, choices: Choices) -> str | None:
        """What is wrong with `choices`, or None; see `Trials`."""
        for world in self._worlds(part):
            if reason := self._wrong(world, part, choices):
                return reason
        return None

    def time(self, part: Part, arms: Mapping[int, Choices]) -> dict[int, float]:
        """Microseconds a layer, of windows those of all lengths together; see `Trials`."""
        from replayinfer.kernels.launch.lookup import forced

        total = dict.fromkeys(arms, 0.0)
        for world in self._worlds(part, timed=True):
            graphs = {}
            for place, choices in arms.items():
                with forced(**choices):
                    graphs[str(place)] = capture(world.launches[part])
            times = interleaved(graphs)
            for place in arms:
                total[place] += times[str(place)] / world.layers
        return total

    def _wrong(self, world: World, part: Part, choices: Choices) -> str | None:
        wanted = self._wanted.get((part, world.window))
        if wanted is None:
            wanted = self._wanted[part, world.window] = world.results(part, self._rule)
        try:
            got = world.results(part, choices)
        except Exception as error:  # a candidate that this device or compiler does not take
            if "out of memory" in str(error).lower():
                raise
            world.wait()  # raises again where the device itself is in trouble
            return f"it cannot be launched ({(str(error).strip() or repr(error)).splitlines()[-1]})"
        reason = disagreement(got, wanted)
        if reason is not None and world.window > 1:
            return f"windows of {world.window}: {reason}"
        return reason

    def _worlds(self, part: Part, *, timed: bool = False) -> list[World]:
        """The pools in which `part` is launched; those of other parts are dropped."""
        windows = self._case.windows if part == "verify" else (1,)
        self._made = {key: world for key, world in self._made.items() if key[0] in windows}
        return [self._world(window, timed) for window in windows]

    def _world(self, window: int, timed: bool) -> World:
        if (window, timed) not in self._made:
            case = self._case
            batch, layers = min(case.batch, _CHECKED_BATCH), 2
            if timed:
                state = case.batch * math.prod(case.spec.state_shape) * 4
                batch, layers = case.batch, max(4, min(64, -(-_COLD_BYTES // state)))
            world = World(case, batch, layers, self._device, self._rule, window)
            self._made[window, timed] = world
        return self._made[window, timed]


class World:
    """A pool of sequences whose histories are staggered, and the launches of one step.

    Its rows were written by `capacity` steps of decoding, so they are what later steps meet. The
    step is one of windows of `window` tokens.
    """

    def __init__(
        self,
        case: TuneCase,
        batch: int,
        layers: int,
        device: torch.device,
        rule: Choices,
        window: int = 1,
    ) -> None:
        from replayinfer.kernels.launch.lookup import forced

        spec = case.spec
        capacity = case.capacity
        if window > 1 and case.window_capacity is not None:
            capacity = case.window_capacity
        self.layers, self.window = layers, window
        self.pool = pool = StatePool(
            spec, range(layers), batch, capacity=capacity, max_window=window, format=case.format,
            dtype=case.dtype, device=device,
        )  # fmt: skip
        self.backend = backend = TritonBackend()
        if reason := backend.supports(pool):
            raise UnsupportedError(
                f"model: got {spec.family} layers; allowed what the Triton kernels serve; {reason}"
            )
        generator = torch.Generator(device).manual_seed(0)
        planner, handles = HostPlanner(pool), pool.alloc(batch)
        pages = pool.device_ids(pool.cursors.checkpoint[pool.cursors.resolve(handles)])
        self.tokens = []
        for layer in range(layers):
            pool.bind(layer, **make_weights(spec, case.dtype, generator))
            pool.checkpoints.store(layer, pages, initial_states(spec, batch, generator))
            self.tokens.append(make_tokens(spec, batch * window, case.dtype, generator, False))
        self.inputs = [t.windows(window) for t in self.tokens]
        shape = (batch, window, *(getattr(spec, d) for d in spec.output_dims))
        self.outputs = [torch.zeros(shape, dtype=case.dtype, device=device) for _ in self.tokens]
        self.convolved = [torch.zeros_like(t.rows[:, None]) for t in self.tokens]
        self.shifted: list[ShiftedConvolution] = []
        with forced(fused=None):  # in whatever batches that may come to be
            if window == 1 and backend.convolves(pool, batch) is None:
                self.shifted = [self._shifted(t.rows, generator) for t in self.tokens]

        # 1..capacity rows: as many sequences fold as in any other step.
        rows = capacity - np.arange(batch) * capacity // batch
        with forced(**rule):
            for step in range(capacity):
                self.plan = planner.plan(handles, (step < rows).astype(np.int32), window=1)
                planner.folded(self.plan)  # nobody folds yet
                self._readout(1)
                planner.commit(self.plan)
        self.plan = planner.plan(handles, window)
        planner.abort(self.plan)  # its arrays stay as they are
        if window > 1:
            self.launches: dict[Part, Callable[[], None]] = {"verify": self._readout}
            return
        pool.cursors.history[pool.cursors.resolve(handles)] = 0
        direct = HostPlanner(pool)
        self.direct_plan: Plan = direct.plan(handles, direct=True)
        self.launches = {
            "readout": self._readout, "fold": self._fold, "conv": self._conv,
            "direct": self._direct, "convolved": self._convolved,
        }  # fmt: skip

    def has(self, part: Part) -> bool:
        """Whether a step has `part`, by the choices in force: not each has a convolved readout."""
        return part != "convolved" or self.backend.convolves(self.pool, self.plan.bucket) is None

    def results(self, part: Part, choices: Choices) -> dict[str, torch.Tensor]:
        """What `part` writes with `choices` in force; the pool is as before then."""
        from replayinfer.kernels.launch.lookup import forced

        pool = self.pool
        written = {"checkpoints": pool.checkpoints.storage, "rings": pool.conv.rows}
        written |= pool.inputs.fields
        written |= {f"windows of layer {i}": conv.states for i, conv in enumerate(self.shifted)}
        before = {name: tensor.clone() for name, tensor in written.items()}
        for out in (*self.outputs, *self.convolved):
            out.fill_(math.nan)
        try:
            with forced(**choices):
                self.launches[part]()
            self.wait()
            return self._read(part)
        finally:
            for name, tensor in written.items():
                tensor.copy_(before[name])

    def wait(self) -> None:
        """Until everything launched is done."""
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    def _read(self, part: Part) -> dict[str, torch.Tensor]:
        pool, found = self.pool, dict[str, torch.Tensor]()
        outputs = self.convolved if part == "conv" else self.outputs
        if part != "fold":
            found |= {f"outputs of layer {i}": out.clone() for i, out in enumerate(outputs)}
        if part in ("fold", "direct"):
            every = torch.arange(pool.sizes.checkpoint_pages, device=pool.device)
            # In a type whose rounding is the format's, which loses nothing of what is stored.
            kind = torch.float32 if pool.format.lossless else pool.format.plane_dtype
            states = (pool.checkpoints.load(i, every).to(kind) for i in range(self.layers))
            found |= {f"states of layer {i}": state for i, state in enumerate(states)}
        if part in ("readout", "convolved", "verify"):
            fields = pool.inputs.fields.items()
            found |= {f"rows of {name}": field.flatten(0, 1).clone() for name, field in fields}
        if part == "conv":
            found["rings"] = pool.conv.rows.flatten(0, 1).clone()
        if part == "convolved":
            windows = (conv.states.clone() for conv in self.shifted)
            found |= {f"windows of layer {i}": window for i, window in enumerate(windows)}
        return found

    def _readout(self, tokens: int | None = None) -> None:
        """Of whole windows, or of their first `tokens`."""
        for layer in range(self.layers):
            inputs = {name: value[:, :tokens] for name, value in self.inputs[layer].items()}
            out = self.outputs[layer][:, :tokens]
            self.backend.readout(self.pool, self.plan, layer, inputs, out)

    def _shifted(self, rows: torch.Tensor, generator: torch.Generator) -> ShiftedConvolution:
        """A layer's convolution as an engine has it: windows of its own, all in one type."""
        batch, channels = rows.shape
        width = self.pool.spec.conv_width or _WIDTH
        states, weight = (
            torch.randn(shape, generator=generator, device=rows.device).to(rows.dtype)
            for shape in ((batch, channels, width - 1), (channels, width))
        )
        slots = torch.arange(batch, dtype=torch.int32, device=rows.device)
        return ShiftedConvolution(x=rows, states=states, slots=slots, weight=weight)

    def _fold(self) -> None:
        self.backend.fold(self.pool, self.plan)

    def _conv(self) -> None:
        for layer in range(self.layers):
            rows = self.tokens[layer].rows[:, None]
            self.backend.conv(self.pool, self.plan, layer, rows, self.convolved[layer])

    def _convolved(self) -> None:
        gates = [field.name for field in self.pool.spec.input_fields if field.kind == "gate"]
        for layer, conv in enumerate(self.shifted):
            inputs = {name: self.inputs[layer][name] for name in gates}
            out = self.outputs[layer]
            self.backend.convolved_readout(self.pool, self.plan, layer, conv, inputs, out)

    def _direct(self) -> None:
        for layer in range(self.layers):
            self.backend.direct(
                self.pool, self.direct_plan, layer, self.inputs[layer], self.outputs[layer]
            )


def disagreement(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> str | None:
    """Where two results differ by more than their rounding; None where they agree.

    Each entry of the first axis (a sequence, a page) is held to it by itself: choices only change
    the order of additions, which is worth a few units in the last place of what is stored.
    """
    for name, exact in want.items():
        bound = max(4 * torch.finfo(exact.dtype).eps, 1e-5)
        a, b = got[name].flatten(1).float(), exact.flatten(1).float()
        if not a.numel():
            continue
        largest = b.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        off = (a - b).abs().amax(dim=1) / largest
        worst = float(off.nan_to_num(math.inf).max())
        if worst > bound:
            return f"{name} are off by {worst:.1e}, where {bound:.1e} is rounding"
    return None
