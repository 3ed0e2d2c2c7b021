"""What the demo shows: live progress while it runs, a table at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from .run import DemoResult, Progress

__all__ = ["live_progress", "results_table"]


@contextlib.contextmanager
def live_progress(console: Console) -> Iterator[Callable[[str], Progress]]:
    """Progress bars on `console`; yields a function from a model's name to its `Progress`.

    Where the console is no terminal, a line is printed as each phase begins instead.
    """
    bars = Bars(
        TextColumn("{task.description:>22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[tuple[str, str], TaskID] = {}

    def of(model: str) -> Progress:
        def progress(phase: str, done: int, total: int, note: str) -> None:
            key = (model, phase)
            if key not in tasks:
                tasks[key] = bars.add_task(f"{model} {phase}", total=total, note=note)
                if bars.disable:
                    console.print(f"{model}: {phase}", highlight=False)
            bars.update(tasks[key], completed=done, note=note)

        return progress

    with bars:
        yield of


def results_table(results: Sequence[DemoResult]) -> Table:
    """One column a model."""
    table = Table(title="replayinfer demo", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for r in results:
        table.add_column(r.model, justify="right", no_wrap=True)
    rows: list[tuple[str, Callable[[DemoResult], str]]] = [
        ("check", lambda r: "[green]passed[/]" if r.ok else "[bold red]FAILED[/]"),
        ("tokens equal", lambda r: f"{r.tokens_equal} / {r.tokens}"),
        ("largest logit difference", lambda r: f"{r.max_logit_diff:.1e} of {r.logit_bound:.0e}"),
        ("format, capacity, policy", lambda r: f"{r.format}, {r.capacity}, {r.policy}"),
        ("backend", lambda r: r.backend),
        ("steps", lambda r: str(r.steps)),
        ("folds (forced, early)", lambda r: f"{r.folds} ({r.forced_folds}, {r.early_folds})"),
        ("forks, preemptions", lambda r: f"{r.forks}, {r.preemptions}"),
        ("state traffic, replay", lambda r: _bytes(r.state_bytes)),
        ("state traffic, standard", lambda r: _bytes(r.state_bytes_standard)),
        ("saved", lambda r: f"{1 - r.state_bytes / max(r.state_bytes_standard, 1):.0%}"),
        ("pool", lambda r: _bytes(r.pool_bytes)),
        ("pages used at most", lambda r: f"{r.pages_peak} / {r.pages}"),
        ("pages leaked", lambda r: str(r.pages_leaked)),
        ("seconds", lambda r: f"{r.seconds:.1f}"),
    ]
    if any(r.speculate for r in results):
        rows[3:3] = [
            ("drafts a round", lambda r: str(r.speculate)),
            ("rounds", lambda r: str(r.rounds)),
            ("drafts accepted", lambda r: f"{r.drafts_accepted} / {r.drafts}"),
            ("tokens a round", lambda r: f"{r.accepted_per_round:.2f}"),
        ]
    for label, show in rows:
        table.add_row(label, *(show(r) for r in results))
    return table


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
