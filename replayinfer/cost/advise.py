"""What replay changes in a model's decode step, and where it does not pay.

::

    step    = recurrent layers + weights + keys and values
    ssm     = layers x StepCost, standard or by replay
    weights = max(parameters read x bytes / BW, 2 x parameters of a token x tokens / FLOPS)
    kv      = sequences x context x bytes of a token / BW

Weights and keys and values are at the read ceiling of the device, and products at its data sheet,
both the least that they can take: the share of the recurrent layers is at most what is printed.
Norms, convolutions, routing, sampling and the communication of ranks are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..figures import two_panels
from ..formats import FORMATS, get_format
from ..spec import LayerSpec
from ..spec.hf import ModelLayers
from .bytes import accepted_mean, fold_bytes, readout_bytes
from .devices import Device
from .model import KERNELS, STANDARD, StepCost, latency_us
from .weights import DecodeWeights

__all__ = ["Advice", "FormatAdvice", "StepAdvice", "advise", "best_length", "plot"]

PAYS = 1.02
"""A step that replay makes faster by less than this is no reason to use it."""

_LENGTHS = (4, 8, 16, 32, 64, 128)
_NEARLY = 1.05  # of the least time; a shorter buffer within it is worth the memory
_MEMORY_SHARE = 0.9  # for weights, states, keys and values; the rest is the engine's


@dataclass(frozen=True)
class FormatAdvice:
    """A checkpoint format with its best length, at the largest batch.

    Attributes
    ----------
    lossless : bool
        The recurrence keeps fp32 bit for bit; others are rounded once per fold.
    layer_us, standard_us : float
        Microseconds of a recurrent layer by replay, and of a standard kernel at that exactness.
    sequence_bytes : int
        Checkpoint, rows and convolution ring of a sequence, over all layers.
    """

    format: str
    capacity: int
    lossless: bool
    layer_us: float
    standard_us: float
    gain: float
    sequence_bytes: int


@dataclass(frozen=True)
class StepAdvice:
    """One step, with standard kernels and by replay; times are microseconds.

    Attributes
    ----------
    ssm_share, ssm_share_replay : float
        Part of the step that is the recurrent layers.
    gain, step_gain : float
        Standard time over replay's: of the recurrent layers, and of the step.
    tokens_per_s : float
        Accepted tokens of all sequences, by replay.
    fits, fits_standard : int
        Sequences of this context that the memory holds, by replay and with a standard state.
    pays : bool
    note : str
        Why it does not pay, or what limits it.
    """

    batch: int
    context: int
    window: int
    ssm_standard_us: float
    ssm_replay_us: float
    weights_us: float
    kv_us: float
    step_standard_us: float
    step_replay_us: float
    ssm_share: float
    ssm_share_replay: float
    gain: float
    step_gain: float
    tokens_per_s: float
    fits: int
    fits_standard: int
    pays: bool
    note: str


@dataclass(frozen=True)
class Advice:
    """What `advise` returns; figures are one rank's."""

    model: str
    device: Device
    format: str
    capacity: int
    commit_rate: float
    layers: int
    attention_layers: int
    spec: LayerSpec
    tp: int
    weights: DecodeWeights | None
    weight_bytes: float
    weights_total: float
    kv_bytes_per_token: int
    sequence_bytes: int
    standard_sequence_bytes: int
    formats: tuple[FormatAdvice, ...]
    steps: tuple[StepAdvice, ...] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        spec, family = self.spec, self.spec.family
        shared, count = spec.shared_heads
        weights = None
        if self.weights is not None:
            weights = dataclasses.asdict(self.weights)
            weights |= {"total": self.weights.total, "active": self.weights.active}
        return {
            "model": self.model,
            "gpu": self.device.name,
            "measured": self.device.measured,
            "basis": self.device.basis,
            "tp": self.tp,
            "format": self.format,
            "capacity": self.capacity,
            "commit_rate": self.commit_rate,
            "layers": self.layers,
            "attention_layers": self.attention_layers,
            "spec": {
                "family": family, "heads": spec.heads, "dim": spec.dim, "state": spec.state,
                shared: count,
            },
            "read_tbps": round(self.device.read_tbps, 4),
            "memory_bytes": self.device.memory_bytes,
            "constants": {
                "replay": dataclasses.asdict(KERNELS[family]),
                "standard": dataclasses.asdict(STANDARD[family]),
            },
            "weights": weights,
            "weight_bytes": self.weight_bytes,
            "weights_total_bytes": round(self.weights_total),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "sequence_bytes": self.sequence_bytes,
            "standard_sequence_bytes": self.standard_sequence_bytes,
            "formats": [dataclasses.asdict(f) for f in self.formats],
            "formula": self.formula(),
            "rows": [
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                for row in map(dataclasses.asdict, self.steps)
            ],
            "does_not_pay": [
                {"batch": s.batch, "context": s.context, "window": s.window, "why": s.note}
                for s in self.steps
                if not s.pays
            ],
        }  # fmt: skip

    def formula(self) -> list[str]:
        """The formulas of a decode step with their numbers, at the largest batch."""
        step = max(self.steps, key=lambda s: (-s.window, s.batch, s.context))
        spec, known, n = self.spec, KERNELS[self.spec.family], step.batch
        standard, bandwidth = STANDARD[spec.family], self.device.read_tbps
        cost = StepCost.of(spec, self.format, gpu=self.device, window=step.window)
        read = readout_bytes(spec, self.format, rows=(self.capacity - 1) / 2, window=step.window)
        fold = fold_bytes(spec, self.format, rows=self.capacity)
        state = 2 * spec.heads * spec.dim * spec.state * get_format(self.format).standard_bytes
        lines = [
            f"standard layer = {standard.many_us} us + {n} x {state} B / ({standard.read} x "
            f"{bandwidth:.4g} TB/s) = {cost.standard_us(n):.1f} us",
            f"replay layer   = {known.many_us} us + {n} x {read:.0f} B / ({known.read} x "
            f"{bandwidth:.4g} TB/s) + {n} / {self.capacity} x {fold:.0f} B / ({known.fold} x "
            f"{bandwidth:.4g} TB/s) = {cost.steady_us(n, self.capacity):.1f} us",
            f"keys, values   = {n} x {step.context} tokens x {self.kv_bytes_per_token} B / "
            f"{bandwidth:.4g} TB/s = {step.kv_us:.0f} us",
        ]
        if self.weights is None:
            lines.append(f"weights        = as given, {step.weights_us:.0f} us")
        else:
            w = self.weights
            experts = (
                f" + {w.moe_layers} x {w.experts_read(n):.1f} of {w.experts} experts x {w.expert}"
                if w.experts
                else ""
            )
            lines.append(
                f"weights        = ({w.always}{experts}) x {self.weight_bytes:g} B / {self.tp} / "
                f"{bandwidth:.4g} TB/s, or 2 x {w.active} x {n} / {self.tp} / "
                f"{self.device.tflops:g} TFLOPS = {step.weights_us:.0f} us"
            )
        return [
            *lines,
            f"sequences      = ({_MEMORY_SHARE} x {self.device.memory_bytes} B - "
            f"{self.weights_total:.0f} B) / ({self.sequence_bytes} B + {step.context} x "
            f"{self.kv_bytes_per_token} B) = {step.fits}",
        ]


