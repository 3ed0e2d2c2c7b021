"""Drafts of an NGRAM corpus, verified by replay, in SGLang's own engine on a CPU.

The corpus is SGLang's, with answers in it that are wrong here and there, so that windows are
accepted in part. Whatever is drafted, the tokens must be those of a server without drafts.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from . import sglang_runs as runs
from .test_engine import replayed, require_equal
from .test_start import CPU, FLAG

WINDOW = 4
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": WINDOW,
    "speculative_ngram_max_bfs_breadth": 1,
}


def drafted(models, model: str, cache: str, more: dict, folder: Path, **environment: str):
    """What a server without drafts answered, and one with; and what the latter printed.

    Both start at once. The second waits for the answers of the first, which it drafts.
    """
    job = {"model": models[model], "cache": cache, "short": True}
    corpus = folder / "corpus.json"
    drafting = runs.start(
        {**job, "backend": "replayinfer", "more": more}, TEST_CORPUS=str(corpus), **environment
    )
    try:
        plain, said = runs.result(runs.start({**job, "backend": None}))
        assert plain, said[-3000:]
        (folder / "new").write_text(runs.seen(plain, random.randrange(2**32)))
        (folder / "new").rename(corpus)
        ours, log = runs.result(drafting)
    finally:
        drafting.kill()
    assert ours, log[-3000:]
    require_equal(plain, ours, "alone", "again", "together")
    return ours, log


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ("qwen3_next", "extra_buffer"),
        pytest.param("nemotron_h", "extra_buffer", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "no_buffer", marks=pytest.mark.slow),
        pytest.param("nemotron_h", "none", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_drafts(models, model, cache, tmp_path):
    ours, log = drafted(models, model, cache, NGRAM, tmp_path)
    assert f"verify of {WINDOW} tokens" in log
    counts = replayed(log)
    assert counts["decode rows"] == 0
    # In part: more than the one token that each step takes, and less than all.
    assert 1.2 < counts["accepted rows"] / counts["verified windows"] < WINDOW
    if cache == "extra_buffer":  # a state within a window, which a request then went on from
        assert counts["folds for tracking"] > 0
        assert ours["again"][0]["cached"] == 256


@pytest.mark.slow
def test_tokens_of_a_draft_model(models, tmp_path):
    """Qwen3-Next's own MTP head, whose worker makes attention backends and batches of its own."""
    more = {
        "speculative_algorithm": "NEXTN",
        "speculative_draft_model_path": models["qwen3_next"],
        "speculative_num_draft_tokens": 2,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
    }
    _, log = drafted(models, "qwen3_next", "extra_buffer", more, tmp_path)
    assert "type=Qwen3NextForCausalLMMTP" in log
    counts = replayed(log)
    assert 1.2 < counts["accepted rows"] / counts["verified windows"] < 2
    assert counts["folds for tracking"] > 0


@pytest.mark.slow
def test_retracted_requests_go_on(models, tmp_path):
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
    ours, _ = drafted(models, "nemotron_h", "no_buffer", NGRAM, tmp_path, **retract)
    assert sum(answer["retracted"] for answer in ours["together"]) > 0


def script(name: str, *arguments: str) -> dict:
    """What a script of this folder found, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(runs.HERE / name), *arguments],
        env=runs.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(runs.MARK)]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(lines[0].removeprefix(runs.MARK))


def test_windows_through_the_backend_of_kda():
    said = script("sglang_kda.py")
    # fp32 against float64; the windows of the convolutions are copies.
    assert said["outputs"] < 2e-5, said
    assert said["states"] < 2e-5, said
    assert said["convolutions"] < 1e-6, said
    assert said["counts"]["folds for tracking"] == 2


def test_memory_of_drafts_is_what_is_charged(models):
    """In SGLang's own sizing and pool: no states of drafts, and the same convolution windows."""
    flags = [
        "--model-path", models["qwen3_next"], *CPU, *FLAG, "--speculative-algorithm", "NGRAM",
        "--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", str(WINDOW),
        "--max-running-requests", "16",
    ]  # fmt: skip
    said = script("sglang_memory.py", json.dumps(flags))
    ours, theirs = said["ours"], said["theirs"]
    assert ours["held"] == ours["charged"]
    assert ours["drafts"] == 0 < theirs["drafts"]
    assert ours["windows"] == theirs["windows"]
    assert ours["requests"] == theirs["requests"] == 16
    assert ours["slots"] > theirs["slots"]
