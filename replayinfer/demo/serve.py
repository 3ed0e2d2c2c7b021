"""Continuous batching: arrivals, departures, a fork, and a preempted sequence that comes back.

Decoded token by token, or in rounds of drafts that are verified together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..speculation import SpeculationCounters, SpeculativeSession

__all__ = ["Event", "Request", "Schedule", "Server"]


@dataclass
class Request:
    """One sequence to serve.

    Attributes
    ----------
    prompt : list of int
    length : int
        Tokens to end with, those taken over from a parent included.
    arrival : int
        Step at which it may start.
    follow : list of int or None
        Tokens to take whatever the logits say (teacher forcing); greedy past its end.
    tokens, logits
        What was decoded so far, and from what.
    """

    prompt: list[int]
    length: int
    arrival: int = 0
    follow: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    sequence: int = -1

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.length

    def take(self, logits: torch.Tensor) -> None:
        place = len(self.tokens)
        self.logits.append(logits)
        self.tokens.append(self.follow[place] if place < len(self.follow) else int(logits.argmax()))


@dataclass(frozen=True)
class Schedule:
    """What happens when.

    Attributes
    ----------
    running : int
        Requests that run at once; a fork's child comes on top.
    fork_at, preempt_at : int
        Tokens that the request has when it is forked, or preempted.
    forked, preempted : int
        Index of the request.
    pause : int
        Steps for which a preempted sequence stays away at least.
    """

    running: int
    fork_at: int
    preempt_at: int
    forked: int
    preempted: int
    pause: int = 5

    @staticmethod
    def of(requests: int, tokens: int) -> Schedule:
        """A fork after a quarter of the tokens, a preemption after half, too few places for all."""
        return Schedule(
            running=max(1, requests - requests // 4),
            fork_at=max(1, tokens // 4),
            preempt_at=max(1, tokens // 2),
            forked=0,
            preempted=min(1, requests - 1),
        )


@dataclass(frozen=True)
class Event:
    """What `Server.run` reports after each step."""

    running: int
    waiting: int
    finished: int
    tokens: int
    pages: dict[str, int]


class Server:
    """A scheduler around a `ReplayEngine`, as small as shows the point.

    Parameters
    ----------
    engine : ReplayEngine
    requests : list of Request
        In the order of arrival.
    child : Request
        Starts as a fork of ``requests[schedule.forked]``.
    drafter : ModelDrafter, optional
        Decode in rounds of its drafts.
    """

    def __init__(
        self,
        engine: Any,
        requests: list[Request],
        child: Request,
        schedule: Schedule,
        drafter: Any = None,
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.child = child
        self.schedule = schedule
        self.forks = 0
        self.preemptions = 0
        self._waiting = list(requests)
        self._running: list[Request] = []
        self._parked: list[tuple[int, Request, Any]] = []  # (step to come back, ...)
        self._finished = 0
        self._step = 0
        self._drafter = drafter
        self._target = _Watched(engine)
        self._session = SpeculativeSession(self._target, drafter or (lambda contexts: {}))

    @property
    def speculation(self) -> SpeculationCounters:
        """Rounds and drafts, where there is a drafter."""
        return self._session.counters

    def run(self, report: Callable[[Event], None]) -> None:
        """Serve all requests to their end."""
        while self._waiting or self._running or self._parked:
            self._resume()
            self._admit()
            if self._running:
                self._decode()
            self._step += 1
            report(self._event())

    @property
    def _room(self) -> bool:
        running = sum(r is not self.child for r in self._running)
        return running < self.schedule.running

    def _resume(self) -> None:
        for entry in list(self._parked):
            due, request, state = entry
            if self._step >= due and self._room:
                self._parked.remove(entry)
                request.sequence = self.engine.resume(state)
                self._running.append(request)
                self._draft_for(request)

    def _admit(self) -> None:
        while self._waiting and self._waiting[0].arrival <= self._step and self._room:
            request = self._waiting.pop(0)
            request.sequence, logits = self.engine.prefill(request.prompt)
            self._running.append(request)
            request.take(logits)
            self._draft_for(request)
            self._settle(request)

    def _decode(self) -> None:
        batch = list(self._running)
        if self._drafter is not None:
            self._decode_drafts(batch)
            return
        logits = self.engine.step([r.sequence for r in batch], [r.tokens[-1] for r in batch])
        for request, row in zip(batch, logits, strict=True):
            request.take(row)
            self._settle(request)

    def _decode_drafts(self, batch: list[Request]) -> None:
        self._target.requests = {r.sequence: r for r in batch}
        self._session.step(
            [r.sequence for r in batch], limits={r.sequence: self._before_event(r) for r in batch}
        )
        for request, logits in zip(batch, self._target.logits, strict=True):
            for row in logits:
                request.take(row)
            self._settle(request)

    def _before_event(self, request: Request) -> int:
        """Tokens that a request may take until something happens to it."""
        have, plan = len(request.tokens), self.schedule
        stops = [request.length]
        if request is self.requests[plan.forked]:
            stops.append(plan.fork_at)
        if request is self.requests[plan.preempted]:
            stops.append(plan.preempt_at)
        return min(stop - have for stop in stops if stop > have)

    def _draft_for(self, request: Request) -> None:
        self._session.add(request.sequence, [*request.prompt, *request.tokens])

    def _draft_no_more(self, request: Request) -> None:
        self._session.remove(request.sequence)
        if self._drafter is not None:
            self._drafter.forget(request.sequence)

    def _settle(self, request: Request) -> None:
        """Fork, preempt or finish a request that has just taken a token."""
        have, plan = len(request.tokens), self.schedule
        if request is self.requests[plan.forked] and have == plan.fork_at:
            self._fork(request)
        if request.done:
            self._finish(request)
        elif request is self.requests[plan.preempted] and have == plan.preempt_at:
            self._running.remove(request)
            self._draft_no_more(request)
            parked = self.engine.preempt(request.sequence)
            self._parked.append((self._step + plan.pause, request, parked))
            self.preemptions += 1

    def _fork(self, parent: Request) -> None:
        # The parent has not taken in its newest token yet: the child goes another way from there.
        child = self.child
        (child.sequence,) = self.engine.fork(parent.sequence)
        self.forks += 1
        child.tokens, child.logits = parent.tokens[:-1], parent.logits[:-1]
        child.take(parent.logits[-1])
        self._running.append(child)
        self._draft_for(child)
        if child.done:
            self._finish(child)

    def _finish(self, request: Request) -> None:
        self._running.remove(request)
        self._draft_no_more(request)
        self.engine.free([request.sequence])
        self._finished += 1

    def _event(self) -> Event:
        everyone = [*self.requests, self.child]
        return Event(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._parked),
            finished=self._finished,
            tokens=sum(len(r.tokens) for r in everyone),
            pages=self.engine.pool.pages_in_use(),
        )


class _Watched:
    """An engine as a session's target, which keeps the logits and lets requests follow a text."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: dict[int, Request] = {}
        self.logits: list[torch.Tensor] = []
        self._all = torch.empty(0)

    @property
    def max_window(self) -> int:
        return int(self.engine.max_window)

    def verify(
        self,
        sequences: Sequence[int],
        windows: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        self._all = self.engine.verify(sequences, windows, parents)
        shown = self._all.clone()
        for row, sequence in enumerate(sequences):
            request = self.requests[sequence]
            follow = request.follow[len(request.tokens) :][: len(windows[row])]
            for node, token in enumerate(follow):
                shown[row, node] = float("-inf")
                shown[row, node, token] = 0.0
        return shown

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        self.engine.accept(paths)
        self.logits = [self._all[row, list(path)] for row, path in enumerate(paths)]

    def abort(self) -> None:
        self.engine.abort()
