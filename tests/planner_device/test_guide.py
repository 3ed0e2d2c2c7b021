"""The guide's example prints what the guide says."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs/guides/device-planner.md").read_text()


def test_the_example_prints_what_it_says(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(compile(example, "docs/guides/device-planner.md", "exec"), {})
    said = re.search(r"prints `(.*?)`", GUIDE)
    assert said is not None
    assert capsys.readouterr().out.strip() == said[1]
