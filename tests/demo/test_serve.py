"""The scheduler, over an engine that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from replayinfer.demo.serve import Request, Schedule, Server

VOCABULARY = 64


class CountingEngine:
    """A sequence is the tokens it took in; the next token is their count."""

    def __init__(self, limit):
        self.limit, self.live, self.made = limit, {}, 0
        self.batches = []
        self.pool = SimpleNamespace(pages_in_use=lambda: {"checkpoint pages": len(self.live)})

    def prefill(self, prompt):
        return self._add(list(prompt))

    def step(self, sequences, tokens):
        assert len(set(sequences)) == len(sequences) <= self.limit
        self.batches.append(len(sequences))
        for sequence, token in zip(sequences, tokens, strict=True):
            self.live[sequence].append(token)
        return torch.stack([self._logits(s) for s in sequences])

    def fork(self, sequence):
        return [self._add(list(self.live[sequence]))[0]]

    def preempt(self, sequence):
        return self.live.pop(sequence)

    def resume(self, state):
        return self._add(state)[0]

    def free(self, sequences):
        for sequence in sequences:
            del self.live[sequence]

    def _add(self, tokens):
        self.made += 1
        self.live[self.made] = tokens
        assert len(self.live) <= self.limit
        return self.made, self._logits(self.made)

    def _logits(self, sequence):
        count = len(self.live[sequence]) % VOCABULARY
        return torch.nn.functional.one_hot(torch.tensor(count), VOCABULARY).float()


def serve(count, tokens, gap=2, follow=()):
    requests = [Request(prompt=[9] * (i + 1), length=tokens, arrival=i * gap) for i in range(count)]
    schedule = Schedule.of(count, tokens)
    child = Request(prompt=[9], length=tokens, follow=[*follow] or [1] * schedule.fork_at)
    engine = CountingEngine(schedule.running + 1)
    server = Server(engine, requests, child, schedule)
    events = []
    server.run(events.append)
    return server, engine, events


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 16])
def test_everyone_gets_every_token(count, tokens):
    server, engine, events = serve(count, tokens)
    for i, request in enumerate(server.requests):
        assert request.tokens == list(range(i + 1, i + 1 + tokens))
        assert len(request.logits) == tokens
    assert len(server.child.tokens) == len(server.child.logits) == tokens
    assert not engine.live
    assert server.forks == 1
    assert server.preemptions == (tokens > 1)
    assert events[-1].finished == count + 1
    assert events[-1].tokens == (count + 1) * tokens
    assert (events[-1].running, events[-1].waiting) == (0, 0)


def test_the_child_leaves_its_parent_at_the_newest_token():
    server, _, _ = serve(4, 16, follow=[1, 2, 3, 50])
    parent = server.requests[0].tokens
    assert parent[:4] == [1, 2, 3, 4]
    assert server.child.tokens[:4] == [1, 2, 3, 50]
    assert server.child.tokens[4:] == parent[4:]  # the counting engine counts on


def test_requests_arrive_and_leave_while_others_run():
    _, engine, events = serve(8, 16)
    assert max(e.running for e in events) == 7  # six at once, and the fork
    assert max(e.waiting for e in events) > 2
    assert len(set(engine.batches)) > 4


def test_a_preempted_request_gives_its_place_to_another():
    server, _, _ = serve(8, 16, gap=1)
    assert server.preemptions == 1
    assert server.requests[1].tokens == list(range(2, 18))


def test_following_wins_over_logits():
    requests = [Request(prompt=[9], length=4, follow=[40, 41, 42, 43])]
    child = Request(prompt=[9], length=4, follow=[40, 41, 42, 43])
    Server(CountingEngine(2), requests, child, Schedule.of(1, 4)).run(lambda event: None)
    assert requests[0].tokens == [40, 41, 42, 43]
    assert [int(row.argmax()) for row in requests[0].logits] == [1, 2, 3, 4]
