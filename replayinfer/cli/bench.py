"""``replayinfer bench``: decode kernels on this machine's GPU, against installed peers."""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from replayinfer import GDNSpec, InputError, KDASpec, LayerSpec, Mamba2Spec

from ..bench import BenchCase, BenchReport, run_bench
from ..bench.peers import Scope
from ..bench.plan import bench_plans
from ..bench.policies import bench_policies
from ..bench.report import kept, markdown_table, plot, plot_policies, scopes
from ..bench.report import shape as shape_of
from ..cost import best_capacity
from ..formats import get_format
from ..spec.presets import PRESETS
from .options import command_line, integers, one_kind

__all__ = ["bench"]

_FAMILIES: dict[str, Callable[[int, int, int, int], LayerSpec]] = {
    "mamba2": lambda h, d, n, shared: Mamba2Spec(heads=h, dim=d, state=n, groups=shared),
    "gdn": lambda h, d, n, shared: GDNSpec(heads=h, dim=d, state=n, key_heads=shared),
    "kda": lambda h, d, n, shared: KDASpec(heads=h, dim=d, state=n, key_heads=shared),
}
_DEFAULT_MODEL = "nemotron-3-super"
_DIRECT = ("auto", "never", "always")
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)")


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help=f"A config.json, a folder with one, or a name: {', '.join(PRESETS)}; without it "
            f"and without --shape, {_DEFAULT_MODEL}."
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Refuse a model of another family: mamba2, gdn or kda.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model, with --family: heads x dim x state / groups or key heads, "
            "e.g. 128x64x128/8."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32,128,256",
    format: Annotated[
        str, typer.Option(help="Checkpoint formats, comma-separated.")
    ] = "fp32_split,fp32,bf16",
    capacity: Annotated[
        str,
        typer.Option(
            help="Rows before a fold (L), comma-separated, each is measured; auto: for each format "
            "the power of two that moves the fewest bytes."
        ),
    ] = "auto",
    mixer: Annotated[
        bool,
        typer.Option("--mixer", help="Also time the convolution and the step together."),
    ] = False,
    direct: Annotated[
        str,
        typer.Option(
            help="Whether our steps move the states in place: auto (where that is faster), never "
            "or always."
        ),
    ] = "auto",
    window: Annotated[
        str,
        typer.Option(
            help="Tokens of a step, comma-separated, each is measured: 1 to decode, 1 + drafts to "
            "verify."
        ),
    ] = "1",
    commit_rate: Annotated[
        str,
        typer.Option(
            help="Of windows: the probability that a draft is right where all before it were, "
            "comma-separated."
        ),
    ] = "0.7",
    backend: Annotated[str, typer.Option(help="auto, triton or torch.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Write NAME.json, NAME.md and NAME.png into this folder.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="NAME of those files.")] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Instead of layers, time the plan of a step: on the host and the device."
        ),
    ] = False,
    policies: Annotated[
        bool,
        typer.Option(
            "--policies",
            help="Instead, time 2,000 steps under every fold policy and three kinds of arrivals, "
            "at the first batch, format and capacity.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
) -> int:
    if plan:
        return _plan(json)
    spec, how = _layer(model, family, shape)
    if policies:
        f = get_format(format.split(",")[0]).name
        length = best_capacity(spec, f) if capacity == "auto" else integers("capacity", capacity)[0]
        return _policies(spec, integers("batch", batch)[0], f, length, out, name, json)
    if direct not in _DIRECT:
        raise InputError(f"direct: got {direct!r}; allowed {', '.join(_DIRECT)}; pick one")
    if mixer and not spec.conv_width:
        raise InputError(
            "mixer: got a layer without a convolution; allowed one that has it; leave --mixer out"
        )
    windows, rates = integers("window", window), _rates(commit_rate)
    if mixer and max(windows) > 1:
        raise InputError(
            f"mixer: got windows of {max(windows)}; allowed 1, since no convolution of a peer is "
            "timed over windows; leave --mixer or --window out"
        )
    if direct == "always" and max(windows) > 1:
        raise InputError(
            f"direct: got 'always' for windows of {max(windows)}; allowed auto or never, since a "
            "state that has moved takes no draft back; leave it out"
        )
    lengths = None if capacity == "auto" else integers("capacity", capacity)
    if lengths and min(lengths) < max(windows):
        raise InputError(
            f"capacity: got {min(lengths)} for windows of {max(windows)}; allowed at least the "
            "window, since none is truncated; raise it"
        )
    measured: tuple[Scope, ...] = ("ssm", "mixer") if mixer else ("ssm",)
    cases = [
        BenchCase(
            spec, b, f, length, backend=backend, scope=scope, direct=cast(Any, direct), window=w,
            commit_rate=r, **how,
        )
        for scope in measured
        for f in [get_format(f).name for f in format.split(",")]
        for w in windows
        for r in (rates if w > 1 else [1.0])
        for length in lengths or [best_capacity(spec, f, window=w, commit_rate=r)]
        for b in integers("batch", batch)
    ]  # fmt: skip
    layer = shape.replace("/", "-") if shape else Path(model or _DEFAULT_MODEL).name
    file_name = name or f"{spec.family}-{layer}"
    console = Console(stderr=True)
    done = iter(range(1, len(cases) + 1))

    def progress(case: BenchCase, row: dict[str, Any], report: BenchReport) -> None:
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}x {row['baseline']}"
        console.print(
            f"[{next(done)}/{len(cases)}] {case.scope}, batch {case.batch}, {case.format}, "
            f"L={kept(row)}: {row['ours_us']:.1f} us{ratio}",
            markup=False, highlight=False,
        )  # fmt: skip
        if out is not None:  # after every row: a run that is cut short keeps what it measured
            _write(report, out, file_name)

    report = run_bench(cases, command=command_line("bench"), progress=progress)
    for peer, reason in sorted(report.skipped.items()):
        console.print(f"not timed: {peer}: {reason}", markup=False, highlight=False)
    if out is not None:
        plot(report, out / f"{file_name}.png")
    if json:
        print(json_text.dumps(report.as_dict(), allow_nan=False))
    else:
        for table in _tables(report):
            Console().print(table)
    return 0


