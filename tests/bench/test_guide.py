"""The guide's example runs, and it names every field, option and peer that there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from replayinfer.bench import BenchReport, peers

from .test_report import row

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "bench.md").read_text()


def test_the_example_runs_as_printed():
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(compile(example, "docs/guides/bench.md", "exec"), {})


def test_every_field_is_explained():
    fields = {*row(), "bytes_per_sequence_and_layer"}
    fields |= {field.name for field in dataclasses.fields(BenchReport)}
    assert not [name for name in fields if f"`{name}`" not in GUIDE]


def test_every_option_is_explained(capsys):
    pytest.importorskip("typer")
    from replayinfer.cli.app import run

    run(["bench", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    assert len(options) >= 10
    assert not [option for option in options if f"`{option}`" not in GUIDE]


def test_every_peer_is_in_the_table():
    known = {
        p.distribution
        for some in (*peers._PEERS.values(), *peers._VERIFIERS.values())
        for p in some
    }
    names = {"fla-core": "flash-linear-attention"}  # the package that brings it
    assert not [n for n in known if f"| `{names.get(n, n)}` |" not in GUIDE]
