"""The main job, small: passes when right, fails when the state is wrong or a page leaks."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError, StatePool, UnsupportedError
from replayinfer.demo.configs import DEFAULT_MODELS, MODELS
from replayinfer.demo.reference import FP32_BOUND, logit_bound
from replayinfer.demo.run import DemoOptions, run_model
from replayinfer.formats import FORMATS
from replayinfer.integrations.transformers import ReplayEngine

SMALL = {"prompts": 3, "tokens": 18, "capacity": 5}
NAMES = DEFAULT_MODELS
OTHERS = [name for name in MODELS if name not in NAMES]


@pytest.fixture(autouse=True)
def needs_transformers(build):
    pass


def run(name, progress=lambda *report: None, **options):
    return run_model(name, DemoOptions(**{**SMALL, **options}), progress)


@pytest.mark.parametrize("name", NAMES)
def test_fp32_gives_every_token(name):
    threads, phases = torch.get_num_threads(), []
    result = run(name, lambda *report: phases.append(report))
    assert result.ok
    assert result.check == "tokens"
    assert result.tokens == 3 * 18 + (18 - 18 // 4)  # and what the child decodes itself
    assert result.tokens_equal + result.ties == result.tokens
    assert result.max_logit_diff <= result.logit_bound == FP32_BOUND
    assert (result.forks, result.preemptions, result.pages_leaked) == (1, 1, 0)
    assert result.steps >= 17
    assert result.folds >= 3 * 3
    assert 0 < result.pages_peak <= result.pages
    assert torch.get_num_threads() == threads
    for phase in ("generate", "replay"):
        done = [report for report in phases if report[0] == phase]
        assert done[-1][1] == done[-1][2]


@pytest.mark.parametrize("name", OTHERS)
def test_every_model_gives_its_own_tokens(name):
    result = run(name)
    assert result.ok
    assert (result.model, result.check) == (name, "tokens")
    assert result.tokens == 3 * 18 + (18 - 18 // 4)
    assert result.tokens_equal + result.ties == result.tokens
    assert (result.forks, result.preemptions, result.pages_leaked) == (1, 1, 0)
    assert result.folds >= 3 * 3


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_rounded_formats_stay_within_their_bound(name, format):
    result = run(name, format=format)
    assert result.ok
    assert result.check == "logits"
    assert (
        1e-4 < result.max_logit_diff <= result.logit_bound == logit_bound(format, SMALL["capacity"])
    )
    assert result.tokens_equal > 0.9 * result.tokens


def test_replay_moves_fewer_bytes():
    standard = run("nemotron_h", capacity=16)
    split = run("nemotron_h", capacity=16, format="fp32_split")
    assert standard.state_bytes < 0.75 * standard.state_bytes_standard
    assert split.state_bytes < 0.5 * split.state_bytes_standard
    assert split.state_bytes_standard == standard.state_bytes_standard


@pytest.mark.parametrize("tokens", [1, 2])
def test_very_few_tokens(tokens):
    result = run("qwen3_next", prompts=1, tokens=tokens)
    assert result.ok
    assert result.tokens == 2 * tokens - 1


def test_policy_and_capacity_change_folds_only():
    spread = run("qwen3_next", policy="spread", capacity=3)
    assert spread.ok
    assert spread.early_folds > 0
    assert run("qwen3_next", capacity=1).ok


def test_files_are_the_prompts(tmp_path):
    (tmp_path / "text").write_text("We hold these truths to be self-evident")
    assert run("qwen3_next", files=(tmp_path / "text",), tokens=3).ok


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_state_fails(monkeypatch, name):
    store = StatePool.seed

    def off(pool, sequence, states, **options):
        rng = torch.Generator().manual_seed(0)
        noise = {k: s * (1 + 0.01 * torch.randn(s.shape, generator=rng)) for k, s in states.items()}
        store(pool, sequence, noise, **options)

    monkeypatch.setattr(StatePool, "seed", off)
    result = run(name)
    assert not result.ok
    assert result.max_logit_diff > 50 * FP32_BOUND


def test_a_leaked_page_fails(monkeypatch):
    free = ReplayEngine.free

    def forget_one(engine, sequences):
        if engine.pool.pages_in_use()["sequence slots"] > 1:
            free(engine, sequences)

    monkeypatch.setattr(ReplayEngine, "free", forget_one)
    result = run("qwen3_next", prompts=1, tokens=4)
    assert result.pages_leaked > 0
    assert not result.ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int8"}, "format: got 'int8'"),
        ({"capacity": 0}, "capacity: got 0"),
        ({"prompts": 0}, "prompts: got 0"),
        ({"tokens": -1}, "tokens: got -1"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message):
    with pytest.raises((InputError, UnsupportedError), match=message):
        DemoOptions(**options)


def test_a_backend_that_does_not_exist_is_refused_before_the_reference():
    def no_progress(*report):
        raise AssertionError("nothing should have been generated")

    with pytest.raises(UnsupportedError, match="backend: got 'nobody'"):
        run("qwen3_next", no_progress, backend="nobody")
