"""`ReplayEngine`: sequences of different lengths in one batch, and their whole lives."""

from __future__ import annotations

import pytest
import torch

from replayinfer import CapacityError, InputError, StaleHandleError
from replayinfer.integrations.transformers import ReplayEngine

from .helpers import LOGITS_ATOL, own_tokens

TOKENS = 20


class Run:
    """Greedy decoding of some prompts through one engine."""

    def __init__(self, engine):
        self.engine = engine
        self.tokens = {}

    def start(self, prompt):
        seq, logits = self.engine.prefill(prompt)
        self.tokens[seq] = [int(logits.argmax())]
        return seq

    def step(self, seqs=None, **options):
        seqs = list(self.tokens) if seqs is None else seqs
        logits = self.engine.step(seqs, [self.tokens[s][-1] for s in seqs], **options)
        for seq, row in zip(seqs, logits, strict=True):
            self.tokens[seq].append(int(row.argmax()))

    def finish(self, seq):
        while len(self.tokens[seq]) < TOKENS:
            self.step([seq])
        return self.tokens[seq]


def test_arrivals_and_departures(model, prompts, rng):
    engine = ReplayEngine(model, max_sequences=3, capacity=5)
    run, waiting, running, done = Run(engine), list(range(len(prompts))), {}, {}
    while waiting or running:
        if waiting and len(running) < 3:
            index = waiting.pop(0)
            running[run.start(prompts[index])] = index
        order = torch.randperm(len(running), generator=rng).tolist()
        run.step([list(running)[i] for i in order])
        for seq in [s for s in running if len(run.tokens[s]) == TOKENS]:
            engine.free([seq])
            done[running.pop(seq)] = run.tokens.pop(seq)
    for index, prompt in enumerate(prompts):
        assert done[index] == own_tokens(model, prompt, TOKENS), f"prompt {index}"
    assert not any(engine.pool.pages_in_use().values())


def test_spread_folds_early_and_changes_no_token(models, prompts):
    model = models["qwen3_next"]
    engine = ReplayEngine(model, max_sequences=3, capacity=5, policy="spread")
    run = Run(engine)
    seqs = [run.start(p) for p in prompts[:3]]
    while len(run.tokens[seqs[0]]) < TOKENS:
        run.step()
    assert engine.counters.early_folds > 0
    for seq, prompt in zip(seqs, prompts, strict=False):
        assert run.tokens[seq] == own_tokens(model, prompt, TOKENS)


@pytest.mark.parametrize("parent_first", [True, False])
def test_fork(model, prompts, parent_first):
    engine = ReplayEngine(model, max_sequences=2, capacity=6)
    run = Run(engine)
    parent = run.start(prompts[0])
    for _ in range(8):
        run.step()
    (child,) = engine.fork(parent)
    run.tokens[child] = [*run.tokens[parent][:-1], 7]  # goes another way from its next token
    if parent_first:
        assert run.finish(parent) == own_tokens(model, prompts[0], TOKENS)
        engine.free([parent])
        run.finish(child)
    else:
        while len(run.tokens[child]) < TOKENS:
            run.step()
        assert run.tokens[parent] == own_tokens(model, prompts[0], TOKENS)
    prefix = [*prompts[0], *run.tokens[child][:9]]
    assert run.tokens[child][9:] == own_tokens(model, prefix, TOKENS - 9)


def test_preempt_and_resume(model, prompts):
    engine = ReplayEngine(model, max_sequences=2, capacity=6)
    run = Run(engine)
    first, second = run.start(prompts[0]), run.start(prompts[1])
    for _ in range(9):
        run.step()
    held, taken = engine.pool.pages_in_use(), engine.tokens(first)
    parked = engine.preempt(first)
    assert parked.tokens == taken
    assert parked.nbytes > parked.states.nbytes
    assert sum(engine.pool.pages_in_use().values()) < sum(held.values())
    with pytest.raises(StaleHandleError):
        engine.step([first], [0])
    other = run.start(prompts[2])  # its slot is good for someone else meanwhile
    run.step([second, other])
    engine.free([other])
    back = engine.resume(parked)
    run.tokens[back] = run.tokens.pop(first)
    assert engine.tokens(back) == taken
    assert run.finish(back) == own_tokens(model, prompts[0], TOKENS)
    assert run.finish(second) == own_tokens(model, prompts[1], TOKENS)


