"""Which candidate wins: the order of the choices, what is compared with what, and when it counts.

Kernels that run one after another are chosen one after another, each with the choices so far. The
rule's choice takes part in every comparison, and stays unless another is clearly faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..spec import LayerSpec

if TYPE_CHECKING:
    from replayinfer.kernels.launch.config import LaunchConfig

__all__ = ["STAGES", "Choices", "Dropped", "Outcome", "Part", "Stage", "Trials", "choose", "rules"]

Part = Literal["readout", "convolved", "fold", "conv", "direct", "verify"]
Choices = Mapping[str, "LaunchConfig | None"]

MARGIN = 0.01  # a candidate that is not faster by this share is as good as the rule's choice
MOST_PROGRAMS = 4096  # sequences x heads beyond which one kernel for small batches is not tried


@dataclass(frozen=True)
class Stage:
    """One choice: of `op`, by the time of the launches that are `part` of a step.

    `whole` operations do the work of all others of their part by themselves, or are None.
    """

    op: str
    part: Part
    whole: bool = False


STAGES = (
    Stage("readout", "readout"),
    Stage("prepass", "readout"),
    Stage("fused", "readout", whole=True),
    Stage("conv_readout", "convolved"),
    Stage("conv_prepass", "convolved"),
    Stage("fold", "fold"),
    Stage("fold32", "fold"),
    Stage("fold64", "fold"),
    Stage("conv", "conv"),
    Stage("direct", "direct"),
    Stage("verify", "verify"),
    Stage("verify64", "verify"),
    Stage("verify_prepass", "verify"),
)
"""In this order; a family has candidates for some of them, and a length takes one fold of three.

A readout that convolves is for batches whose step is not one kernel, so `fused` is chosen before.
"""


class Trials(Protocol):
    """What a choice needs of a machine. Parts are launched with `choices` in force."""

    def asked(self, part: Part, choices: Choices) -> set[str]:
        """The operations whose choice the launches of `part` look up, if a step has that part."""

    def wrong(self, part: Part, choices: Choices) -> str | None:
        """None where the results are those of the rule's choices, else what is wrong."""

    def time(self, part: Part, arms: Mapping[int, Choices]) -> dict[int, float]:
        """Microseconds a layer of each arm, measured in turn."""


@dataclass(frozen=True)
class Dropped:
    """A candidate that was not timed, and why."""

    op: str
    choice: LaunchConfig
    reason: str


@dataclass
class Outcome:
    """What was chosen at one shape, format and batch.

    Attributes
    ----------
    choices : dict of str to LaunchConfig or None
        By operation; None: another operation of the part does it.
    micros, rule_micros : dict of str to float
        Microseconds a layer of the part, with the choice and with the rule's.
    dropped : list of Dropped
    """

    choices: dict[str, LaunchConfig | None] = field(default_factory=dict)
    micros: dict[str, float] = field(default_factory=dict)
    rule_micros: dict[str, float] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)


def rules(spec: LayerSpec, fmt: str, batch: int) -> dict[str, LaunchConfig | None]:
    """The rule's choice for every operation."""
    from replayinfer.kernels.launch.lookup import rule

    return {stage.op: rule(stage.op, spec, fmt, batch) for stage in STAGES}


def choose(
    spec: LayerSpec,
    fmt: str,
    batch: int,
    trials: Trials,
    *,
    note: Callable[[str, bool], None] = lambda text, alarm: None,
) -> Outcome:
    """Try the candidates of every operation that `spec` has, in the order of `STAGES`.

    Parameters
    ----------
    note : function of a line and whether it is an alarm
        Told of every choice, and of every candidate that is dropped.
    """
    from replayinfer.kernels.launch.candidates import candidates

    outcome = Outcome()
    rule = rules(spec, fmt, batch)
    current = dict(rule)
    others: set[Part] = set()  # parts for which some operation is chosen already
    for stage in STAGES:
        found = candidates(stage.op, spec, fmt)
        if not found:
            continue
        alone = {s.op: None for s in STAGES if s.whole and s.part == stage.part}
        if stage.op not in trials.asked(stage.part, {**current, **alone}):
            continue
        tries = dict.fromkeys([rule[stage.op], *found])
        options: list[LaunchConfig | None] = [c for c in tries if c is not None]
        if stage.whole and stage.part in others:
            small = batch * spec.heads <= MOST_PROGRAMS
            options = [None, *options] if small else [None]
        others.add(stage.part)

        arms: dict[int, Choices] = {}
        for place, option in enumerate(options):
            choices = {**current, **alone, stage.op: option}
            reason = trials.wrong(stage.part, choices)
            if reason is None:
                arms[place] = choices
                continue
            note(f"{stage.op}: dropped {show(option)}: {reason}", True)
            if option is not None:
                outcome.dropped.append(Dropped(stage.op, option, reason))
        if not arms:
            note(f"{stage.op}: nothing is left to choose from", True)
            continue
        times = trials.time(stage.part, arms)
        first, best = min(times), min(times, key=times.__getitem__)
        if times[best] > (1 - MARGIN) * times[first]:
            best = first
        outcome.choices[stage.op] = current[stage.op] = options[best]
        outcome.micros[stage.op] = times[best]
        own = options.index(rule[stage.op]) if rule[stage.op] in options else -1
        if own in times:
            outcome.rule_micros[stage.op] = times[own]
        note(f"{stage.op}: {show(options[best])}, {times[best]:.1f} us", False)
    return outcome


def show(choice: LaunchConfig | None) -> str:
    """``num_warps=1 rows=32``, or ``none``."""
    from replayinfer.kernels.launch.table import choice_fields

    fields = choice_fields(choice)
    if fields is None:
        return "none"
    return " ".join(f"{name}={value}" for name, value in fields.items()) or "all defaults"
