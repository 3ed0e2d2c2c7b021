"""``replayinfer demo`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from replayinfer import UnsupportedError
from replayinfer.cli.app import COMMANDS, run
from replayinfer.demo.configs import MODELS

pytest.importorskip("typer")

KEYS = {
    "model", "backend", "format", "capacity", "tokens", "tokens_equal", "max_logit_diff",
    "steps", "folds", "forks", "preemptions", "state_bytes", "state_bytes_standard",
    "pages_leaked", "seconds",
}  # fmt: skip
COUNTS = KEYS - {"model", "backend", "format", "max_logit_diff", "seconds"}


@pytest.fixture(scope="module", autouse=True)
def needs_transformers():
    from replayinfer.demo.run import quiet_peer

    try:
        with quiet_peer():
            yield
    except UnsupportedError as error:
        pytest.skip(str(error))


def test_json_prints_an_object_a_model_and_nothing_else(capsys):
    assert run(["demo", "--prompts", "2", "--tokens", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["model"] for line in lines] == ["nemotron_h", "qwen3_next"]
    for line in lines:
        assert set(line) >= KEYS
        assert all(type(line[key]) is int for key in COUNTS)
        assert line["tokens_equal"] == line["tokens"] == 2 * 4 + 3
        assert line["pages_leaked"] == 0
    assert "qwen3_next: replay" in err  # progress goes elsewhere


def test_another_model_by_name(capsys):
    assert (
        run(["demo", "--model", "kimi_linear", "--prompts", "2", "--tokens", "16", "--json"]) == 0
    )
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["model"] == "kimi_linear"
    assert line["tokens_equal"] + line["ties"] == line["tokens"] == 2 * 16 + 12
    assert line["pages_leaked"] == 0


def test_speculate_says_what_was_drafted(capsys):
    arguments = ["demo", "--model", "qwen3_next", "--prompts", "2", "--tokens", "12"]
    assert run([*arguments, "--speculate", "3", "--json"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(line) >= KEYS | {"speculate", "rounds", "accepted_per_round"}
    assert line["speculate"] == 3
    assert line["tokens_equal"] == line["tokens"] == 2 * 12 + 9
    assert 0 < line["drafts_accepted"] < line["drafts"]
    assert 1 < line["accepted_per_round"] < 4


def test_a_table_for_people(capsys):
    arguments = ["demo", "--model", "qwen3_next", "--prompts", "1", "--tokens", "3"]
    assert run([*arguments, "--format", "bf16", "--capacity", "2", "--policy", "spread"]) == 0
    out, _ = capsys.readouterr()
    for word in ("tokens equal", "state traffic, replay", "bf16, 2, spread", "passed"):
        assert word in out


def test_a_failed_check_is_status_1(capsys, monkeypatch):
    monkeypatch.setattr("replayinfer.demo.run.logit_bound", lambda format, capacity: 0.0)
    arguments = ["demo", "--model", "qwen3_next", "--prompts", "1", "--tokens", "3", "--json"]
    assert run([*arguments, "--format", "fp16"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_files_as_arguments(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("Composable primitives.")
    arguments = ["demo", str(tmp_path / "a.txt"), "--model", "qwen3_next", "--prompts", "1"]
    assert run([*arguments, "--tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "command: got 'nothing'; allowed "),
        (["--nothing"], "command: got '--nothing'"),
        (["demo", "--nothing"], "No such option"),
        (["demo", "--tokens"], "requires an argument"),
        (["demo", "--tokens", "many"], "Invalid value for '--tokens'"),
        (["demo", "--tokens", "0"], "tokens: got 0"),
        (["demo", "--prompts", "-3"], "prompts: got -3"),
        (["demo", "--capacity", "0"], "capacity: got 0"),
        (["demo", "--speculate", "-1"], "speculate: got -1"),
        (["demo", "--speculate", "16"], "capacity: got 16; allowed >= max_window=17"),
        (["demo", "--model", "gpt"], "model: got 'gpt'; allowed nemotron_h, qwen3_next"),
        (["demo", "--format", "fp8"], "format: got 'fp8'"),
        (["demo", "--backend", "nobody"], "backend: got 'nobody'"),
        (["demo", "--device", "warp"], "device: got 'warp'"),
        (["demo", "--policy", "never"], "policy: got 'never'"),
        (["demo", "no/such/file"], "file: got 'no/such/file'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("replayinfer: ")
    assert message in last
    assert "Traceback" not in err


def test_missing_transformers_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(["demo", "--tokens", "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("pip install 'replayinfer[transformers]'")


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_a_missing_command_line_extra_is_named(capsys, monkeypatch, name):
    for module in [m for m in sys.modules if m.startswith("replayinfer.cli.demo")]:
        monkeypatch.delitem(sys.modules, module)
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "replayinfer.demo.report", raising=False)
    assert run(["demo", "--tokens", "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"replayinfer: {name}: got no installation; pip install 'replayinfer[cli]'"


def test_help_imports_no_command():
    code = (
        "import sys\n"
        "from replayinfer.cli.app import run\n"
        "assert run([]) == run(['--help']) == run(['--version']) == 0\n"
        "assert not {'typer', 'rich', 'transformers'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(name in out.stdout for name in COMMANDS)


def test_a_commands_help(capsys):
    assert run(["demo", "--help"]) == 0
    out = capsys.readouterr().out
    names = ("model", "format", "capacity", "prompts", "tokens", "backend", "device", "json")
    assert all(f"--{name}" in out for name in names)
    assert all(name in " ".join(out.split()) for name in MODELS)


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("replayinfer.demo.run.load_prompts", interrupted)
    assert run(["demo", "--tokens", "2"]) == 130
    assert "Traceback" not in capsys.readouterr().err
