"""The guide's code runs as printed, its figures are those of its formula, its options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import replayinfer
from replayinfer import GDNSpec, Mamba2Spec

GUIDE = (Path(__file__).parents[2] / "docs/guides/speculation.md").read_text()


@pytest.fixture(scope="module")
def ran():
    """What the examples define; that of the adapter needs a model and is tested there."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    namespace: dict = {}
    for block in blocks:
        if "integrations.transformers" not in block:
            exec(compile(block, "docs/guides/speculation.md", "exec"), namespace)
    return namespace


def test_the_examples_run(ran):
    assert 0 < ran["counters"].accepted < ran["counters"].drafts


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("Mamba-2", Mamba2Spec(heads=128, dim=64, state=128, groups=8)),
        ("Gated DeltaNet", GDNSpec(heads=32, dim=128, state=128, key_heads=16)),
    ],
)
def test_figures_of_the_table(ran, name, spec):
    ours, theirs, ratio = re.search(
        rf"\| {name}, .*? \| (\d+) per GB \| (\d+) per GB \| \*\*(.*?)x\*\* \|", GUIDE
    ).groups()
    replay, standard = ran["per_gigabyte"](spec)
    assert (int(ours), int(theirs)) == (int(replay), int(standard))
    assert float(ratio) == round(replay / standard, 2)


def test_names_exist():
    for name in ("Draft", "Drafter", "accepted_prefix", "accepted_paths", "sampled_path"):
        assert hasattr(replayinfer, name)
    for name in ("NGramDrafter", "ReplayTarget", "SpeculativeSession", "sampled_path"):
        assert f"`{name}`" in GUIDE or f"**`{name}`**" in GUIDE
