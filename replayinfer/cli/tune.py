"""``replayinfer tune``: launch choices measured on this machine's GPU, as a launch table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from replayinfer import __version__

from ..backends.triton.variants import Variant, variants
from ..cost import best_capacity
from ..errors import InputError
from ..formats import get_format
from ..spec import LayerSpec
from ..spec.presets import PRESETS
from ..tune import TuneCase, TuneReport, merge_table, read_content, run_tune, write_content
from ..tune.choose import show as show_choice
from ..tune.table import file_name, render
from .options import command_line, integers, one_spec

__all__ = ["tune"]

_COMMIT_RATE = 0.7  # of drafts, in the length that windows are measured with


def tune(
    model: Annotated[
        str,
        typer.Option(help=f"A config.json, a folder with one, or a name: {', '.join(PRESETS)}."),
    ] = "nemotron-3-super",
    family: Annotated[
        str | None, typer.Option(help="Refuse a model of another family: mamba2, gdn or kda.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: tune the shape of a rank.")] = 1,
    batch: Annotated[
        str, typer.Option(help="Batch sizes, comma-separated; a choice holds up to its own.")
    ] = "1,8,32,128,256,512",
    format: Annotated[
        str, typer.Option(help="Checkpoint formats, comma-separated.")
    ] = "fp32_split,fp32,bf16",
    capacity: Annotated[
        str,
        typer.Option(
            help="Rows before a fold (L) while measuring; auto: for each format, and for windows "
            "apart, the power of two that moves the fewest bytes."
        ),
    ] = "auto",
    window: Annotated[
        str,
        typer.Option(
            help="Windows of several tokens whose kernels are tuned as well, comma-separated: a "
            "choice is the best over all of them. 1: plain decode alone."
        ),
    ] = "4",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Merge the choices into this file, or into the device's file in this folder. "
            "Without it the table is printed."
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing: print what would be launched now.")
    ] = False,
) -> int:
    spec = one_spec(model, family).shard(0, tp)
    formats = [get_format(f).name for f in format.split(",")]
    batches = integers("batch", batch)
    lengths = [None] if capacity == "auto" else integers("capacity", capacity)
    if len(lengths) > 1:
        raise InputError(f"capacity: got {capacity!r}; allowed one integer or auto; run tune twice")
    windows = tuple(w for w in integers("window", window) if w > 1)
    if windows and capacity != "auto" and (lengths[0] or 0) < max(windows):
        raise InputError(
            f"capacity: got {capacity} for windows of {max(windows)}; allowed at least the window, "
            "since none is truncated; raise it, or pass --window 1"
        )
    cases = [
        TuneCase(
            spec, b, f, lengths[0] or best_capacity(spec, f), windows=windows,
            window_capacity=lengths[0] or _window_capacity(spec, f, windows),
        )
        for f in formats for b in batches
    ]  # fmt: skip
    if show:
        Console().print(_launches(cases))
        return 0
    console = Console(stderr=True)

    def progress(case: TuneCase, text: str, alarm: bool) -> None:
        place = cases.index(case) + 1
        console.print(
            f"[{place}/{len(cases)}] batch {case.batch}, {case.format}: {text}",
            markup=False, highlight=False, style="bold red" if alarm else None,
        )  # fmt: skip

    before = None
    if out is not None and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        out = _file(out, device)
        before = read_content(out, device)  # refused before measuring, not after it
    report = run_tune(cases, command=command_line("tune"), version=__version__, progress=progress)
    content = merge_table(before, report)
    console.print(_summary(report))
    for case, drop in report.dropped:
        console.print(
            f"dropped at batch {case.batch}, {case.format}: {drop.op} {show_choice(drop.choice)}: "
            f"{drop.reason}",
            markup=False, style="bold red",
        )  # fmt: skip
    if out is None:
        print(render(content), end="")
        where = f"save it as {file_name(report.device)} in a folder of yours"
    else:
        write_content(out, content)
        where = f"written to {out}"
    folder = "that folder" if out is None else out.parent
    console.print(f"{where}; it is used with REPLAYINFER_LAUNCH_TABLES={folder}", markup=False)
    return 0


def _window_capacity(spec: LayerSpec, fmt: str, windows: tuple[int, ...]) -> int | None:
    """What `bench` takes for the longest of them."""
    if not windows:
        return None
    return best_capacity(spec, fmt, window=max(windows), commit_rate=_COMMIT_RATE)


def _file(out: Path, device: str) -> Path:
    """A folder means the device's file in it."""
    return out if out.suffix == ".json" and not out.is_dir() else out / file_name(device)


def _summary(report: TuneReport) -> Table:
    table = Table(title=f"{report.device}: microseconds a layer (with the rule's choice)")
    for column in ("format", "batch", "op", "choice", "us"):
        table.add_column(column)
    for case, outcome in report.outcomes:
        for op, choice in outcome.choices.items():
            micros, rule = outcome.micros.get(op), outcome.rule_micros.get(op)
            time = "" if micros is None else f"{micros:.1f}"
            time += "" if rule is None else f" ({rule:.1f})"
            table.add_row(case.format, str(case.batch), op, show_choice(choice), time)
    return table


def _launches(cases: list[TuneCase]) -> Table:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: the rule"
    table = Table(title=f"What is launched ({where})")
    for column in ("format", "batch", "op", "kernel", "programs", "warps", "constants"):
        table.add_column(column)
    for case in cases:
        for variant in _variants(case, device):
            launch = variant.launch
            constants = " ".join(f"{name}={value}" for name, value in launch.constants.items())
            table.add_row(
                case.format, str(case.batch), variant.op, launch.kernel, str(launch.grid[0]),
                str(launch.options.get("num_warps")), constants,
            )  # fmt: skip
    return table


def _variants(case: TuneCase, device: torch.device) -> list[Variant]:
    """Of plain decode, and what else windows launch."""
    found = list[Variant]()
    for window in (1, *case.windows):
        length = case.capacity if window == 1 else case.window_capacity or case.capacity
        found += [
            variant
            for variant in variants(
                case.spec, case.format, length, None, case.batch, window=window,
                dtype=case.dtype, device=device,
            )
            if variant not in found
        ]  # fmt: skip
    return found
