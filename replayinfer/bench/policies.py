"""How level the steps of a policy are: times of the recurrent layers, over arrivals that differ.

A batch of constant size decodes step after step; what differs is when its sequences began:

- ``steady``: at any time; a finished one is replaced by a new one, one at a time;
- ``bursty``: a quarter of the batch begins together, every now and then;
- ``synchronized``: all in the same step, and none ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..backends import select
from ..errors import InputError, UnsupportedError
from ..planner import HostPlanner, Plan
from ..pools import StatePool
from ..spec import LayerSpec
from ..testing import initial_states
from .origin import commit, now
from .work import make_tokens, make_weights

__all__ = ["ARRIVALS", "PolicyReport", "PolicyRow", "StepClock", "bench_policies"]

ARRIVALS = ("steady", "bursty", "synchronized")
_LIFE = 512  # tokens of a sequence, on average
_BURST = 64  # steps between bursts


@dataclass(frozen=True)
class PolicyRow:
    """Step times of the recurrent layers, folds included, under one policy and arrivals.

    Attributes
    ----------
    p50_us, p99_us, max_us : float
        Microseconds a layer.
    tail : float
        ``p99_us / p50_us``.
    folds_p99, folds : int
        Folds of a step at the 99th percentile, and of all steps.
    """

    policy: str
    arrivals: str
    batch: int
    capacity: int
    format: str
    layers: int
    steps: int
    p50_us: float
    p99_us: float
    max_us: float
    tail: float
    folds_p99: int
    folds: int


@dataclass
class PolicyReport:
    """What `bench_policies` returns."""

    command: str
    commit: str
    device: str
    torch: str
    triton: str
    date: str
    rows: list[PolicyRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        """The rows as a table."""
        lines = [
            f"`{self.command}`\n\n{self.device}, torch {self.torch}, triton {self.triton}, commit "
            f"{self.commit}, {self.date}. Microseconds a layer of the recurrent layers of a step, "
            "folds included, one CUDA graph, over all steps.\n",
            "| arrivals | policy | batch | L | format | p50 | p99 | max | p99 / p50 | folds, p99 |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for r in self.rows:
            lines.append(
                f"| {r.arrivals} | {r.policy} | {r.batch} | {r.capacity} | {r.format} | "
                f"{r.p50_us:.1f} | {r.p99_us:.1f} | {r.max_us:.1f} | **{r.tail:.2f}** | "
                f"{r.folds_p99} |"
            )
        return "\n".join(lines) + "\n"


class StepClock(Protocol):
    """Runs the device's part of a planned step, and says afterwards how long each took."""

    def step(self, plan: Plan) -> None: ...

    def micros(self) -> list[float]: ...


class GraphClock:
    """One CUDA graph: the fold and the readouts of every layer, timed by events."""

    def __init__(self, pool: StatePool) -> None:
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()
        self._backend = select("auto", pool)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._captured = False
        generator = torch.Generator(pool.device).manual_seed(0)
        spec, batch = pool.spec, pool.sizes.max_sequences
        for layer in pool.layers:
            pool.bind(layer, **make_weights(spec, pool.dtype, generator))
        tokens = [make_tokens(spec, batch, pool.dtype, generator, False) for _ in pool.layers]
        self._inputs = [{n: v[:, None] for n, v in t.inputs.items()} for t in tokens]
        shape = (batch, 1, *(getattr(spec, name) for name in spec.output_dims))
        self._outputs = [
            torch.empty(shape, dtype=pool.dtype, device=pool.device) for _ in pool.layers
        ]

    def _launch(self, plan: Plan) -> None:
        self._backend.fold(self._pool, plan)
        for layer in range(len(self._pool.layers)):
            self._backend.readout(
                self._pool, plan, layer, self._inputs[layer], self._outputs[layer]
            )

    def step(self, plan: Plan) -> None:
        """A new sequence's state is whatever its page held: a step takes as long."""
        if not self._captured:
            pool = self._pool
            generator = torch.Generator(pool.device).manual_seed(1)
            for layer in range(len(pool.layers)):
                states = initial_states(pool.spec, plan.batch, generator)
                pool.checkpoints.store(layer, plan.arrays.page[: plan.batch].long(), states)
            self._launch(plan)
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._launch(plan)
            self._captured = True
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        stop.record()
        self._events.append((start, stop))

    def micros(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in self._events]


