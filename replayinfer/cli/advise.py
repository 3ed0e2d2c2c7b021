"""``replayinfer advise``: what replay changes in a model's decode step on a GPU."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from replayinfer import InputError

from ..checks import positive_int
from ..cost import DEVICES, get_device
from ..cost.advise import Advice, plot
from ..cost.advise import advise as weigh
from ..cost.weights import DecodeWeights, decode_weights, raw_config
from ..formats import FORMATS, get_format
from ..pools.capacity import report
from ..pools.sizes import settle_sizes
from ..spec.hf import ModelLayers, read_config
from ..spec.presets import PRESETS, Preset, find_preset
from .options import integers

__all__ = ["advise"]


def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help=f"A config.json, a folder with one, or a name: {', '.join(PRESETS)}.",
        ),
    ],
    gpu: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = "h200",
    batch: Annotated[
        str, typer.Option(help="Sequences of a step, comma-separated.")
    ] = "1,8,32,128,256",
    context: Annotated[
        str, typer.Option(help="Tokens that attention keeps of each sequence, comma-separated.")
    ] = "4096",
    drafts: Annotated[
        str, typer.Option(help="Drafts that a step verifies, comma-separated; 0: plain decode.")
    ] = "0",
    commit_rate: Annotated[
        float, typer.Option(help="With drafts: the probability that one is right.")
    ] = 0.7,
    format: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(FORMATS)}; the fastest lossless one if omitted."),
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(help="Rows before a fold (L); the best if omitted.")
    ] = None,
    weight_bits: Annotated[float, typer.Option(help="Bits of a parameter.")] = 16.0,
    weights_gb: Annotated[
        float | None,
        typer.Option(help="Gigabytes of weights that a step reads, instead of the config's."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size; figures are per rank.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write a plot to this file.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
) -> int:
    device = get_device(gpu)
    preset = find_preset(model)
    whole = preset.read() if preset else read_config(model)
    spec = whole.spec
    weights = _weights(preset or model, whole, weights_gb)
    dtype = whole.dtype or torch.bfloat16
    if not 0 < weight_bits <= 64:
        raise InputError(f"weight_bits: got {weight_bits}; allowed above 0 to 64; e.g. 16, 8 or 4")
    if not 0 <= commit_rate <= 1:
        raise InputError(f"commit_rate: got {commit_rate}; allowed 0 to 1; it is a probability")
    windows = [1 + n for n in _drafts(drafts)]
    if capacity is not None:
        positive_int("capacity", capacity, minimum=max(windows))
    positive_int("tp", tp)
    rank = whole.shard(0, tp)

    def sequence_bytes(fmt: str, length: int, window: int) -> int:
        sizes = settle_sizes(
            rank.spec, rank.ssm, 1, capacity=length, max_window=window, format=fmt, dtype=dtype
        )
        return report(sizes).sequence_bytes

    spec.check_dtype(dtype)
    advice = weigh(
        rank, device, sequence_bytes=sequence_bytes, weights=weights,
        name=preset.name if preset else model, batches=integers("batch", batch),
        contexts=integers("context", context), windows=windows, commit_rate=commit_rate,
        format=get_format(format).name if format is not None else None, capacity=capacity,
        dtype=dtype, weight_bytes=weight_bits / 8, tp=tp,
    )  # fmt: skip
    if out is not None:
        plot(advice, out)
    if json:
        print(json_text.dumps(advice.as_dict(), allow_nan=False))
    else:
        _print(advice)
    return 0


def _weights(
    model: Preset | str, layers: ModelLayers, gigabytes: float | None
) -> DecodeWeights | float:
    if gigabytes is not None:
        if not 0 < gigabytes < float("inf"):
            raise InputError(
                f"weights_gb: got {gigabytes}; allowed a number > 0; it is what a step reads"
            )
        return gigabytes * 1e9
    try:
        return decode_weights(raw_config(model), layers)
    except InputError as error:
        raise InputError(f"{error}, with --weights-gb") from None


def _drafts(text: str) -> list[int]:
    counts = text.split(",")
    if not all(part.strip().isdecimal() for part in counts):
        raise InputError(f"drafts: got {text!r}; allowed integers >= 0, comma-separated; e.g. 0,3")
    return [int(part) for part in counts]


def _print(advice: Advice) -> None:
    console = Console(highlight=False)
    spec, shared = advice.spec, advice.spec.shared_heads
    rank = f", each of {advice.tp} ranks" if advice.tp > 1 else ""
    console.print(
        f"{advice.model} on {advice.device.name}{rank}: {advice.layers} {spec.family} layers of "
        f"{spec.heads} x {spec.dim} x {spec.state}, {shared[1]} {shared[0].replace('_', ' ')}; "
        f"{advice.attention_layers} that attend",
        markup=False,
    )
    if advice.weights is not None:
        console.print(
            f"{advice.weights.total / 1e9:.1f} billion parameters, "
            f"{advice.weights.active / 1e9:.1f} of a token, {8 * advice.weight_bytes:g} bits each",
            markup=False,
        )
    console.print(_formats(advice))
    console.print(_steps(advice))
    for line in advice.formula():
        console.print(line, markup=False)
    notes = dict.fromkeys(
        f"batch {s.batch}, context {s.context}"
        f"{f', {s.window - 1} drafts' if s.window > 1 else ''}: {s.note}"
        for s in advice.steps
        if s.note
    )
    for note in notes:
        console.print(note, markup=False, style="yellow")
    if all(s.pays for s in advice.steps):
        console.print("Replay pays at every batch above.")
    console.print(advice.device.basis, markup=False)
    console.print(
        "Weights, keys and values are the least that they can take, so the shares of the recurrent "
        "layers are upper bounds."
    )
    if any(s.window > 1 for s in advice.steps):
        console.print("Steps with drafts are predicted from their bytes; none was calibrated.")


def _formats(advice: Advice) -> Table:
    table = Table(title=f"Formats, at batch {max(s.batch for s in advice.steps)}")
    for name in ("format", "L", "us a layer", "standard", "gain", "MB a sequence", "recurrence"):
        table.add_column(name, justify="left" if name in ("format", "recurrence") else "right")
    for f in advice.formats:
        table.add_row(
            f"{f.format}{' *' if f.format == advice.format else ''}", str(f.capacity),
            f"{f.layer_us:.1f}", f"{f.standard_us:.1f}", f"{f.gain:.2f}x",
            f"{f.sequence_bytes / 1e6:.1f}", "fp32" if f.lossless else "rounded once per fold",
        )  # fmt: skip
    return table


def _steps(advice: Advice) -> Table:
    table = Table(title=f"Milliseconds of a step, {advice.format}, L = {advice.capacity}")
    drafts = any(s.window > 1 for s in advice.steps)
    for name in ("batch", "context", *(["drafts"] if drafts else []), "weights", "KV", "SSM",
                 "by replay", "gain", "SSM share", "step gain", "fit"):  # fmt: skip
        table.add_column(name, justify="right")
    for s in advice.steps:
        table.add_row(
            str(s.batch), str(s.context), *([str(s.window - 1)] if drafts else []),
            f"{s.weights_us / 1e3:.2f}", f"{s.kv_us / 1e3:.2f}", f"{s.ssm_standard_us / 1e3:.2f}",
            f"{s.ssm_replay_us / 1e3:.2f}", f"{s.gain:.2f}x", f"{s.ssm_share:.0%}",
            f"{s.step_gain:.2f}x", str(s.fits), style="yellow" if not s.pays else None,
        )  # fmt: skip
    return table