def test_extend(model, prompts):
    engine = ReplayEngine(model, max_sequences=2)
    text = prompts[0]
    whole, logits = engine.prefill(text)
    parts, _ = engine.prefill(text[:20])
    engine.step([parts], [text[20]])
    engine.extend(parts, text[21:22])
    last = engine.extend(parts, text[22:])
    torch.testing.assert_close(last, logits, rtol=0, atol=LOGITS_ATOL)
    assert engine.tokens(parts) == engine.tokens(whole) == len(text)
    token = int(logits.argmax())
    both = engine.step([whole, parts], [token, token])
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=LOGITS_ATOL)


def test_force_fold_changes_nothing_but_the_count(model, prompts):
    engine = ReplayEngine(model, max_sequences=1)
    run = Run(engine)
    seq = run.start(prompts[0])
    while len(run.tokens[seq]) < TOKENS:
        run.step(force_fold=True)
    assert run.tokens[seq] == own_tokens(model, prompts[0], TOKENS)
    assert engine.counters.forced_folds == TOKENS - 2  # there was nothing to fold in the first step


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_forward_that_fails_leaves_nothing(model, prompts, where):
    engine = ReplayEngine(model, max_sequences=2)
    run = Run(engine)
    seq = run.start(prompts[0])
    run.step()
    before = engine.tokens(seq), engine.pool.pages_in_use()["sequence slots"]

    def fail(*args):
        raise RuntimeError("out of memory")

    layers = model.model.layers
    hook = layers[0 if where == "first" else -1].register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            run.step()
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.prefill(prompts[1])
    finally:
        hook.remove()
    assert (engine.tokens(seq), engine.pool.pages_in_use()["sequence slots"]) == before
    assert run.finish(seq) == own_tokens(model, prompts[0], TOKENS)


def test_a_slot_that_held_nan_is_clean_for_the_next(model, prompts):
    engine = ReplayEngine(model, max_sequences=2)
    run = Run(engine)
    poisoned = run.start(prompts[0])
    for layer in engine._table.layers:
        layer.keys[0, :, : len(prompts[0])] = float("nan")
        layer.values[0, :, : len(prompts[0])] = float("nan")
    engine.free([poisoned])
    run.tokens.clear()
    short = run.start(prompts[2])  # masked past its end, where the other one still has keys
    long = run.start(prompts[0])
    while len(run.tokens[short]) < TOKENS:
        run.step()
    assert run.tokens[short] == own_tokens(model, prompts[2], TOKENS)
    assert run.tokens[long] == own_tokens(model, prompts[0], TOKENS)


def test_exhaustion_changes_nothing(model, prompts):
    engine = ReplayEngine(model, max_sequences=1)
    seq, _ = engine.prefill(prompts[0])
    before = engine.pool.pages_in_use()
    for action in (lambda: engine.prefill(prompts[1]), lambda: engine.fork(seq)):
        with pytest.raises(CapacityError, match="sequence slots"):
            action()
    parked = engine.preempt(seq)
    seq, _ = engine.prefill(prompts[0])
    with pytest.raises(CapacityError, match="sequence slots"):
        engine.resume(parked)
    assert engine.pool.pages_in_use() == before
    engine.free([seq])
    engine.resume(parked)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "token_ids: got .* at least one"),
        ([256], r"token_ids: got 256; allowed 0\.\.255"),
        ([-1], "token_ids: got -1"),
        ([0.5], "token_ids: got torch.float32"),
        ([[1, 2]], r"token_ids: got torch.int64 \[1, 2\]"),
    ],
)
def test_bad_tokens_are_refused(models, tokens, message):
    engine = ReplayEngine(models["nemotron_h"], max_sequences=1)
    with pytest.raises(InputError, match=message):
        engine.prefill(tokens)
    assert not any(engine.pool.pages_in_use().values())


def test_bad_batches_are_refused(models, prompts):
    engine = ReplayEngine(models["nemotron_h"], max_sequences=2)
    a, _ = engine.prefill(prompts[0])
    b, _ = engine.prefill(prompts[1])
    with pytest.raises(InputError, match="tokens: got 1; allowed 2"):
        engine.step([a, b], [1])
    with pytest.raises(InputError, match="twice"):
        engine.step([a, a], [1, 1])
    engine.free([b])
    with pytest.raises(StaleHandleError):
        engine.step([a, b], [1, 1])
    with pytest.raises(StaleHandleError):
        engine.free([a, b])
    assert engine.tokens(a) == len(prompts[0])
    engine.step([a], [1])
