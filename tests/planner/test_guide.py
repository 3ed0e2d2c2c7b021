"""The planning guide's example runs, and its constants are the model's."""

import re
from pathlib import Path

from replayinfer.cost import KERNELS, STANDARD

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "planning.md").read_text()
NAMES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention"}


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    names = {}
    exec(code, names)
    assert names["planner"].policy == names["same"].policy


def test_the_constants_are_the_models():
    for family, name in NAMES.items():
        ours, theirs = KERNELS[family], STANDARD[family]
        line = next(line for line in GUIDE.splitlines() if line.startswith(f"| {name} |"))
        found = [float(cell) for cell in line.split("|")[2:-1] if cell.strip()]
        assert found == [
            ours.one_us, ours.many_us, ours.read, ours.fold, theirs.one_us, theirs.many_us,
            theirs.read,
        ]  # fmt: skip
