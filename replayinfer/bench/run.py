"""One bench run: every case against every peer, as rows of one JSON document."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from ..cost import accepted_mean
from ..errors import UnsupportedError
from ..formats import CheckpointFormat, get_format
from ..spec import LayerSpec
from .origin import commit, now
from .peers import Bound, Scope, Variant, describe, standard_kernels
from .replay import ReplaySteps, bytes_per_step, make_steps
from .timing import capture, interleaved, read_ceiling_tbps
from .verify import verify_peer
from .work import Work, make_work

__all__ = ["BenchCase", "BenchReport", "run_bench"]

_COLD_BYTES = 512 << 20  # states of all layers together, so that no layer finds its own in the L2
_MOST_BYTES = 16 << 30  # of one arm; those that return new states hold a few times as much
_STANDARD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FINALISTS = 2  # configurations that are timed in turns with ours, after a short look at each


@dataclass(frozen=True)
class BenchCase:
    """One row to measure.

    Attributes
    ----------
    scope : {"ssm", "mixer"}
        The state's step alone, or the convolution before it as well.
    gated : bool
        Whether the model multiplies by ``silu(z)`` straight after the step, and not in a norm.
    conv_bias : bool
        Whether the model's convolution has a bias.
    direct : {"auto", "never", "always"}
        Whether our steps move the states in place; as in `ReplayDecodeWrapper`.
    window : int
        New tokens of every sequence: 1, or a token and its drafts, to be verified.
    commit_rate : float
        Probability that a draft is right where all before it were.
    layers : int
        Layers of this kind in the model: what a step does once is spread over them. Fewer are
        walked where their states would not fit, more where one would find its own in the L2.
    """

    spec: LayerSpec
    batch: int
    format: str = "fp32_split"
    capacity: int = 16
    dtype: torch.dtype = torch.bfloat16
    backend: str = "auto"
    scope: Scope = "ssm"
    gated: bool = False
    conv_bias: bool = True
    direct: Literal["auto", "never", "always"] = "auto"
    window: int = 1
    commit_rate: float = 1.0
    layers: int = 32

    @property
    def standard_format(self) -> str:
        """What a standard kernel keeps its states in: the same precision, in one piece."""
        fmt = get_format(self.format)
        if fmt.name in _STANDARD_DTYPES:
            return fmt.name
        return "fp32" if fmt.standard_bytes == 4 else "bf16"

    @property
    def state_dtype(self) -> torch.dtype:
        return _STANDARD_DTYPES[self.standard_format]


@dataclass
class BenchReport:
    """What `run_bench` returns; `as_dict` is the bench JSON.

    Attributes
    ----------
    skipped : dict of str to str
        Peers, or configurations of them, that were not timed, with the reason.
    versions : dict of str to str
        Of the peers that were.
    rows : list of dict
        See ``docs/guides/bench.md``.
    """

    command: str
    commit: str
    device: str
    torch: str
    triton: str
    read_ceiling_tbps: float
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_bench(
    cases: Iterable[BenchCase],
    *,
    command: str,
    progress: Callable[[BenchCase, dict[str, Any], BenchReport], None] | None = None,
) -> BenchReport:
    """Time decode steps on the current CUDA device.

    `progress` is called after every case with its row and the report so far.

    Raises
    ------
    UnsupportedError
        No CUDA device, or Triton in its interpreter, which says nothing about speed.
    """
    device = _device()
    import triton

    report = BenchReport(
        command=command,
        commit=commit(),
        device=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        triton=triton.__version__,
        read_ceiling_tbps=round(read_ceiling_tbps(device), 3),
        date=now(),
    )
    verdicts = _Verdicts(device)
    for case in cases:
        row = _measure(case, device, verdicts, report)
        report.rows.append(row)
        if progress:
            progress(case, row, report)
        gc.collect()
        torch.cuda.empty_cache()
    return report


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device: got no CUDA device; allowed a GPU, since an interpreted kernel's time means "
            "nothing; run bench on the machine that serves"
        )
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise UnsupportedError(
            "TRITON_INTERPRET: got 1; allowed 0 while timing, since it keeps kernels off the GPU; "
            "unset it"
        )
    return torch.device("cuda", torch.cuda.current_device())


class _Verdicts:
    """What `verify_peer` says, asked once for each kernel, shape and type of a run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[Any, ...], str | None] = {}

    def why_not(self, variant: Variant, case: BenchCase) -> str | None:
        about = (
            case.spec, case.scope, case.dtype, case.state_dtype, case.gated, case.conv_bias,
            case.window,
        )  # fmt: skip
        key = (variant.name, *about)
        if key not in self._known:
            self._known[key] = verify_peer(
                variant, case.spec, scope=case.scope, dtype=case.dtype,
                state_dtype=case.state_dtype, device=self._device, gated=case.gated,
                conv_bias=case.conv_bias, window=case.window,
            )  # fmt: skip
        return self._known[key]


