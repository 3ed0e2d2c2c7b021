"""The guide's example runs as printed, and its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path

from replayinfer.integrations import flashinfer

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "flashinfer.md").read_text()


def test_the_example_runs_as_printed(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(compile(block, "flashinfer.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([12, 8, 64]) 22 22\n"


def test_every_part_is_described():
    for name in flashinfer.__all__:
        if name != "MetadataArrays":
            assert f"`{name}`" in GUIDE or f"{name}(" in GUIDE, name