def _plan(json: bool) -> int:
    report = bench_plans()
    if json:
        print(json_text.dumps(report.as_dict(), allow_nan=False))
        return 0
    table = Table(title=f"One plan, {report.device or 'no GPU'}, policy {report.policy}")
    for column in ("path", "sequences", "us"):
        table.add_column(column)
    for row in report.rows:
        table.add_row(row.path, str(row.sequences), f"{row.us:.1f}")
    Console().print(table)
    return 0


def _policies(
    spec: LayerSpec,
    batch: int,
    format: str,
    capacity: int,
    out: Path | None,
    name: str | None,
    json: bool,
) -> int:
    report = bench_policies(
        spec, batch=batch, capacity=capacity, format=format, command=command_line("bench")
    )
    text = json_text.dumps(report.as_dict(), allow_nan=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name or 'policies'}.json").write_text(text + "\n")
        (out / f"{name or 'policies'}.md").write_text(report.markdown())
        plot_policies(report, out / f"{name or 'policies'}.png")
    print(text if json else report.markdown(), end="\n" if json else "")
    return 0


def _rates(text: str) -> list[float]:
    """``"0.5,0.9"`` as [0.5, 0.9]."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise InputError(
            f"commit_rate: got {text!r}; allowed numbers from 0 to 1, comma-separated; e.g. "
            "0.5,0.7,0.9"
        )
    return values


def _layer(
    model: str | None, family: str | None, shape: str | None
) -> tuple[LayerSpec, dict[str, Any]]:
    """The layer to time, and what a `BenchCase` says of it besides."""
    if family not in (None, *_FAMILIES):
        raise InputError(f"family: got {family!r}; allowed {', '.join(_FAMILIES)}; pick one")
    if shape is not None:
        sizes = _SHAPE.fullmatch(shape)
        if family is None or model is not None or sizes is None:
            raise InputError(
                f"shape: got {shape!r} with family {family!r} and model {model!r}; allowed HEADSx"
                "DIMxSTATE/SHARED with --family and without --model; e.g. --family mamba2 --shape "
                "128x64x128/8"
            )
        return _FAMILIES[family](*map(int, sizes.groups())), {}
    layers, spec = one_kind(model or _DEFAULT_MODEL, family)
    return spec, {
        "gated": layers.gate_in_readout,
        "conv_bias": layers.conv_bias,
        "layers": sum(1 for other in layers.ssm.values() if other == spec),
    }


def _write(report: BenchReport, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json_text.dumps(report.as_dict(), indent=1, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n")
    (folder / f"{name}.md").write_text(markdown_table(report))


def _tables(report: BenchReport) -> Iterator[Table]:
    for title, rows in scopes(report):
        table = Table(
            title=f"{title}; {report.device}, read ceiling {report.read_ceiling_tbps} TB/s"
        )
        for column in ("layer", "batch", "format", "L", "us", "standard", "us", "ratio"):
            table.add_column(column)
        for row in rows:
            theirs = "" if row["baseline_us"] is None else f"{row['baseline_us']:.1f}"
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
            table.add_row(
                shape_of(row), str(row["batch"]), row["format"], kept(row),
                f"{row['ours_us']:.1f}", row["baseline"], theirs, ratio,
            )  # fmt: skip
        yield table
