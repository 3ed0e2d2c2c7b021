"""One model, from text to verdict: reference, serving, comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checks import positive_int, usable_device
from ..formats import get_format
from .models import build_model, draft_model
from .prompts import load_prompts
from .reference import FP32_BOUND, Comparison, Reference, compare, generate, logit_bound
from .serve import Event, Request, Schedule, Server

__all__ = ["DemoOptions", "DemoResult", "Progress", "quiet_peer", "run_model"]

Progress = Callable[[str, int, int, str], None]
"""Called as ``progress(phase, done, total, note)``."""


@dataclass(frozen=True)
class DemoOptions:
    """What to run; refused where it makes no sense, before any model is built.

    Attributes
    ----------
    format, capacity, backend, policy
        As in `StatePool` and `ReplayDecodeWrapper`.
    prompts, tokens : int
        How many prompts, and how many tokens to decode for each.
    device : str
        Where the model and its pools are.
    seed : int
        Of the weights.
    files : tuple of Path
        Text to prompt with; Python's own help without any.
    speculate : int
        Drafts of a round, by a draft model; 0 decodes token by token.
    """

    format: str = "fp32"
    capacity: int = 16
    prompts: int = 8
    tokens: int = 128
    backend: str = "auto"
    policy: str = "full"
    device: str = "cpu"
    seed: int = 0
    files: tuple[Path, ...] = ()
    speculate: int = 0

    def __post_init__(self) -> None:
        get_format(self.format)
        usable_device(self.device)
        for name in ("capacity", "prompts", "tokens"):
            positive_int(name, getattr(self, name))
        positive_int("seed", self.seed, minimum=0)
        positive_int("speculate", self.speculate, minimum=0)


@dataclass(frozen=True)
class DemoResult:
    """What one model did, as ``--json`` prints it; bytes and events are counts."""

    model: str
    backend: str
    format: str
    capacity: int
    policy: str
    seed: int
    prompts: int
    check: str  # "tokens": against generate; "logits": teacher-forced
    tokens: int
    tokens_equal: int
    ties: int
    max_logit_diff: float
    logit_bound: float
    steps: int
    folds: int
    forced_folds: int
    early_folds: int
    forks: int
    preemptions: int
    state_bytes: int
    state_bytes_standard: int
    pool_bytes: int
    pages: int
    pages_peak: int
    pages_leaked: int
    seconds: float
    ok: bool
    speculate: int = 0
    rounds: int = 0  # windows verified
    drafts: int = 0  # in them
    drafts_accepted: int = 0
    accepted_per_round: float = 1.0  # tokens, the certain one included

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run_model(name: str, options: DemoOptions, progress: Progress) -> DemoResult:
    """Build a model, decode the prompts by its own ``generate``, serve them by replay, compare.

    In the format ``fp32`` the served tokens are free and must be those of ``generate``. In the
    rounded formats they follow the reference, and logits must agree within `logit_bound`. Drafts
    change neither.
    """
    prompts = load_prompts(options.prompts, options.files)
    with quiet_peer(), _one_thread(), _float32_convolutions():
        from replayinfer.integrations.transformers import ModelDrafter, ReplayEngine

        began = time.perf_counter()
        model = build_model(name, options.seed).to(options.device)
        schedule = Schedule.of(len(prompts), options.tokens)
        engine = ReplayEngine(
            model,
            capacity=options.capacity,
            max_window=1 + options.speculate,
            format=options.format,
            max_sequences=schedule.running + 1,
            policy=options.policy,
            backend=options.backend,
        )
        drafter = None
        if options.speculate:
            draft_engine = ReplayEngine(
                draft_model(model, options.seed),
                capacity=max(16, 1 + options.speculate),
                max_window=1 + options.speculate,
                max_sequences=2 * (schedule.running + 1),
            )
            drafter = ModelDrafter(draft_engine, options.speculate)
        references = _references(model, prompts, options, schedule, progress)
        server = _server(engine, prompts, references, options, schedule, drafter)
        pages_peak = _serve(server, options, progress)
        comparison = _compare(model, server, references, options, schedule)
        seconds = time.perf_counter() - began

    exact = options.format == "fp32"
    bound = logit_bound(options.format, options.capacity)
    pool, counters = engine.pool, engine.counters
    leaked = sum(pool.pages_in_use().values())
    speculation = server.speculation
    if drafter is not None:
        leaked += sum(drafter.engine.pool.pages_in_use().values())
    right = comparison.max_logit_diff <= bound
    if exact:
        right = right and comparison.equal + comparison.ties == comparison.tokens
    return DemoResult(
        model=name,
        backend=engine.driver.wrapper.backend.name,
        format=options.format,
        capacity=options.capacity,
        policy=options.policy,
        seed=options.seed,
        prompts=len(prompts),
        check="tokens" if exact else "logits",
        tokens=comparison.tokens,
        tokens_equal=comparison.equal,
        ties=comparison.ties,
        max_logit_diff=comparison.max_logit_diff,
        logit_bound=bound,
        steps=counters.steps,
        folds=counters.folds,
        forced_folds=counters.forced_folds,
        early_folds=counters.early_folds,
        forks=server.forks,
        preemptions=server.preemptions,
        state_bytes=counters.state_bytes,
        state_bytes_standard=counters.state_bytes_standard,
        pool_bytes=pool.nbytes,
        pages=pool.sizes.checkpoint_pages + pool.sizes.input_pages,
        pages_peak=pages_peak,
        pages_leaked=leaked,
        seconds=round(seconds, 3),
        ok=right and not leaked,
        speculate=options.speculate,
        rounds=speculation.rounds,
        drafts=speculation.drafts,
        drafts_accepted=speculation.accepted,
        accepted_per_round=round(speculation.accepted_per_round, 3),
    )


def _references(
    model: Any,
    prompts: list[list[int]],
    options: DemoOptions,
    schedule: Schedule,
    progress: Progress,
) -> list[Reference]:
    """One a prompt, and last that of the fork, which begins with the runner-up of its parent."""
    total = len(prompts) + 1
    found: list[Reference] = []
    for prompt in prompts:
        progress("generate", len(found), total, "the model's own cache")
        found.append(generate(model, prompt, options.tokens))
    progress("generate", len(found), total, "the fork")
    parent, place = found[schedule.forked], schedule.fork_at - 1
    forced = [*parent.tokens[:place], parent.second_best(place)]
    found.append(generate(model, prompts[schedule.forked], options.tokens, forced=forced))
    progress("generate", total, total, "")
    return found


def _server(
    engine: Any,
    prompts: list[list[int]],
    references: list[Reference],
    options: DemoOptions,
    schedule: Schedule,
    drafter: Any,
) -> Server:
    forced = options.format != "fp32"
    gap = max(1, min(5, options.tokens // 8))
    requests = [
        Request(
            prompt=prompt,
            length=options.tokens,
            arrival=i * gap,
            follow=references[i].tokens if forced else [],
        )
        for i, prompt in enumerate(prompts)
    ]
    of_child = references[-1].tokens
    child = Request(
        prompt=prompts[schedule.forked],
        length=options.tokens,
        follow=of_child if forced else of_child[: schedule.fork_at],
    )
    return Server(engine, requests, child, schedule, drafter)


def _serve(server: Server, options: DemoOptions, progress: Progress) -> int:
    total = (len(server.requests) + 1) * options.tokens
    peak = 0

    def report(event: Event) -> None:
        nonlocal peak
        held = {k: v for k, v in event.pages.items() if k.endswith("pages")}
        peak = max(peak, sum(held.values()))
        note = f"{event.running} running, {event.waiting} waiting, {event.finished} finished"
        progress("replay", event.tokens, total, note)

    server.run(report)
    return peak


def _compare(
    model: Any,
    server: Server,
    references: list[Reference],
    options: DemoOptions,
    schedule: Schedule,
) -> Comparison:
    result = Comparison()
    for request, reference in zip([*server.requests, server.child], references, strict=True):
        result += compare(
            model, request.prompt, reference, request.tokens, request.logits,
            skip=schedule.fork_at if request is server.child else 0,
            bound=FP32_BOUND,
            forced=options.format != "fp32",
        )  # fmt: skip
    return result


@contextlib.contextmanager
def quiet_peer() -> Iterator[None]:
    """Keep transformers from warning that its reference functions are slow: they are meant."""
    from replayinfer.integrations.transformers import peer

    transformers = peer.load()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """These matrices are too small to share: two threads would spend their time waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _float32_convolutions() -> Iterator[None]:
    """No TF32, which cuDNN takes by itself: `FP32_BOUND` is between two float32 programs."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
