"""CUDA-graph replay timing: medians of events, arms interleaved, and the device's read ceiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

__all__ = ["capture", "interleaved", "read_ceiling_tbps"]

Launch = Callable[[], None]


def capture(launch: Launch) -> torch.cuda.CUDAGraph:
    """Capture what `launch` enqueues, after one run of it outside (which compiles and "
    "allocates)."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def interleaved(arms: Mapping[str, torch.cuda.CUDAGraph], *, rounds: int = 12) -> dict[str, float]:
    """Median microseconds of each graph, the arms in turn forwards and backwards (A B B A).

    Order alone moves a measurement, so no arm always runs first or behind the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(rounds):
        for name in order if turn % 2 == 0 else reversed(order):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            arms[name].replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def read_ceiling_tbps(device: torch.device) -> float:
    """Bytes a second that a plain streaming read reaches on `device`, in TB/s."""
    numbers = torch.randn(512 * 1024 * 1024, device=device)
    rows = numbers.view(-1, 1 << 17)
    graph = capture(lambda: torch.amax(rows, dim=1) and None)  # one pass over 2 GiB
    micros = interleaved({"read": graph})["read"]
    return numbers.nbytes / micros / 1e6
