"""The README's example runs as printed, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_printed(tmp_path):
    example = re.search(r"## The primitives\n+```python\n(.*?)```", README, re.S)
    assert example, "README.md: no python block under 'The primitives'"
    ran = subprocess.run(
        [sys.executable, "-c", example[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "total" in ran.stdout
    assert re.search(r"tokens=60\b", ran.stdout), ran.stdout


def test_the_two_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.M)
