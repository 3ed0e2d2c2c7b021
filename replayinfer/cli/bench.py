"""``replayinfer bench``: decode kernels on this machine's GPU, against installed peers."""

from __future__ import annotations

import json as json_text
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from replayinfer import InputError, LayerSpec, read_config

from ..bench import BenchCase, BenchReport, run_bench
from ..bench.report import markdown_table, plot, shape
from ..formats import get_format
from ..spec.presets import PRESETS, find_preset

__all__ = ["bench"]


def bench(
    model: Annotated[
        str,
        typer.Option(help=f"A config.json, a folder with one, or a name: {', '.join(PRESETS)}."),
    ] = "nemotron-3-super",
    family: Annotated[
        str | None, typer.Option(help="Refuse a model of another family: mamba2, gdn or kda.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32,128,256",
    format: Annotated[
        str, typer.Option(help="Checkpoint formats, comma-separated.")
    ] = "fp32_split,fp32,bf16",
    capacity: Annotated[
        str, typer.Option(help="Rows before a fold (L), comma-separated; each is measured.")
    ] = "16",
    backend: Annotated[str, typer.Option(help="auto, triton or torch.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Write NAME.json, NAME.md and NAME.png into this folder.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="NAME of those files.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
) -> int:
    spec = _spec(model, family)
    formats = [get_format(f).name for f in format.split(",")]
    cases = [
        BenchCase(spec, b, f, length, backend=backend)
        for f in formats
        for length in _integers("capacity", capacity)
        for b in _integers("batch", batch)
    ]
    console = Console(stderr=True)
    done = iter(range(1, len(cases) + 1))

    def progress(case: BenchCase, row: dict[str, Any]) -> None:
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}x {row['baseline']}"
        console.print(
            f"[{next(done)}/{len(cases)}] batch {case.batch}, {case.format}, L={case.capacity}: "
            f"{row['ours_us']:.1f} us{ratio}",
            markup=False, highlight=False,
        )  # fmt: skip

    command = "replayinfer " + shlex.join(["bench", *_arguments()])
    report = run_bench(cases, command=command, progress=progress)
    if out is not None:
        _write(report, out, name or f"{spec.family}-{Path(model).name}")
    if json:
        print(json_text.dumps(report.as_dict(), allow_nan=False))
    else:
        Console().print(_table(report))
    return 0


def _spec(model: str, family: str | None) -> LayerSpec:
    preset = find_preset(model)
    layers = preset.read() if preset else read_config(model)
    specs = {spec for spec in layers.ssm.values() if family in (None, spec.family)}
    if len(specs) != 1:
        kinds = sorted({s.family for s in layers.ssm.values()}) or ["none"]
        raise InputError(
            f"family: got {family!r} for {model}, whose recurrent layers are {', '.join(kinds)}; "
            "allowed one kind of layer; name it with --family"
        )
    (spec,) = specs
    return spec


def _integers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise InputError(
            f"{option}: got {text!r}; allowed integers >= 1, comma-separated; e.g. 1,32,256"
        )
    return values


def _arguments() -> list[str]:
    return sys.argv[2:] if len(sys.argv) > 1 and sys.argv[1] == "bench" else []


def _write(report: BenchReport, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json_text.dumps(report.as_dict(), indent=1, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n")
    (folder / f"{name}.md").write_text(markdown_table(report))
    plot(report, folder / f"{name}.png")


def _table(report: BenchReport) -> Table:
    table = Table(title=f"{report.device}, read ceiling {report.read_ceiling_tbps} TB/s")
    for column in ("layer", "batch", "format", "L", "us", "standard", "us", "ratio"):
        table.add_column(column)
    for row in report.rows:
        theirs = "" if row["baseline_us"] is None else f"{row['baseline_us']:.1f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        table.add_row(
            shape(row), str(row["batch"]), row["format"], str(row["capacity"]),
            f"{row['ours_us']:.1f}", row["baseline"], theirs, ratio,
        )  # fmt: skip
    return table
