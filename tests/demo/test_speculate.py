"""The demo with drafts: the same tokens in fewer steps, through forks, preemption and forcing."""

from __future__ import annotations

import pytest
import torch

from replayinfer import Draft, InputError, UnsupportedError
from replayinfer.demo.configs import DEFAULT_MODELS
from replayinfer.demo.models import draft_model
from replayinfer.demo.run import DemoOptions, run_model
from replayinfer.demo.serve import Request, Schedule, Server

from .test_serve import VOCABULARY, CountingEngine


def run(name, **options):
    small = {"prompts": 2, "tokens": 20, "capacity": 7, "speculate": 4}
    return run_model(name, DemoOptions(**small | options), lambda *report: None)


@pytest.fixture
def needs_transformers(build):
    pass


@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_tokens_are_those_of_generate(needs_transformers, name):
    result = run(name)
    assert result.ok
    assert (result.speculate, result.check) == (4, "tokens")
    assert result.tokens_equal + result.ties == result.tokens == 2 * 20 + 15
    assert 0 < result.drafts_accepted < result.drafts <= 4 * result.rounds
    assert result.accepted_per_round == round(1 + result.drafts_accepted / result.rounds, 3)
    assert result.steps < run(name, speculate=0).steps
    assert (result.forks, result.preemptions, result.pages_leaked) == (1, 1, 0)
    assert result.folds > 0


@pytest.mark.parametrize("format", ["fp32_split", "bf16"])
def test_rounded_formats_follow_the_reference(needs_transformers, format):
    result = run("qwen3_next", format=format)
    assert result.ok
    assert result.check == "logits"
    assert 1e-4 < result.max_logit_diff <= result.logit_bound
    assert 0 < result.drafts_accepted < result.drafts


def test_a_window_beyond_the_capacity_is_refused(needs_transformers):
    with pytest.raises(UnsupportedError, match="capacity: got 4; allowed >= max_window=5"):
        run("qwen3_next", capacity=4)
    with pytest.raises(InputError, match="speculate: got -1"):
        DemoOptions(speculate=-1)


def test_the_draft_model_is_another_and_leaves_the_model_alone(build):
    model = build("qwen3_next")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    draft, again = draft_model(model), draft_model(model)
    for name, weight in draft.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
        assert torch.equal(before[name], model.get_parameter(name))
        if before[name].any():
            off = (weight - before[name]).norm() / before[name].norm()
            assert 0 < off < 0.1


class DraftedEngine(CountingEngine):
    """`CountingEngine` with windows."""

    max_window = 4

    def verify(self, sequences, windows, parents):
        assert parents is None
        self.batches.append(len(sequences))
        self.open = dict(zip(sequences, windows, strict=True))
        rows = torch.zeros(len(sequences), self.max_window, VOCABULARY)
        for row, (sequence, window) in enumerate(self.open.items()):
            for node in range(len(window)):
                rows[row, node, (len(self.live[sequence]) + node + 1) % VOCABULARY] = 1
        return rows

    def accept(self, paths):
        for (sequence, window), path in zip(self.open.items(), paths, strict=True):
            assert list(path) == list(range(len(path)))
            self.live[sequence] += window[: len(path)]
        self.open = None


class HalfRight:
    """Two drafts that count on, then one that does not; by turns none."""

    def __init__(self):
        self.asked, self.forgotten = 0, []

    def __call__(self, contexts):
        self.asked += 1
        return {
            s: Draft((len(t) % VOCABULARY, (len(t) + 1) % VOCABULARY, 0))
            for i, (s, t) in enumerate(contexts.items())
            if (i + self.asked) % 3
        }

    def forget(self, sequence):
        self.forgotten.append(sequence)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 16])
def test_the_scheduler_keeps_its_appointments(count, tokens):
    """Forks and preemptions at their token, though several come at once."""
    requests = [Request(prompt=[9] * (i + 1), length=tokens, arrival=2 * i) for i in range(count)]
    schedule = Schedule.of(count, tokens)
    child = Request(prompt=[9], length=tokens, follow=[*range(1, schedule.fork_at), 50])
    engine, drafter = DraftedEngine(schedule.running + 1), HalfRight()
    server = Server(engine, requests, child, schedule, drafter)
    events = []
    server.run(events.append)
    for i, request in enumerate(requests):
        assert request.tokens == list(range(i + 1, i + 1 + tokens))
        assert len(request.logits) == tokens
    plain = list(range(1, 1 + tokens))
    assert child.tokens[: schedule.fork_at] == [*plain[: schedule.fork_at - 1], 50]
    assert child.tokens[schedule.fork_at :] == plain[schedule.fork_at :]
    assert not engine.live
    assert (server.forks, server.preemptions) == (1, tokens > 1)
    assert len(drafter.forgotten) == len(set(drafter.forgotten)) == engine.made
    if tokens == 16:
        speculation = server.speculation
        assert 0 < speculation.accepted < speculation.drafts
        assert sum(engine.batches) < (count + 1) * tokens
