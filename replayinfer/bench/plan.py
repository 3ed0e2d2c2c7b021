"""What a plan costs: on the host, on one CPU core, and on the device as a node of a CUDA graph."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..backends import select
from ..planner import DevicePlanner, HostPlanner
from ..pools import StatePool
from ..spec import Mamba2Spec
from .timing import capture, interleaved

__all__ = ["PlanReport", "PlanRow", "bench_plans"]

SEQUENCES = (64, 256, 512, 1024)
_CAPACITY = 16
_LAUNCHES = 16  # of a graph: the cost of starting one is not a plan's


@dataclass(frozen=True)
class PlanRow:
    """Median microseconds of one plan of `sequences` whose histories are staggered.

    ``host``: `HostPlanner.plan`, upload enqueued. ``device``: the kernel, inside a CUDA graph.
    """

    path: str
    sequences: int
    us: float


@dataclass(frozen=True)
class PlanReport:
    """Attributes
    ----------
    policy : {"full", "spread"}
    cpu_threads : int
        Threads that torch may use; the host path itself uses one.
    device : str or None
        Of the device rows; None where there are none.
    """

    policy: str
    rows: list[PlanRow]
    cpu_threads: int
    device: str | None
    torch: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_plans(*, policy: str = "full", steps: int = 200) -> PlanReport:
    """Time plans of both paths; those of the device only where there is a CUDA device.

    Parameters
    ----------
    policy : {"full", "spread"}
    steps : int
        Plans of the host path that are timed, after a whole cycle of folds that is not.
    """
    rows = [PlanRow("host", n, _host_us(n, policy, steps)) for n in SEQUENCES]
    name = None
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        rows += [PlanRow("device", n, _device_us(n, policy)) for n in SEQUENCES]
    return PlanReport(policy, rows, torch.get_num_threads(), name, torch.__version__)


def _pool(sequences: int, planner: Any, device: str) -> tuple[StatePool, list[Any]]:
    """One small layer, since a plan does not depend on what a page holds; staggered histories."""
    spec = Mamba2Spec(heads=1, dim=2, state=2, conv_width=4)
    pool = StatePool(
        spec, [0], sequences, capacity=_CAPACITY, planner=planner, device=device
    )  # fmt: skip
    handles = pool.alloc(sequences)
    generator = np.random.default_rng(0)
    stepper = HostPlanner(pool)
    for step in range(_CAPACITY):
        windows = (np.arange(sequences) % _CAPACITY <= step).astype(np.int32)
        plan = stepper.plan(handles, windows)
        stepper.folded(plan)
        stepper.commit(plan)
    return pool, [handles[i] for i in generator.permutation(sequences)]


def _host_us(sequences: int, policy: str, steps: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool, handles = _pool(sequences, "host", device)
    planner = HostPlanner(pool, policy=policy)
    batch = np.array(handles, dtype=np.int64)
    times = []
    for step in range(steps + _CAPACITY):
        start = time.perf_counter_ns()
        plan = planner.plan(batch)
        stop = time.perf_counter_ns()
        planner.folded(plan)
        planner.commit(plan)
        if step >= _CAPACITY:
            times.append((stop - start) / 1e3)
    return round(statistics.median(times), 2)


def _device_us(sequences: int, policy: str) -> float:
    pool, handles = _pool(sequences, "device", "cuda")
    planner = DevicePlanner(pool, select("triton", pool), policy=policy)  # type: ignore[arg-type]
    batch = torch.tensor(handles, device="cuda")

    def launch() -> None:
        for _ in range(_LAUNCHES):
            planner.abort(planner.plan(batch))

    graph = capture(launch)
    return round(interleaved({"plan": graph}, rounds=8)["plan"] / _LAUNCHES, 3)
