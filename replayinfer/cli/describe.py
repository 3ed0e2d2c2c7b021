"""``replayinfer describe``: a model's layers, and what one sequence of it costs."""

from __future__ import annotations

import dataclasses
import json as json_text
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from replayinfer import InputError

from ..checks import dtype_name, positive_int
from ..pools.capacity import CapacityReport, report
from ..pools.sizes import settle_sizes
from ..spec.base import ACTIVATION_DTYPES
from ..spec.hf import AttentionSpec, LatentAttentionSpec, ModelLayers, read_config
from ..spec.presets import PRESETS, Preset, find_preset

__all__ = ["describe"]

_FAMILIES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention"}
_MAP_WIDTH = 50


def describe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="PATH_OR_NAME",
            help=f"A config.json, a folder with one, or a name: {', '.join(PRESETS)}.",
        ),
    ],
    format: Annotated[
        str, typer.Option(help="Checkpoint format: fp32, fp32_split, bf16 or fp16.")
    ] = "fp32_split",
    capacity: Annotated[int, typer.Option(help="Rows a sequence holds before it folds.")] = 16,
    max_window: Annotated[int, typer.Option(help="Longest window: 1, or 1 + drafts.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of activations, keys and values; the config's own, else bfloat16."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size; figures are per rank.")] = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
) -> int:
    preset = find_preset(model)
    layers = preset.read() if preset else _read(model)
    activations = _dtype(dtype) if dtype else layers.dtype or torch.bfloat16
    shard = _shard(layers, tp)
    cost = report(
        settle_sizes(
            shard.spec,
            shard.ssm,
            max_sequences=1,
            capacity=capacity,
            max_window=max_window,
            format=format,
            dtype=activations,
        )
    )
    figures = _Figures(model, preset, layers, shard, tp, max_window, cost)
    if json:
        print(json_text.dumps(figures.as_dict(), allow_nan=False))
    else:
        _print(figures)
    return 0


def _read(path: str) -> ModelLayers:
    if not Path(path).exists():
        raise InputError(
            f"PATH_OR_NAME: got {path!r}; allowed a config.json, a folder with one, or one of "
            f"{', '.join(PRESETS)}; correct it"
        )
    return read_config(path)


def _shard(layers: ModelLayers, tp: int) -> ModelLayers:
    positive_int("tp", tp)
    try:
        return layers.shard(0, tp)
    except InputError as error:  # the library's name for it is `size`
        raise InputError(f"tp{str(error).removeprefix('size')}") from None


def _dtype(name: str) -> torch.dtype:
    for dtype in ACTIVATION_DTYPES:
        if name == dtype_name(dtype):
            return dtype
    raise InputError(f"dtype: got {name!r}; allowed float32, bfloat16 or float16; pick one")


@dataclass(frozen=True)
class _Figures:
    """Everything that is printed; the shapes and bytes are one rank's."""

    name: str
    preset: Preset | None
    whole: ModelLayers
    shard: ModelLayers
    tp: int
    max_window: int
    cost: CapacityReport

    @property
    def state(self) -> int:
        return self.cost.checkpoint_page_bytes

    @property
    def rows(self) -> int:
        return self.cost.sizes.pages_per_sequence * self.cost.input_page_bytes

    @property
    def kv(self) -> int:
        return self.shard.kv_bytes_per_token(self.cost.sizes.dtype)

    @property
    def rows_share(self) -> float:
        return self.rows / self.cost.sequence_bytes

    def tokens_for(self, size: int) -> int | None:
        """The shortest context whose keys and values take at least `size` bytes."""
        return -(-size // self.kv) if self.kv else None

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec | None:
        return next(iter(self.shard.attention.values()), None)

    def as_dict(self) -> dict[str, Any]:
        model, sizes, cost = self.shard, self.cost.sizes, self.cost
        attention = self.attention
        spec: dict[str, Any] = {"family": sizes.spec.family} | dataclasses.asdict(sizes.spec)
        if "dt_limit" in spec:  # JSON has no infinity
            spec["dt_limit"] = [x if math.isfinite(x) else None for x in spec["dt_limit"]]
        return {
            "name": self.preset.name if self.preset else self.name,
            "hub_id": self.preset.hub_id if self.preset else None,
            "model_type": model.model_type,
            "layers": model.layers,
            "layer_map": model.layer_map,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "config_dtype": dtype_name(model.dtype) if model.dtype else None,
            "config_state_dtype": dtype_name(model.state_dtype) if model.state_dtype else None,
            "tp": self.tp,
            "ssm": {
                "layers": list(model.ssm),
                **spec,
                "conv_channels": sizes.spec.conv_channels,
                "conv_bias": model.conv_bias,
                "gate_in_readout": model.gate_in_readout,
            },
            "attention": None
            if attention is None
            else {
                "layers": list(model.attention),
                "latent": isinstance(attention, LatentAttentionSpec),
                **dataclasses.asdict(attention),
            },
            "format": sizes.format.name,
            "dtype": dtype_name(sizes.dtype),
            "capacity": sizes.capacity,
            "max_window": self.max_window,
            "page_rows": sizes.page_rows,
            "input_pages": sizes.pages_per_sequence,
            "ring_rows": sizes.ring,
            "bytes": {
                "checkpoint_page": self.state,
                "input_page": cost.input_page_bytes,
                "rows": self.rows,
                "conv_ring": cost.conv_slot_bytes,
                "sequence": cost.sequence_bytes,
                "kv_per_token": self.kv,
            },
            "rows_share": self.rows_share,
            "kv_equals_state_at": self.tokens_for(self.state),
            "kv_equals_sequence_at": self.tokens_for(cost.sequence_bytes),
            "notes": list(model.notes),
            "source": self.preset.source if self.preset else None,
            "assumed": list(self.preset.assumed) if self.preset else [],
        }


def _print(figures: _Figures) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    model, preset = figures.shard, figures.preset
    of = f", {preset.hub_id}" if preset else ""
    console.print(
        f"[bold]{escape(figures.name)}[/bold] ({escape(model.model_type)}{escape(of)}): "
        f"{model.layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocab_size}"
    )
    if figures.tp > 1:
        console.print(f"Figures are those of each of {figures.tp} tensor-parallel ranks.")
    console.print(_layer_table(figures))
    console.print(_layer_lines(model), style="cyan")
    console.print(_byte_table(figures))
    for note in model.notes:
        console.print(f"note: {escape(note)}")
    if preset:
        console.print(f"source: {escape(preset.source)}")
        for figure in preset.assumed:
            console.print(f"[yellow]assumed[/yellow]: {escape(figure)}")


def _layer_table(figures: _Figures) -> Any:
    from rich.table import Table

    model, spec = figures.shard, figures.cost.sizes.spec
    table = Table("layers", "kind", "shape")
    both = model.ssm.keys() & model.attention.keys()
    shared, count = spec.shared_heads
    state = model.state_dtype
    table.add_row(
        str(len(model.ssm)),
        _FAMILIES[spec.family],
        f"{spec.heads} heads x {spec.dim} x {spec.state}, {count} {shared.replace('_', ' ')}; "
        f"convolution of width {spec.conv_width} over {spec.conv_channels} channels"
        f"{' with bias' if model.conv_bias else ''}"
        f"{f'; state in {dtype_name(state)}' if state else ''}",
    )
    if figures.attention is not None:
        table.add_row(str(len(model.attention)), "attention", _attention_shape(figures.attention))
    if both:
        table.add_row(str(len(both)), "both of these", "a recurrence and attention in one layer")
    if other := model.layers - len(model.ssm.keys() | model.attention.keys()):
        table.add_row(str(other), "neither", "feed-forward")
    return table


def _attention_shape(attention: AttentionSpec | LatentAttentionSpec) -> str:
    if isinstance(attention, LatentAttentionSpec):
        return (
            f"{attention.heads} heads over a latent of {attention.kv_lora_rank} and a shared key "
            f"of {attention.rope_dim}"
        )
    return f"{attention.heads} heads, {attention.kv_heads} key/value heads x {attention.head_dim}"


def _layer_lines(model: ModelLayers) -> str:
    text = model.layer_map
    legend = {
        "M": "M Mamba-2", "G": "G Gated DeltaNet", "K": "K Kimi Delta Attention",
        "*": "* attention", "+": "+ both", "-": "- neither",
    }  # fmt: skip
    lines = [
        f"{start:>4}  {text[start : start + _MAP_WIDTH]}"
        for start in range(0, len(text), _MAP_WIDTH)
    ]
    return "\n".join([*lines, "      " + ", ".join(v for k, v in legend.items() if k in text)])


def _byte_table(figures: _Figures) -> Any:
    from rich.table import Table

    cost, sizes = figures.cost, figures.cost.sizes
    spec, pages = sizes.spec, sizes.pages_per_sequence
    element = sizes.dtype.itemsize
    table = Table("bytes", "formula", "of one rank" if figures.tp > 1 else "of the model")
    table.columns[2].justify = "right"
    table.add_row(
        f"checkpoint page, {sizes.format.name}",
        f"{sizes.layers} layers x {spec.heads} x {spec.dim} x {spec.state} x "
        f"{sizes.format.bytes_stored} B",
        _size(figures.state),
    )
    table.add_row(
        f"input page, {dtype_name(sizes.dtype)}",
        f"{sizes.layers} layers x {sizes.page_rows} rows x "
        f"{spec.row_bytes(sizes.dtype, sizes.format)} B",
        _size(cost.input_page_bytes),
    )
    table.add_row(
        "convolution ring",
        f"{sizes.layers} layers x {sizes.ring} rows x {spec.conv_channels} x {element} B",
        _size(cost.conv_slot_bytes),
    )
    table.add_row(
        f"one sequence, L = {sizes.capacity}",
        f"checkpoint page + {pages} x input page + ring",
        _size(cost.sequence_bytes),
    )
    table.add_row(
        "rows' share",
        f"{figures.rows} / {cost.sequence_bytes}",
        f"{figures.rows_share:.1%}",
    )
    attention = figures.attention
    if attention is not None:
        values = (
            f"({attention.kv_lora_rank} + {attention.rope_dim})"
            if isinstance(attention, LatentAttentionSpec)
            else f"2 x {attention.kv_heads} x {attention.head_dim}"
        )
        table.add_row(
            "keys and values of a token",
            f"{len(figures.shard.attention)} layers x {values} x {element} B",
            _size(figures.kv),
        )
        for what, size in (("SSM state", figures.state), ("sequence", cost.sequence_bytes)):
            table.add_row(
                f"context where KV = {what}",
                f"{size} / {figures.kv}, rounded up",
                f"{figures.tokens_for(size)} tokens",
            )
    return table


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count} ({count / scale:.4g} {unit})"
    return f"{count}"
