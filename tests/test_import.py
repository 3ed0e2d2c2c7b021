"""`import replayinfer` is light: no Triton, no extra, little time beyond torch's own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

# Triton and what only extras bring. `import torch` alone decides what may be there all the same.
HEAVY = (
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "typer",
    "rich",
    "matplotlib",
    "hypothesis",
    "pytest",
)
LOADED = "import sys, json; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"


def run_python(code: str, *flags: str) -> str:
    """Standard output of `code` in a fresh interpreter, away from this folder."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=sys.prefix
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_after(code: str) -> set[str]:
    return set(json.loads(run_python(f"{code}\n{LOADED}"))) & set(HEAVY)


@pytest.fixture(scope="module")
def heavy_with_torch() -> set[str]:
    return heavy_after("import torch")


def test_import_loads_nothing_heavy(heavy_with_torch):
    assert heavy_after("import torch, replayinfer") == heavy_with_torch


def test_public_names_load_nothing_heavy(heavy_with_torch):
    touch_all = "import torch, replayinfer\nfor n in replayinfer.__all__: getattr(replayinfer, n)"
    assert heavy_after(touch_all) == heavy_with_torch


def test_folders_at_the_root_load_nothing_heavy(heavy_with_torch):
    code = "import torch, replayinfer.kernels, replayinfer.integrations"
    assert heavy_after(code) == heavy_with_torch


def test_import_says_nothing():
    assert run_python("import torch\nimport replayinfer", "-W", "error::DeprecationWarning") == ""


def test_dir_lists_the_public_names():
    listed = "import replayinfer; print(set(replayinfer.__all__) <= set(dir(replayinfer)))"
    assert run_python(listed).strip() == "True"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        __import__("replayinfer").no_such_name  # noqa: B018


def test_import_costs_under_half_a_second_beyond_torch():
    # Both in one interpreter, so that torch's own time (and its noise) is not in the figure.
    code = "from time import perf_counter as now; import torch; start = now(); import replayinfer"
    seconds = [float(run_python(f"{code}; print(now() - start)")) for _ in range(3)]
    assert statistics.median(seconds) < 0.5, seconds
