"""``replayinfer simulate``: arrivals through the real planner and pools, without a GPU or model."""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from replayinfer import GDNSpec, InputError, KDASpec, LayerSpec, Mamba2Spec

from ..checks import positive_int
from ..cost import DEVICES, StepCost, best_capacity
from ..formats import FORMATS
from ..planner import POLICIES
from ..planner.policy import folds_within
from ..simulate import ARRIVALS, Outcome, Trace, make_trace, plot, read_trace
from ..simulate import simulate as serve
from .options import one_kind

__all__ = ["simulate"]

_DEFAULT_MODEL = "nemotron-3-super"
_FAMILIES: dict[str, Callable[..., LayerSpec]] = {
    "mamba2": Mamba2Spec,
    "gdn": GDNSpec,
    "kda": KDASpec,
}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)")
_SIZE = re.compile(r"(\d+)([kmg]i?b|b)", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def simulate(
    model: Annotated[
        str | None,
        typer.Option(help=f"A config.json, a folder with one, or a name; {_DEFAULT_MODEL}."),
    ] = None,
    family: Annotated[str | None, typer.Option(help=f"Of --shape: {', '.join(_FAMILIES)}.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="HEADSxDIMxSTATE/SHARED",
            help="Instead of a model, one layer: 128x64x128/8 (groups, or key heads).",
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = "h200",
    format: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")] = "fp32_split",
    capacity: Annotated[
        str, typer.Option(help="Rows before a fold (L); auto: what moves the fewest bytes.")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences of a step at most.")] = 256,
    policy: Annotated[
        str,
        typer.Option(help=f"{', '.join(POLICIES)}, deadline, deadline:FOLDS; comma-separated."),
    ] = "full,spread",
    fold_budget: Annotated[
        str | None,
        typer.Option(
            help="Of deadline: folds of a step, or their bytes over all layers, as 64MiB; twice "
            "the fair share if omitted."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV with a header, or JSONL: arrival (s), prompt and output (tokens). Our own "
            "arrivals if omitted."
        ),
    ] = None,
    arrivals: Annotated[str, typer.Option(help=f"{', '.join(ARRIVALS)}.")] = "backlogged",
    requests: Annotated[
        int | None, typer.Option(help="Of our own traces 100,000; of a file all.")
    ] = None,
    output_mean: Annotated[int, typer.Option(help="Tokens that a request decodes.")] = 128,
    prompt_mean: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, instead of what arrivals imply.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of a step: 1, or 1 + drafts.")] = 1,
    commit_rate: Annotated[
        float, typer.Option(help="Of windows: the probability that a draft is right.")
    ] = 0.7,
    rest_us: Annotated[
        float,
        typer.Option(
            help="Microseconds of a step beside the recurrent layers; they move the clock, and are "
            "not in the step times."
        ),
    ] = 0.0,
    checkpoint_pages: Annotated[
        int | None, typer.Option(help="Of the pool; a page a sequence of the batch.")
    ] = None,
    input_pages: Annotated[
        int | None, typer.Option(help="Of the pool; enough for every sequence of the batch.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and accepted drafts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a plot to this file.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a policy, each on its line.")
    ] = False,
) -> int:
    spec, layers = _layer(model, family, shape)
    positive_int("batch", batch)
    positive_int("window", window)
    cost = StepCost.of(spec, format, gpu=gpu, window=window)
    rows = _capacity(capacity, cost, commit_rate)
    policies = _policies(policy, fold_budget, cost, layers, rows, batch)
    served = (
        read_trace(trace, requests)
        if trace is not None
        else make_trace(
            arrivals, 100_000 if requests is None else requests, batch=batch,
            step_s=_step_s(cost, layers, rows, batch, commit_rate, rest_us),
            output_mean=output_mean, prompt_mean=prompt_mean, rate=rate, seed=seed,
        )
    )  # fmt: skip
    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as shown:
        for name in policies:
            task = shown.add_task(name, total=len(served))
            outcome = serve(
                served, cost, layers=layers, capacity=rows, batch=batch, policy=name,
                rest_us=rest_us, commit_rate=commit_rate, checkpoint_pages=checkpoint_pages,
                input_pages=input_pages, seed=seed,
                progress=lambda done, _, task=task: shown.update(task, completed=done),  # type: ignore[misc]
            )  # fmt: skip
            outcomes.append(outcome)
            if json:
                print(json_text.dumps(outcome.as_dict(), allow_nan=False), flush=True)
    if out is not None:
        plot(outcomes, out)
    if not json:
        _print(outcomes, served, cost)
    return 0


def _layer(model: str | None, family: str | None, shape: str | None) -> tuple[LayerSpec, int]:
    """The recurrent layer, and how many of it a step has."""
    if shape is None:
        layers, spec = one_kind(model or _DEFAULT_MODEL, family)
        return spec, sum(1 for other in layers.ssm.values() if other == spec)
    sizes = _SHAPE.fullmatch(shape)
    if family not in _FAMILIES or model is not None or sizes is None:
        raise InputError(
            f"shape: got {shape!r} with family {family!r} and model {model!r}; allowed HEADSxDIMx"
            "STATE/SHARED with --family and without --model; e.g. --family mamba2 --shape "
            "128x64x128/8"
        )
    return _FAMILIES[family](*map(int, sizes.groups())), 1


def _capacity(text: str, cost: StepCost, commit_rate: float) -> int:
    if text == "auto":
        return best_capacity(
            cost.spec, cost.format, cost.dtype, window=cost.window, commit_rate=commit_rate
        )
    if not text.isdecimal() or int(text) < cost.window:
        raise InputError(
            f"capacity: got {text!r}; allowed auto or an integer >= the window of {cost.window}; "
            "change it"
        )
    return int(text)


def _policies(
    text: str, budget: str | None, cost: StepCost, layers: int, capacity: int, batch: int
) -> list[str]:
    """The names that a planner takes; ``deadline`` with its budget."""
    folds = 2 * -(-batch // max(capacity // cost.window, 1))
    if budget is not None:
        size = _SIZE.fullmatch(budget)
        if size:
            count = int(size[1]) * _UNITS[size[2].lower()]
            folds = folds_within(
                count, cost.spec, cost.format, cost.dtype, layers=layers, capacity=capacity
            )
        elif budget.isdecimal() and int(budget):
            folds = int(budget)
        else:
            raise InputError(
                f"fold_budget: got {budget!r}; allowed an integer >= 1, or bytes as 64MiB; "
                "change it"
            )
    return [f"deadline:{folds}" if name == "deadline" else name for name in text.split(",")]


def _step_s(
    cost: StepCost, layers: int, capacity: int, batch: int, commit_rate: float, rest_us: float
) -> float:
    """Seconds a token of a sequence, at the cap."""
    from ..cost import accepted_mean

    step = layers * cost.steady_us(batch, capacity, commit_rate) + rest_us
    return step * 1e-6 / accepted_mean(cost.window, commit_rate)


def _print(outcomes: Sequence[Outcome], trace: Trace, cost: StepCost) -> None:
    console = Console()
    first = outcomes[0]
    table = Table(
        title=f"{len(trace)} requests, {trace.name}; batch up to {first.batch}, L = "
        f"{first.capacity}, {first.format}; {first.layers} layers, {first.gpu}"
    )
    for column in (
        "policy", "steps", "p50 us", "p99 us", "max us", "p99 / p50", "folds, p99", "early",
        "pages, most", "exhausted",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "policy" else "right")
    for o in outcomes:
        d = o.as_dict()
        table.add_row(
            o.policy, str(o.steps), f"{d['p50_us']:.0f}", f"{d['p99_us']:.0f}",
            f"{d['max_us']:.0f}", f"{d['tail']:.2f}", str(d["folds_p99"]),
            f"{d['early_folds'] / max(d['folds'], 1):.1%}", str(d["peak_pages"]),
            str(o.exhausted),
        )  # fmt: skip
    console.print(table)
    console.print(_histogram(outcomes))
    console.print(
        "Microseconds of the recurrent layers of a step, by the cost model. " + cost.device.basis,
        markup=False, highlight=False,
    )  # fmt: skip


_BINS = 12
_BAR = 12


def _histogram(outcomes: Sequence[Outcome]) -> Table:
    """Steps by how many sequences fold in them, in bins."""
    shown = max(int(np.percentile(o.folds, 99.5)) for o in outcomes)
    most = max(int(o.folds.max()) for o in outcomes)
    width = -(-(shown + 1) // _BINS)
    table = Table("folds of a step", *(o.policy for o in outcomes), title="Share of the steps")
    lows = list(range(0, shown + 1, width))
    for low, high in zip(lows, [*lows[1:], most + 1], strict=True):
        cells = []
        for o in outcomes:
            share = float(((o.folds >= low) & (o.folds < high)).mean())
            cells.append(f"{share:7.2%} {'#' * round(share * _BAR)}" if share else "")
        table.add_row(f"{low}–{high - 1}" if high - low > 1 else str(low), *cells)
    return table
