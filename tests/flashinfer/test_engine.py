"""The engine of docs/examples: as a command, and with drafts that are right more often."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayinfer import Draft

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "hybrid_engine.py"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the layers are small
    yield
    torch.set_num_threads(before)


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("hybrid_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_engine"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@functools.cache
def model():
    return example().build_model("cpu", seed=1)


@functools.cache
def expected():
    """Requests of three lengths, and what transformers makes of them."""
    served = example().requests(4, 15, seed=1)
    return [example().reference(model(), request) for request in served]


def serve(**options):
    served = example().requests(4, 15, seed=1)
    # Triton's interpreter would do, and take its time; it has its own tests.
    engine = example().HybridEngine(model(), recurrence="torch", **options)
    engine.serve(served)
    assert engine.kv.pages_in_use() == 0
    assert not any(engine.pool.pages_in_use().values())
    return engine, [request.output for request in served]


def test_the_command_prints_one_object_and_all_tokens_are_equal(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--device", "cpu", "--json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == result["tokens_equal"] == 104
    assert (result["attention"], result["pages_leaked"]) == ("torch", 0)
    assert result["steps"]["folds"] > 0
    assert result["engine"]["draft_steps"] > 0
    assert result["engine"]["steps_of_4"] > 0


class Oracle:
    """Knows the answers, and gets every fourth token of them wrong."""

    def __init__(self):
        texts = zip(example().requests(4, 15, seed=1), expected(), strict=True)
        self.texts = [[*request.prompt, *answer] for request, answer in texts]

    def __call__(self, contexts):
        drafts = {}
        for sequence, text in contexts.items():
            known = next(t for t in self.texts if t[: len(text)] == list(text))
            places = range(len(text), min(len(text) + 4, len(known)))
            drafts[sequence] = Draft(tuple(known[p] ^ (p % 4 == 3) for p in places))
        return drafts


@pytest.mark.parametrize(("up_to", "chunk"), [(4, 7), (2, 64)])
def test_drafts_change_the_pace_and_not_the_tokens(up_to, chunk):
    options = {"window": 5, "speculate_up_to": up_to, "chunk": chunk}
    engine, output = serve(drafter=Oracle(), **options)
    assert output == expected()
    counts = engine.session.counters
    assert 0 < counts.accepted < counts.drafts
    assert engine.replay.counters.rows_rejected > 0
    plain, same = serve(window=1)
    assert same == output
    assert plain.counters["draft_steps"] == 0
    assert plain.counters["decode_steps"] > engine.counters["decode_steps"]


def test_the_tokens_depend_on_both_halves(monkeypatch):
    """Without the keys of decode steps, or the rows of one layer, other tokens come out."""
    from replayinfer import ReplayDecodeWrapper
    from replayinfer.integrations.flashinfer import KVPagePool

    with monkeypatch.context() as patch:
        append = KVPagePool.append
        patch.setattr(
            KVPagePool, "append",
            lambda kv, i, k, v, meta: append(kv, i, k if meta.packed else 0 * k, v, meta),
        )  # fmt: skip
        assert serve()[1] != expected()
    run = ReplayDecodeWrapper.run
    monkeypatch.setattr(
        ReplayDecodeWrapper, "run",
        lambda self, i, **x: run(self, i, **(x | {"B": 0 * x["B"]} if i == 2 else x)),
    )  # fmt: skip
    assert serve()[1] != expected()


def test_a_failing_step_leaves_nothing_behind(monkeypatch):
    """The round can be run again, and the tokens are the same."""
    fails = iter([False, True, True, False])

    real = example().HybridEngine.forward

    def forward(self, ids, meta, recurrent, attention):
        y = real(self, ids, meta, recurrent, attention)
        if not meta.packed and next(fails, False):
            raise RuntimeError("out of memory")
        return y

    monkeypatch.setattr(example().HybridEngine, "forward", forward)
    step = example().SpeculativeSession.step

    def again(session, *args, **kwargs):
        try:
            return step(session, *args, **kwargs)
        except RuntimeError:
            return again(session, *args, **kwargs)

    monkeypatch.setattr(example().SpeculativeSession, "step", again)
    engine, output = serve()
    assert output == expected()
    assert engine.replay.counters.aborted == 2


def test_a_request_that_cannot_fit_is_refused():
    engine = example().HybridEngine(model(), max_tokens=20)
    with pytest.raises(ValueError, match="got 24 tokens, a window included; allowed 20"):
        engine.serve([example().Request([1, 2], 18)])
    assert torch.is_grad_enabled()