def bench_policies(
    spec: LayerSpec,
    *,
    policies: Iterable[str] | None = None,
    arrivals: Iterable[str] = ARRIVALS,
    batch: int = 256,
    capacity: int = 32,
    format: str = "fp32_split",
    layers: int = 8,
    steps: int = 2000,
    command: str = "",
    clock: Callable[[StatePool], StepClock] | None = None,
) -> PolicyReport:
    """Time every step of every policy under every kind of arrivals.

    Parameters
    ----------
    policies : names, optional
        As `HostPlanner` takes them. If omitted ``full``, ``spread``, and a ``deadline`` of one and
        a half times the folds that `spread` makes in a step.
    clock : function of a pool, optional
        What runs and times the steps; a CUDA graph if omitted.

    Raises
    ------
    UnsupportedError
        No CUDA device, and no other clock.
    """
    device = torch.device("cpu")
    if clock is None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "device: got no CUDA device; allowed a GPU, since an interpreted kernel's time "
                "means nothing; run bench on the machine that serves, or `replayinfer simulate`"
            )
        device, clock = torch.device("cuda"), GraphClock
    if policies is None:
        policies = ("full", "spread", f"deadline:{-(-3 * batch // (2 * capacity))}")
    policies = tuple(policies)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    import triton

    report = PolicyReport(command, commit(), name, torch.__version__, triton.__version__, now())
    for kind in arrivals:
        for policy in policies:
            pool = StatePool(
                spec, range(layers), batch, capacity=capacity, format=format,
                dtype=torch.bfloat16, device=device,
            )  # fmt: skip
            folds, micros = _steps(pool, clock(pool), policy, kind, steps)
            times = np.array(micros) / layers
            p50, p99 = (float(np.percentile(times, q)) for q in (50, 99))
            report.rows.append(
                PolicyRow(
                    policy, kind, batch, capacity, format, layers, steps,
                    round(p50, 2), round(p99, 2), round(float(times.max()), 2),
                    round(p99 / p50, 3), int(np.percentile(folds, 99)), int(folds.sum()),
                )
            )  # fmt: skip
            del pool
    return report


def _steps(
    pool: StatePool, clock: StepClock, policy: str, kind: str, steps: int
) -> tuple[NDArray[np.int64], list[float]]:
    """Folds and microseconds of `steps` steps."""
    if kind not in ARRIVALS:
        raise InputError(f"arrivals: got {kind!r}; allowed {', '.join(ARRIVALS)}; pick one")
    rng = np.random.default_rng(0)
    batch = pool.sizes.max_sequences
    planner = HostPlanner(pool, policy=policy)
    sequences = np.array(pool.alloc(batch), dtype=np.int64)
    if kind == "steady":
        # Begun at different times: a cycle before the first step that is timed.
        for _ in range(pool.capacity):
            plan = planner.plan(sequences, rng.integers(0, 2, batch).astype(np.int32), window=1)
            planner.folded(plan)
            planner.commit(plan)
    folds = np.zeros(steps, dtype=np.int64)
    for step in range(steps):
        leaving = _leaving(kind, step, batch, rng)
        if leaving.size:
            pool.free(sequences[leaving])
            sequences[leaving] = pool.alloc(leaving.size)
        plan = planner.plan(sequences)
        folds[step] = plan.fold_count
        clock.step(plan)
        planner.folded(plan)
        planner.commit(plan)
    return folds, clock.micros()


def _leaving(kind: str, step: int, batch: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Which of the batch end before this step, and are replaced."""
    if kind == "steady":
        return np.flatnonzero(rng.random(batch) < 1 / _LIFE)
    if kind == "bursty" and step and step % _BURST == 0:
        quarter = step // _BURST % 4
        return np.arange(quarter * batch // 4, (quarter + 1) * batch // 4)
    return np.zeros(0, dtype=np.int64)
