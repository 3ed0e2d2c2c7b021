"""One bench run: every case against every peer, as rows of one JSON document."""

from __future__ import annotations

import datetime
import gc
import math
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..checks import dtype_name
from ..errors import UnsupportedError
from ..formats import get_format
from ..spec import LayerSpec
from .peers import standard_kernels
from .replay import bytes_per_step, make_steps
from .timing import capture, interleaved, read_ceiling_tbps

__all__ = ["BenchCase", "BenchReport", "run_bench"]

_COLD_BYTES = 512 << 20  # states of all layers together, so that no layer finds its own in the L2
_MOST_BYTES = 24 << 30
_STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16}


@dataclass(frozen=True)
class BenchCase:
    """One row to measure."""

    spec: LayerSpec
    batch: int
    format: str = "fp32_split"
    capacity: int = 16
    dtype: torch.dtype = torch.bfloat16
    backend: str = "auto"


@dataclass
class BenchReport:
    """What `run_bench` returns; `as_dict` is the bench JSON."""

    command: str
    commit: str
    device: str
    torch: str
    triton: str
    read_ceiling_tbps: float
    date: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_bench(
    cases: Iterable[BenchCase],
    *,
    command: str,
    progress: Callable[[BenchCase, dict[str, Any]], None] | None = None,
) -> BenchReport:
    """Time decode steps of one token on the current CUDA device.

    Raises
    ------
    UnsupportedError
        No CUDA device: Triton's interpreter says nothing about speed, so nothing is timed.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device: got no CUDA device; allowed a GPU, since an interpreted kernel's time means "
            "nothing; run bench on the machine that serves"
        )
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    report = BenchReport(
        command=command,
        commit=_commit(),
        device=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        triton=triton.__version__,
        read_ceiling_tbps=round(read_ceiling_tbps(device), 3),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    for case in cases:
        row = _measure(case, device)
        report.rows.append(row)
        if progress:
            progress(case, row)
        gc.collect()
        torch.cuda.empty_cache()
    return report


def _measure(case: BenchCase, device: torch.device) -> dict[str, Any]:
    spec, fmt = case.spec, get_format(case.format)
    state_dtype = _STATE_DTYPES[fmt.standard_bytes]
    state_bytes = case.batch * math.prod(spec.state_shape) * fmt.standard_bytes
    layers = min(max(-(-_COLD_BYTES // state_bytes), 4), 64, max(_MOST_BYTES // state_bytes, 1))

    ours = make_steps(
        spec, batch=case.batch, layers=layers, capacity=case.capacity, format=case.format,
        dtype=case.dtype, backend=case.backend, device=device,
    )  # fmt: skip
    ours_graph = capture(ours.launch)
    peers: dict[str, float] = {}
    best: tuple[float, float, str] | None = None
    for peer in standard_kernels(spec, case.batch, layers, case.dtype, state_dtype, device):
        try:
            graph = capture(peer.launch)
        except Exception as error:  # a choice this peer cannot be compiled with
            if "out of memory" in str(error).lower():
                raise
            torch.cuda.synchronize()
            continue
        times = interleaved({"ours": ours_graph, "peer": graph})
        theirs, mine = times["peer"] / layers, times["ours"] / layers / ours.steps
        peers[peer.name] = round(theirs, 2)
        if best is None or theirs < best[0]:
            best = (theirs, mine, peer.name)
        del graph
    if best is None:
        mine = interleaved({"ours": ours_graph})["ours"] / layers / ours.steps
        best = (math.nan, mine, "none installed")
    theirs, mine, name = best
    row_bytes = spec.row_bytes(case.dtype, fmt)
    shared, count = spec.shared_heads
    return {
        "family": spec.family, "heads": spec.heads, shared: count, "dim": spec.dim,
        "state": spec.state, "batch": case.batch, "window": 1, "format": case.format,
        "state_dtype": dtype_name(state_dtype), "capacity": case.capacity, "policy": "full",
        "commit_rate": 1.0, "backend": ours.backend, "layers": layers,
        "ours_us": round(mine, 2), "baseline": name,
        "baseline_us": None if math.isnan(theirs) else round(theirs, 2),
        "ratio": None if math.isnan(theirs) else round(theirs / mine, 3),
        "bytes": bytes_per_step(spec, fmt, row_bytes, case.batch, case.capacity),
        "bytes_per_sequence_and_layer": ours.memory_per_sequence,
        "peers": peers,
    }  # fmt: skip


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