def _measure(
    case: BenchCase, device: torch.device, verdicts: _Verdicts, report: BenchReport
) -> dict[str, Any]:
    spec, fmt = case.spec, get_format(case.format)
    state_bytes = case.batch * math.prod(spec.state_shape) * fmt.standard_bytes
    layers = max(case.layers, min(-(-_COLD_BYTES // state_bytes), 64))
    layers = min(layers, max(_MOST_BYTES // state_bytes, 1))
    ours = make_steps(
        spec, batch=case.batch, layers=layers, capacity=case.capacity, format=case.format,
        dtype=case.dtype, backend=case.backend, device=device, scope=case.scope,
        gated=case.gated, conv_bias=case.conv_bias, direct=case.direct, window=case.window,
        commit_rate=case.commit_rate,
    )  # fmt: skip
    ours_graph = capture(ours.launch)
    work = make_work(
        spec, batch=case.batch, layers=layers, dtype=case.dtype, state_dtype=case.state_dtype,
        device=device, gated=case.gated, conv_bias=case.conv_bias, window=case.window,
    )  # fmt: skip

    peers: dict[str, float] = {}
    best: dict[str, _Arm] = {}
    skipped: dict[str, str] = {}
    for variant in standard_kernels(
        spec, case.scope, case.dtype, case.state_dtype, skipped, report.versions, case.window
    ):
        arm = _captured(variant, case, work, verdicts, skipped)
        if arm is None:
            continue
        looked = interleaved({variant.name: arm.graph}, rounds=1, warm=1, counted=3)
        peers[variant.name] = looked[variant.name] / layers
        best[variant.name] = arm
        del arm
        for name in sorted(best, key=lambda n: peers[n])[_FINALISTS:]:
            del best[name]
    graphs = {name: arm.graph for name, arm in best.items()}
    times = interleaved({"ours": ours_graph, **graphs})
    mine = times.pop("ours") / layers / ours.steps
    peers |= {name: micros / layers for name, micros in times.items()}
    baseline = min(times, key=lambda n: peers[n], default=None)
    _record(report.skipped, skipped, case)
    return _row(case, fmt, ours, layers, mine, baseline, peers)


@dataclass(frozen=True)
class _Arm:
    """A captured step, and the tensors that it writes to, which a graph does not keep alive."""

    graph: torch.cuda.CUDAGraph
    bound: Bound


def _captured(
    variant: Variant,
    case: BenchCase,
    work: Work,
    verdicts: _Verdicts,
    skipped: MutableMapping[str, str],
) -> _Arm | None:
    """One step of every layer by a peer's kernel, or None and the reason in `skipped`."""
    reason = verdicts.why_not(variant, case)
    if reason is None:
        try:
            bound = variant.bind(work)
            return _Arm(capture(functools.partial(_all_layers, bound, work.layers)), bound)
        except Exception as error:
            # Without the best of them a peer would look slower than it is, so this ends the run.
            if "out of memory" in str(error).lower():
                raise
            torch.cuda.synchronize()
            reason = describe(error)
    skipped[variant.name] = reason
    return None


def _all_layers(bound: Bound, layers: int) -> None:
    for layer in range(layers):
        bound.step(layer)


def _record(all_of_run: dict[str, str], skipped: dict[str, str], case: BenchCase) -> None:
    """Add a case's reasons; what differs between cases names its own."""
    for name, reason in skipped.items():
        if all_of_run.setdefault(name, reason) != reason:
            window = "" if case.window == 1 else f", window {case.window}"
            where = f"{case.scope}, {case.standard_format}, batch {case.batch}{window}"
            all_of_run.setdefault(f"{name}, {where}", reason)


def _row(
    case: BenchCase,
    fmt: CheckpointFormat,
    ours: ReplaySteps,
    layers: int,
    mine: float,
    baseline: str | None,
    peers: dict[str, float],
) -> dict[str, Any]:
    spec = case.spec
    shared, count = spec.shared_heads
    theirs = None if baseline is None else peers[baseline]
    return {
        "family": spec.family, "heads": spec.heads, shared: count, "dim": spec.dim,
        "state": spec.state, "scope": case.scope, "batch": case.batch, "window": case.window,
        "format": case.format, "state_dtype": case.standard_format, "capacity": case.capacity,
        "policy": "full", "commit_rate": case.commit_rate, "backend": ours.backend,
        "direct": ours.direct, "layers": layers, "ours_us": round(mine, 2),
        "baseline": baseline or "none installed",
        "baseline_us": None if theirs is None else round(theirs, 2),
        "ratio": None if theirs is None else round(theirs / mine, 3),
        "rounds_per_s": round(case.batch / mine * 1e6),
        "tokens_per_s": round(
            case.batch * accepted_mean(case.window, case.commit_rate) / mine * 1e6
        ),
        "bytes": bytes_per_step(
            spec, fmt, case.dtype, batch=case.batch, capacity=case.capacity, direct=ours.direct,
            scope=case.scope, window=case.window, commit_rate=case.commit_rate,
        ),
        "bytes_per_sequence_and_layer": ours.memory_per_sequence,
        "peers": {name: round(micros, 2) for name, micros in sorted(peers.items())},
    }  # fmt: skip
