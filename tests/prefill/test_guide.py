"""The guide to prefill: its example runs as printed, and it names every backend."""

from __future__ import annotations

import re
from pathlib import Path

from replayinfer.backends.registry import _PREFILL

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "prefill.md").read_text()


def test_the_example_runs_as_printed(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(compile(block, "prefill.md", "exec"), {})
    assert capsys.readouterr().out == "torch 8 7\n"


def test_every_backend_is_named():
    for name in (*_PREFILL, "auto"):
        assert f'| `"{name}"` |' in GUIDE
