"""One tuner run: every case on this machine's GPU, as entries of a launch table."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from ..spec import LayerSpec
from .choose import STAGES, Dropped, Outcome, Trials, choose, rules

if TYPE_CHECKING:
    from replayinfer.kernels.launch.config import LaunchConfig

__all__ = ["Measured", "TuneCase", "TuneReport", "collect", "run_tune"]

Progress = Callable[["TuneCase", str, bool], None]


@dataclass(frozen=True)
class TuneCase:
    """One shape, format and batch to find choices for.

    Attributes
    ----------
    windows : tuple of int
        Windows of several tokens that a choice has to serve, since a table tells none apart: it is
        the one with the least time over all of them. Empty: the kernels of windows are left out.
    window_capacity : int or None
        Rows before a fold where windows are decoded; None: `capacity`.
    """

    spec: LayerSpec
    batch: int
    format: str = "fp32_split"
    capacity: int = 16
    dtype: torch.dtype = torch.bfloat16
    windows: tuple[int, ...] = ()
    window_capacity: int | None = None


@dataclass(frozen=True)
class Measured:
    """One entry of a table."""

    key: str
    batch: int
    choice: LaunchConfig | None


@dataclass
class TuneReport:
    """What `run_tune` returns.

    Attributes
    ----------
    device : str
        As torch names it.
    measured : list of Measured
    direct_up_to : dict of str to int
        By shape and format, the largest measured batch up to which direct steps beat replay.
    outcomes : list of (TuneCase, Outcome)
        With the times.
    """

    command: str
    device: str
    torch: str
    triton: str
    replayinfer: str
    date: str
    measured: list[Measured] = field(default_factory=list)
    direct_up_to: dict[str, int] = field(default_factory=dict)
    outcomes: list[tuple[TuneCase, Outcome]] = field(default_factory=list)

    def header(self) -> dict[str, str]:
        """What a table says of the run."""
        names = ("date", "command", "replayinfer", "torch", "triton")
        return {name: getattr(self, name) for name in names}

    @property
    def dropped(self) -> list[tuple[TuneCase, Dropped]]:
        """Every candidate that could not be launched or was wrong."""
        return [(case, drop) for case, outcome in self.outcomes for drop in outcome.dropped]


def run_tune(
    cases: Iterable[TuneCase],
    *,
    command: str,
    version: str,
    progress: Progress = lambda case, text, alarm: None,
) -> TuneReport:
    """Measure the launch choices of every case on the current CUDA device.

    Nothing is written: see `merge_table` and `write_content`.

    Parameters
    ----------
    command, version : str
        For the header: how the run was started, and of which version of this library.
    progress : function of a case, a line, and whether it is an alarm

    Raises
    ------
    UnsupportedError
        No CUDA device, or a case that the kernels do not serve.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device: got no CUDA device; allowed a GPU, since an interpreted kernel's time means "
            "nothing; run tune on the machine that serves"
        )
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    report = TuneReport(
        command=command,
        device=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        triton=triton.__version__,
        replayinfer=version,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )

    def trials(case: TuneCase) -> Trials:
        from .trials import GraphTrials

        gc.collect()  # the pools of the case before
        torch.cuda.empty_cache()
        return GraphTrials(case, device, rules(case.spec, case.format, case.batch))

    collect(report, cases, trials, progress)
    return report


def collect(
    report: TuneReport,
    cases: Iterable[TuneCase],
    trials: Callable[[TuneCase], Trials],
    progress: Progress,
) -> None:
    """Choose for every case, and add the entries to `report`."""
    from replayinfer.kernels.launch.table import shape_key

    direct: dict[str, dict[int, bool]] = {}
    for case in cases:
        outcome = choose(
            case.spec, case.format, case.batch, trials(case),
            note=lambda text, alarm, case=case: progress(case, text, alarm),  # type: ignore[misc]
        )  # fmt: skip
        report.outcomes.append((case, outcome))
        for op, choice in outcome.choices.items():
            key = shape_key(op, case.spec, case.format)
            report.measured.append(Measured(key, case.batch, choice))
        if (wins := _direct_wins(case, outcome)) is not None:
            key = shape_key("direct", case.spec, case.format)
            direct.setdefault(key, {})[case.batch] = wins
    for key, wins_at in direct.items():
        report.direct_up_to[key] = _largest_without_gap(wins_at)


def _direct_wins(case: TuneCase, outcome: Outcome) -> bool | None:
    """Whether a direct step is faster than a readout and its share of a fold; None: not known."""
    micros: dict[str, Any] = outcome.micros
    ops = [stage.op for stage in STAGES if stage.part == "readout" and stage.op in micros]
    readout = min((micros[op] for op in ops), default=0)
    fold = next((micros[s.op] for s in STAGES if s.part == "fold" and s.op in micros), None)
    if "direct" not in micros or fold is None or not readout:
        return None
    # The measured fold list is that of a step in which somebody folds.
    folds = -(-case.batch // case.capacity)
    share = case.batch / case.capacity / folds
    return bool(micros["direct"] < readout + share * fold)


def _largest_without_gap(wins: dict[int, bool]) -> int:
    """The last batch before the first at which replay wins."""
    largest = 0
    for batch in sorted(wins):
        if not wins[batch]:
            break
        largest = batch
    return largest
