"""The guide's Python runs as printed, and names options and variables that exist."""

import re
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")

from replayinfer.cli import tune as command
from replayinfer.env import launch_tables

GUIDE = (Path(__file__).parents[2] / "docs/guides/launch-tables.md").read_text()


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})


def test_options_and_variables_exist():
    options = {o.replace("-", "_") for o in re.findall(r"`--([a-z]+)", GUIDE)}
    assert options <= set(command.tune.__annotations__)
    assert "REPLAYINFER_LAUNCH_TABLES" in GUIDE
    assert "REPLAYINFER_LAUNCH_TABLES" in launch_tables.__doc__
