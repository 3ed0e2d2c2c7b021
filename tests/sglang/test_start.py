"""What the flag does before a server is up: SGLang's real parser, plugin loader and processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from . import sglang_runs as runs

FLAG = ["--linear-attn-decode-backend", "replayinfer"]
CPU = [
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
    "--load-format", "dummy", "--skip-tokenizer-init", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-cuda-graph",
]  # fmt: skip

NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]

# Flags beside ours, and how the refusal begins.
REFUSED = {
    "disaggregation": (
        ["--disaggregation-mode", "decode"],
        "got --disaggregation-mode decode; allowed no disaggregation",
    ),
    "memory-saver": (["--enable-memory-saver"], "got --enable-memory-saver; allowed no memory"),
    "pipeline": (["--pp-size", "2"], "got --pp-size 2; allowed one pipeline stage"),
    "int8": (
        ["--enable-int8-mamba-checkpoint"],
        "got --enable-int8-mamba-checkpoint; allowed no int8 checkpoint pool",
    ),
    "drafts of another kind": (
        ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "QWEN"],
        "got --speculative-algorithm STANDALONE; allowed EAGLE, EAGLE3, NEXTN, NGRAM",
    ),
    "trees": (
        ["--speculative-algorithm", "NGRAM"],
        "allowed chains of drafts",
    ),
    "windows beyond the capacity": (
        [*NGRAM, "--speculative-num-draft-tokens", "16"],
        "REPLAYINFER_SGLANG_CAPACITY: got 16; allowed at least 17 beside "
        "--speculative-num-draft-tokens 16",
    ),
    "prefill": (
        ["--linear-attn-prefill-backend", "replayinfer"],
        "--linear-attn-prefill-backend: got replayinfer; allowed for decode alone",
    ),
}


@pytest.fixture(scope="module")
def parsed(models):
    qwen = ["--model-path", models["qwen3_next"], *CPU]
    cases = {
        "served": [*qwen, *FLAG],
        "drafts": [*qwen, *FLAG, *NGRAM, "--speculative-num-draft-tokens", "4"],
        "mamba2": ["--model-path", models["nemotron_h"], *CPU, *FLAG],
        "not chosen": qwen,
        "not chosen, no recurrent layers": ["--model-path", models["llama"], *CPU],
        "no recurrent layers": ["--model-path", models["llama"], *CPU, *FLAG],
        "misspelt": [*qwen, FLAG[0], "replayinfr"],
        **{
            name: [flag.replace("QWEN", models["qwen3_next"]) for flag in (*qwen, *FLAG, *more)]
            for name, (more, _) in REFUSED.items()
        },
    }
    done = subprocess.run(
        [sys.executable, str(runs.HERE / "sglang_parse.py"), json.dumps(cases)],
        env=runs.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith(runs.MARK):
            return json.loads(line.removeprefix(runs.MARK))
    raise AssertionError(done.stdout[-2000:] + done.stderr[-2000:])


def test_the_flag_parses_and_is_published(parsed):
    said = parsed["said"]
    assert said["served"] == said["mamba2"] == said["drafts"] == "ok"
    assert said["not chosen"] == said["not chosen, no recurrent layers"] == "ok"
    assert said["misspelt"].startswith("SystemExit")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_in_one_line(parsed, name):
    said = parsed["said"][name]
    assert REFUSED[name][1] in said
    assert "\n" not in said


def test_a_model_without_recurrent_layers_is_refused(parsed):
    said = parsed["said"]["no recurrent layers"]
    assert said.startswith("UnsupportedError: model: got LlamaForCausalLM, which has no recurrent")


def test_the_plugin_costs_nothing_until_the_flag_is_given(parsed):
    allowed = {
        "replayinfer",
        "replayinfer.errors",
        "replayinfer.integrations",
        "replayinfer.integrations.sglang",
        "replayinfer.integrations.sglang.arguments",
        "replayinfer.integrations.sglang.plugin",
    }
    assert set(parsed["loaded"]) == allowed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"REPLAYINFER_SGLANG_CAPACITY": "0"}, "REPLAYINFER_SGLANG_CAPACITY: got 0; allowed 1 to"),
    ],
)
def test_the_server_does_not_start_half_way(models, more, what):
    job = {"model": models["qwen3_next"], "backend": "replayinfer", "cache": "none"}
    process = runs.start({**job, "start_only": True}, **more)
    result, said = runs.result(process)
    assert process.returncode != 0
    assert not result
    assert what in said
    assert "Load weight begin" not in said
