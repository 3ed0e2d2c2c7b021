"""``replayinfer demo``."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import torch
import typer

from replayinfer import InputError

from ..demo.configs import DEFAULT_MODELS, MODELS
from ..demo.run import DemoOptions
from .interpreter import interpret_without_gpu

__all__ = ["demo"]

_DEFAULTS = DemoOptions()


def demo(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Text to prompt with; Python's own help topics without any."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODELS)}; the first two without it.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="Checkpoint format: fp32, fp32_split, bf16 or fp16.")
    ] = _DEFAULTS.format,
    capacity: Annotated[
        int, typer.Option(help="Rows a sequence holds before it folds.")
    ] = _DEFAULTS.capacity,
    prompts: Annotated[int, typer.Option(help="How many prompts.")] = _DEFAULTS.prompts,
    tokens: Annotated[int, typer.Option(help="Tokens to decode for each.")] = _DEFAULTS.tokens,
    backend: Annotated[str, typer.Option(help="auto, or a backend's name.")] = _DEFAULTS.backend,
    policy: Annotated[
        str, typer.Option(help="When to fold early: full (never) or spread.")
    ] = _DEFAULTS.policy,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: the GPU where --backend triton finds one.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the models' weights.")] = _DEFAULTS.seed,
    speculate: Annotated[
        int,
        typer.Option(help="Drafts of a round: a draft model proposes, windows of 1 + N verify."),
    ] = _DEFAULTS.speculate,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a model, and nothing else.")
    ] = False,
) -> int:
    from rich.console import Console

    from ..demo.report import live_progress, results_table
    from ..demo.run import run_model

    if model is not None and model not in MODELS:
        raise InputError(f"model: got {model!r}; allowed {', '.join(MODELS)}; pick one")
    if device == "auto":
        device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    interpret_without_gpu(backend)
    options = DemoOptions(
        format=format, capacity=capacity, prompts=prompts, tokens=tokens, backend=backend,
        policy=policy, device=device, seed=seed, files=tuple(files or ()), speculate=speculate,
    )  # fmt: skip
    results = []
    with live_progress(Console(stderr=True)) as progress_of:
        for name in [model] if model else DEFAULT_MODELS:
            result = run_model(name, options, progress_of(name))
            results.append(result)
            if json:
                print(json_text.dumps(result.as_dict()), flush=True)
    if not json:
        Console().print(results_table(results))
    return 0 if all(r.ok for r in results) else 1
