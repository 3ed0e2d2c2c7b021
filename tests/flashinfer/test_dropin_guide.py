"""The guide to FlashInfer's calls: its example runs as printed, and it names all of them."""

from __future__ import annotations

import re
from pathlib import Path

from replayinfer.integrations.flashinfer import gdn, mamba

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "drop-in.md").read_text()


def test_the_example_runs_as_printed(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(compile(block, "drop-in.md", "exec"), {})
    # 20 rows take windows of 4 up to 16: 3 a step fold at 15, 4 a step at 16
    assert capsys.readouterr().out == "torch.Size([2, 4, 8, 80]) [16, 0, 9, 0]\n"


def test_every_call_is_described():
    for name in (*gdn.__all__, *mamba.__all__):
        assert f"| `{name}` |" in GUIDE
