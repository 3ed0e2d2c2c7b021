"""The loop: rounds of draft, verify and commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..checks import positive_int
from ..errors import InputError, PlanError
from .accepted import accepted_path, sampled_path
from .drafts import Draft, Drafter
from .target import Target

__all__ = ["SpeculationCounters", "SpeculativeSession"]


@dataclass
class SpeculationCounters:
    """Totals of a session.

    Attributes
    ----------
    rounds : int
        Windows that were verified, one per sequence and step.
    drafts, accepted : int
        Drafts in them, and those that were kept.
    """

    rounds: int = 0
    drafts: int = 0
    accepted: int = 0

    @property
    def accepted_per_round(self) -> float:
        """Nodes kept per window, its newest token included: between 1 and the window."""
        return 1 + self.accepted / max(self.rounds, 1)


class SpeculativeSession:
    """Decodes sequences by rounds of draft, verify and commit.

    The text of a sequence ends with a token that its state has not taken in; each round takes it
    in, with the accepted drafts, and appends at least one new token.

    Parameters
    ----------
    target : Target
        What is decoded: a `ReplayTarget`, or an engine with the same three methods.
    drafter : Drafter
        Any callable that proposes drafts. What it proposes changes how fast tokens come, never
        which: they are those of plain decoding.
    distribution : function of logits [nodes, vocabulary], optional
        Probabilities to sample from. Greedy if omitted.
    generator : torch.Generator, optional
        For sampling, on the device of the logits.

    Examples
    --------
    >>> session = SpeculativeSession(target, NGramDrafter(4))       # doctest: +SKIP
    >>> session.add(sequence, prompt + [first_token])               # doctest: +SKIP
    >>> session.step()                                              # doctest: +SKIP
    {sequence: [17, 4, 99]}
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        distribution: Callable[[torch.Tensor], torch.Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.counters = SpeculationCounters()
        self._distribution = distribution
        self._generator = generator
        self._texts: dict[int, list[int]] = {}

    def add(self, sequence: int, text: Iterable[int]) -> None:
        """Decode a live sequence whose state covers `text` up to its last token."""
        tokens = [int(token) for token in text]
        if sequence in self._texts or not tokens:
            raise InputError(
                f"sequence: got {sequence} with {len(tokens)} tokens; allowed one that is not in "
                "the session yet, with at least its newest token; remove it first"
            )
        self._texts[sequence] = tokens

    def remove(self, sequence: int) -> list[int]:
        """Decode it no longer; returns its text. The sequence itself stays as it is."""
        self._require([sequence])
        return self._texts.pop(sequence)

    def text(self, sequence: int) -> list[int]:
        """All tokens, the newest included."""
        self._require([sequence])
        return list(self._texts[sequence])

    def step(
        self,
        sequences: Sequence[int] | None = None,
        *,
        limits: Mapping[int, int] | None = None,
    ) -> dict[int, list[int]]:
        """One round of some sequences, by default of all.

        Parameters
        ----------
        limits : mapping of sequence to int, optional
            Most new tokens of it in this round, at least 1.

        Returns
        -------
        dict of sequence to list of int
            Its new tokens, at least one.

        Notes
        -----
        Nothing has changed where the drafter or the model raises.
        """
        chosen = list(self._texts) if sequences is None else list(sequences)
        self._require(chosen)
        if not chosen:
            return {}
        drafts = self._draft(chosen, limits or {})
        windows = [[self._texts[s][-1], *d.tokens] for s, d in zip(chosen, drafts, strict=True)]
        trees = [
            list(range(-1, len(d.tokens))) if d.parents is None
            else [-1, *(parent + 1 for parent in d.parents)]
            for d in drafts
        ]  # fmt: skip
        branching = any(d.parents is not None for d in drafts)
        logits = self.target.verify(chosen, windows, trees if branching else None)
        try:
            picked = self._pick(windows, trees, drafts, logits)
        except BaseException:
            self.target.abort()
            raise
        self.target.accept([path for path, _ in picked])
        new: dict[int, list[int]] = {}
        for sequence, window, (path, token) in zip(chosen, windows, picked, strict=True):
            new[sequence] = [*(window[node] for node in path[1:]), token]
            self._texts[sequence] += new[sequence]
            self.counters.rounds += 1
            self.counters.drafts += len(window) - 1
            self.counters.accepted += len(path) - 1
        return new

    def _draft(self, sequences: list[int], limits: Mapping[int, int]) -> list[Draft]:
        proposed = self.drafter({s: tuple(self._texts[s]) for s in sequences})
        drafts = []
        for sequence in sequences:
            room = self.target.max_window
            if sequence in limits:
                room = min(room, positive_int("limits", limits[sequence]))
            draft = proposed.get(sequence, Draft()).first(room - 1)
            if draft.parents is not None and len(draft.parents) != len(draft.tokens):
                raise InputError(
                    f"parents: got {len(draft.parents)} for {len(draft.tokens)} drafts; allowed "
                    "one per draft; return as many parents as tokens"
                )
            drafts.append(draft)
        return drafts

    def _pick(
        self,
        windows: list[list[int]],
        trees: list[list[int]],
        drafts: list[Draft],
        logits: torch.Tensor,
    ) -> list[tuple[list[int], int]]:
        """Of every sequence the nodes to keep, and its next token."""
        picked = []
        if self._distribution is None:
            for window, tree, row in zip(windows, trees, logits.argmax(-1).tolist(), strict=True):
                path = accepted_path(window, tree, row[: len(window)])
                picked.append((path, int(row[path[-1]])))
            return picked
        for window, tree, draft, row in zip(windows, trees, drafts, logits, strict=True):
            target = self._distribution(row[: len(window)])
            drawn = draft.probabilities
            if drawn is not None:
                drawn = torch.cat([drawn[:1], drawn]).to(target)  # row 0 is not read
            picked.append(
                sampled_path(
                    window, target, parents=tree, draft=drawn if len(window) > 1 else None,
                    generator=self._generator,
                )
            )  # fmt: skip
        return picked

    def _require(self, sequences: Sequence[int]) -> None:
        if len(set(sequences)) != len(sequences):
            raise InputError(
                f"sequences: got {list(sequences)}; allowed each once; drop the repetition"
            )
        for sequence in sequences:
            if sequence not in self._texts:
                raise PlanError(
                    f"sequences: got {sequence}; allowed those that were added; call add first"
                )