def best_length(cost: StepCost, batch: int, commit_rate: float = 1.0) -> int:
    """The shortest of 4, 8, ... 128 rows whose step takes within 5% of the least time.

    `best_capacity` counts bytes; this counts their time, in which a fold's are dearer.
    """
    times = {
        length: cost.steady_us(batch, length, commit_rate)
        for length in _LENGTHS
        if length >= cost.window
    }
    if not times:
        raise InputError(
            f"window: got {cost.window}; allowed at most {_LENGTHS[-1]}; verify fewer drafts"
        )
    return min(length for length, t in times.items() if t <= _NEARLY * min(times.values()))


def advise(
    layers: ModelLayers,
    device: Device,
    *,
    sequence_bytes: Callable[[str, int, int], int],
    weights: DecodeWeights | float,
    name: str = "",
    batches: Sequence[int] = (1, 8, 32, 128, 256),
    contexts: Sequence[int] = (4096,),
    windows: Sequence[int] = (1,),
    commit_rate: float = 0.7,
    format: str | None = None,
    capacity: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    weight_bytes: float = 2.0,
    tp: int = 1,
) -> Advice:
    """Weigh replay against standard kernels in every step of the given batches.

    Parameters
    ----------
    layers : ModelLayers
        Of one rank.
    sequence_bytes : function of (format, capacity, longest window)
        Memory of a sequence by replay, as a pool of it reports.
    weights : DecodeWeights or float
        Of the whole model; or the bytes of weights that a step reads, where nobody knows more.
    batches, contexts, windows : sequences of int
        Every combination is a row.
    commit_rate : float
        Of windows: the probability that a draft is right where all before it were.
    format, capacity
        By default the lossless format that is fastest at the largest batch, and its best length.
    weight_bytes : float
        Of a parameter.
    tp : int
        Ranks that share the weights.

    Raises
    ------
    UnsupportedError
        No recurrent layer, or recurrent layers that differ.
    """
    spec, many, widest = layers.spec, max(batches), max(windows)
    rates = {w: commit_rate if w > 1 else 1.0 for w in windows}

    def cost_of(fmt: str, window: int) -> StepCost:
        return StepCost.of(spec, fmt, dtype, gpu=device, window=window)

    def length_of(fmt: str) -> int:
        cost = cost_of(fmt, widest)
        return capacity or best_length(cost, many, rates[widest])

    formats = []
    for fmt in FORMATS:
        length, cost = length_of(fmt), cost_of(fmt, min(windows))
        ours = cost.steady_us(many, length, rates[min(windows)])
        theirs = cost.standard_us(many)
        formats.append(
            FormatAdvice(
                fmt, length, FORMATS[fmt].lossless, round(ours, 2), round(theirs, 2),
                round(theirs / ours, 3), sequence_bytes(fmt, length, widest),
            )
        )  # fmt: skip
    lossless = [f for f in formats if f.lossless]
    chosen = (
        min(lossless, key=lambda f: f.layer_us)
        if format is None
        else next(f for f in formats if f.format == get_format(format).name)
    )
    if isinstance(weights, DecodeWeights):
        held = weights.total * weight_bytes / tp
    else:
        held = weights / tp
    kv = layers.kv_bytes_per_token(dtype)
    count = len(layers.ssm)
    taps = (spec.conv_width - 1 + widest - 1) if spec.conv_width else 0
    state = spec.heads * spec.dim * spec.state * get_format(chosen.format).standard_bytes
    ring = taps * spec.conv_channels * dtype.itemsize
    standard_sequence = count * (state + ring)
    room = _MEMORY_SHARE * device.memory_bytes - held

    steps = []
    for window in windows:
        cost = cost_of(chosen.format, window)
        for context in contexts:
            for batch in batches:
                weights_us = _weights_us(weights, device, batch * window, weight_bytes, tp)
                kv_us = batch * context * kv / (device.read_tbps * 1e6)
                standard = count * cost.standard_us(batch)
                replay = count * cost.steady_us(batch, chosen.capacity, rates[window])
                rest = weights_us + kv_us
                kept = accepted_mean(window, rates[window])
                each = chosen.sequence_bytes + context * kv
                fits = max(int(room // each), 0)
                pays = standard >= PAYS * replay
                steps.append(
                    StepAdvice(
                        batch, context, window, standard, replay, weights_us, kv_us,
                        standard + rest, replay + rest, standard / (standard + rest),
                        replay / (replay + rest), standard / replay,
                        (standard + rest) / (replay + rest),
                        batch * kept / (replay + rest) * 1e6, fits,
                        max(int(room // (standard_sequence + context * kv)), 0), pays,
                        _note(cost, batch, fits, pays, standard + rest, replay + rest),
                    )
                )  # fmt: skip
    return Advice(
        model=name or layers.model_type, device=device, format=chosen.format,
        capacity=chosen.capacity, commit_rate=commit_rate, layers=count,
        attention_layers=len(layers.attention), spec=spec, tp=tp,
        weights=weights if isinstance(weights, DecodeWeights) else None,
        weight_bytes=weight_bytes, weights_total=held, kv_bytes_per_token=kv,
        sequence_bytes=chosen.sequence_bytes, standard_sequence_bytes=standard_sequence,
        formats=tuple(formats), steps=tuple(steps),
    )  # fmt: skip


def _weights_us(
    weights: DecodeWeights | float, device: Device, tokens: int, weight_bytes: float, tp: int
) -> float:
    if not isinstance(weights, DecodeWeights):
        return weights / tp / (device.read_tbps * 1e6)
    read = weights.read(tokens) * weight_bytes / (device.read_tbps * 1e6)
    products = 2 * weights.active * tokens / (device.tflops * 1e6)
    return max(read, products) / tp


def _note(cost: StepCost, batch: int, fits: int, pays: bool, standard: float, replay: float) -> str:
    notes = []
    if not pays:
        known, other = KERNELS[cost.spec.family], STANDARD[cost.spec.family]
        notes.append(
            "does not pay: bytes are few, and the latency of a layer is "
            f"{latency_us(known, batch):.1f} us against {latency_us(other, batch):.1f}; use direct "
            "steps"
        )
    elif standard < PAYS * replay:
        notes.append("faster, but the step hardly notices")
    if not fits:
        notes.append("not one sequence fits beside the weights: more ranks, or fewer bits")
    elif fits < batch:
        notes.append(f"{fits} sequences fit")
    return "; ".join(notes)


def plot(advice: Advice, path: Path) -> None:
    """Parts of the step by batch, and the gains.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed (extra ``bench``).
    """
    with two_panels(path) as (left, right):
        first = advice.steps[0]
        steps = [
            s for s in advice.steps if (s.context, s.window) == (first.context, first.window)
        ]  # fmt: skip
        places = range(len(steps))
        for offset, ssm in ((-0.2, "ssm_standard_us"), (0.2, "ssm_replay_us")):
            below = [0.0] * len(steps)
            parts: Iterable[tuple[str, str, str]] = (
                ("weights_us", "weights", "tab:gray"),
                ("kv_us", "keys and values", "tab:olive"),
                (ssm, "recurrent layers", "tab:blue" if offset > 0 else "tab:orange"),
            )
            for name, label, color in parts:
                heights = [getattr(s, name) / 1e3 for s in steps]
                shown = f"{label}, {'replay' if offset > 0 else 'standard'}"
                left.bar(
                    [p + offset for p in places], heights, 0.38, below, color=color,
                    label=label if name != ssm and offset < 0 else shown if name == ssm else None,
                )  # fmt: skip
                below = [b + h for b, h in zip(below, heights, strict=True)]
        left.set_xticks(list(places), [str(s.batch) for s in steps])
        left.set(xlabel="batch", title=f"milliseconds of a step, context {first.context}")
        left.legend(fontsize=8)
        for context, window in dict.fromkeys((s.context, s.window) for s in advice.steps):
            mine = [s for s in advice.steps if (s.context, s.window) == (context, window)]
            batches = [s.batch for s in mine]
            label = f"context {context}" + (f", T={window}" if window > 1 else "")
            (line,) = right.plot(batches, [s.step_gain for s in mine], marker="o", label=label)
            right.plot(batches, [s.gain for s in mine], "--", color=line.get_color())
        right.axhline(1.0, color="gray", linewidth=1)
        right.set(
            xscale="log", xlabel="batch", title="gain: the step; dashed, its recurrent layers"
        )
        right.grid(alpha=0.3)
        right.legend(fontsize=8)
