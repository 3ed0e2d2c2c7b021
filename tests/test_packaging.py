"""One wheel from three folders: the list in pyproject.toml, what ships, what files may say.

Run as a script (`make packages`), this file rewrites the list from the folders.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = ROOT / "pyproject.toml"
FOLDERS = {
    "replayinfer": "replayinfer",
    "kernels": "replayinfer/kernels",
    "integrations": "replayinfer/integrations",
}
# Named in pieces, so that this file may be read by its own test.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(^|[\s'\"`=(:])/(w[o]rk|r[o]ot|h[o]me|U[s]ers)/", re.M),
    "the host of a package registry": re.compile(
        r"p[y]pi\.(org|python\.org)|python[h]osted\.org|download\.p[y]torch\.org"
        r"|registry\.n[p]mjs\.(org|com)|deb\.d[e]bian\.org|proxy\.g[o]lang\.org"
    ),
}


def project() -> dict:
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def shipped_files(root: Path = ROOT) -> dict[str, Path]:
    """Path in the wheel -> file, for all that belongs in it: everything but caches and notes."""
    return {
        f"{inside}/{path.relative_to(root / folder).as_posix()}": path
        for folder, inside in FOLDERS.items()
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }


def packages_from_folders() -> list[str]:
    """Every folder that holds a Python file, under the name it is installed as."""
    python = (name for name in shipped_files() if name.endswith(".py"))
    return sorted({name.rpartition("/")[0].replace("/", ".") for name in python})


def list_as_toml() -> str:
    return "".join(["packages = [\n", *(f'    "{p}",\n' for p in packages_from_folders()), "]\n"])


def rewrite_package_list() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    new, count = re.subn(r"^packages = \[\n.*?^\]\n", list_as_toml(), text, flags=re.M | re.S)
    assert count == 1, "pyproject.toml: expected one `packages = [...]`"
    PYPROJECT.write_text(new, encoding="utf-8")


def test_package_list_is_what_the_folders_hold():
    listed = project()["tool"]["setuptools"]["packages"]
    hint = f"run `make packages`, or paste into pyproject.toml:\n{list_as_toml()}"
    assert listed == packages_from_folders(), hint


def test_every_package_has_an_init():
    inside = shipped_files()
    missing = [
        p for p in packages_from_folders() if f"{p.replace('.', '/')}/__init__.py" not in inside
    ]
    assert not missing, "add __init__.py: a folder without it is neither listed nor typed"


def test_py_typed_is_there():
    assert (ROOT / "replayinfer" / "py.typed").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build folder is left or reused; no isolation, no network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_exactly_the_folders(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set(shipped_files())
    assert inside - expected == set()
    assert expected - inside == set(), "not shipped: a package or package-data entry is missing"


def test_wheel_metadata(wheel):
    assert wheel.name == f"replayinfer-{project()['project']['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        meta = Parser().parsestr(archive.read(names["METADATA"]).decode())
        entry_points = archive.read(names["entry_points.txt"]).decode()
    assert meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.10"
    assert "LICENSE" in names
    assert "replayinfer = replayinfer.cli.app:main" in entry_points
    core = {
        r.partition(";")[0].strip() for r in meta.get_all("Requires-Dist") if "extra ==" not in r
    }
    assert {re.split(r"[<>=]", r)[0] for r in core} == {"torch", "numpy", "triton"}
    extras = {"transformers", "cli", "demo", "bench", "flashinfer", "sglang", "offload"}
    extras |= {"test", "lint", "docs", "dev"}
    assert set(meta.get_all("Provides-Extra")) == extras


def test_wheel_runs_where_it_is_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    names = "replayinfer, replayinfer.kernels, replayinfer.integrations"
    code = f"import {names}\nfor m in ({names}): print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.splitlines()), done.stdout


def test_versions_agree():
    version = project()["project"]["version"]
    assert metadata.version("replayinfer") == version
    import replayinfer

    assert replayinfer.__version__ == version


def test_a_second_copy_of_the_kernels_is_refused():
    for asked in ("from kernels import common", "import kernels; kernels.mamba2"):
        ran = subprocess.run(
            [sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True
        )
        assert ran.returncode == 1
        last = ran.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: kernels.")
        assert "allowed 'replayinfer.kernels." in last
    ran = subprocess.run(
        [sys.executable, "-c", "import kernels.mamba2"], cwd=ROOT, capture_output=True, text=True
    )
    assert "No module named 'kernels.mamba2'" in ran.stderr


def test_a_library_that_looks_for_a_package_called_kernels_is_not_broken():
    pytest.importorskip("transformers")
    look = (
        "from transformers.integrations.hub_kernels import is_kernels_available as look;"
        "assert look() is False"
    )
    subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=True)


def repository_files() -> list[Path]:
    """What git tracks or would add; without git, everything that is not hidden or built."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        skip = {"build", "dist", "site", "__pycache__"}
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file()
            and not any(p in skip or p.startswith(".") for p in path.relative_to(ROOT).parts)
        ]


def forbidden_in(text: str) -> list[tuple[int, str]]:
    return [
        (text.count("\n", 0, match.end()) + 1, what)
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(text)
    ]


def test_no_file_names_a_machine_or_a_registry():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in repository_files()
        for line, what in forbidden_in(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_forbidden_is_found():
    path, host = "/ho" + "me/someone/x.py", "https://py" + "pi.org/simple"
    assert forbidden_in(f"fine\nsee {path}\n") == [(2, "a path of one machine")]
    assert forbidden_in(f"--index-url {host}") == [(1, "the host of a package registry")]
    assert forbidden_in("a/work" + "/b and homework/") == []


if __name__ == "__main__":
    rewrite_package_list()
    print(list_as_toml(), end="")
