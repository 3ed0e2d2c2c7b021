"""CUDA-graph replay timing: medians of events, arms interleaved, and the device's read ceiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

__all__ = ["capture", "interleaved", "read_ceiling_tbps"]

Launch = Callable[[], None]


def capture(launch: Launch) -> torch.cuda.CUDAGraph:
    """Capture what `launch` enqueues, after one run outside, which compiles and allocates."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def interleaved(
    arms: Mapping[str, torch.cuda.CUDAGraph], *, rounds: int = 4, warm: int = 2, counted: int = 5
) -> dict[str, float]:
    """Median microseconds of each graph, the arms in turn forwards and backwards (A B B A).

    Order alone moves a measurement, so no arm always runs first or behind the same one. A turn is
    `warm` replays that do not count and `counted` that do, back to back: right behind another arm,
    or behind a wait for the host, the same kernels took up to 40% longer.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        order = list(arms)[:: 1 if turn % 2 == 0 else -1]
        for name in order:
            for _ in range(warm):
                arms[name].replay()
            events = [
                tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(counted)
            ]
            for start, stop in events:
                start.record()
                arms[name].replay()
                stop.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(stop) * 1e3 for start, stop in events]
    return {name: statistics.median(values) for name, values in times.items()}


def read_ceiling_tbps(device: torch.device) -> float:
    """Bytes a second that a plain streaming read reaches on `device`, in TB/s."""
    numbers = torch.randn(512 * 1024 * 1024, device=device)
    rows = numbers.view(-1, 1 << 17)
    most = torch.empty(rows.shape[0], device=device)

    def read() -> None:
        torch.amax(rows, dim=1, out=most)

    graph = capture(read)
    micros = interleaved({"read": graph})["read"]
    return numbers.nbytes / micros / 1e6
