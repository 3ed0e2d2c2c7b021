"""Who may import whom. The tables below are the rules; everything under them applies them.

An import inside a function, or under ``if TYPE_CHECKING``, counts as "in a function": it may go
where IN_FUNCTIONS says, and is bound by every other rule like an import at the top.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import replayinfer

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "replayinfer": "replayinfer",
    "kernels": "replayinfer.kernels",
    "integrations": "replayinfer.integrations",
}

# Low to high: a unit (what follows "replayinfer.") sees its own row and the rows before it.
CORE = (
    {"errors", "checks", "env", "figures", "metrics"},
    {"formats"},
    {"spec"},
    {"pools"},
    {"planner"},
    {"backends"},
    {"operands"},
    {"gating"},
    {"ops", "tensors"},
    {"wrapper", "prefill"},
    {"speculation"},
)


def core_up_to(unit: str) -> set[str]:
    top = next(i for i, row in enumerate(CORE) if unit in row)
    return set().union(*CORE[: top + 1])


EVERYTHING_CORE = set().union(*CORE)
SIDE = {
    "cost": core_up_to("spec"),
    "cache": core_up_to("pools"),
    "offload": core_up_to("pools"),
    "debug": core_up_to("planner"),
    "simulate": (core_up_to("wrapper") - {"backends"}) | {"cost"},
    "tune": core_up_to("backends") | {"cost", "testing"},
    "evaluate": EVERYTHING_CORE | {"cost", "testing"},
    # The oracle must not share code with a backend.
    "testing": core_up_to("wrapper") - {"backends"},
    # Lazy public names. What it names, importing it does not load.
    "": EVERYTHING_CORE | {"cost", "cache", "offload", "debug", "simulate", "tune", "evaluate"},
}
# These see all else, the root's public names too, and nothing else sees them.
SIDE["bench"] = SIDE["demo"] = SIDE[""] | {"", "testing"}
SIDE["cli"] = SIDE["demo"] | {"bench", "demo"}
SIDE["tune"] |= {"bench"}  # its timer, and what its steps decode
SEES = {unit: core_up_to(unit) for row in CORE for unit in row} | SIDE
SEES["wrapper"] = SEES["wrapper"] | {"cost", "debug"}  # hands the planner its threshold

# The only ways into the two folders at the root, and only inside functions.
IN_FUNCTIONS = {
    "backends.triton": {"kernels"},
    "tune": {"kernels"},
    "bench": {"integrations"},
    "demo": {"integrations"},
    "cli": {"integrations"},
}

# Beside the standard library, at the top of a module ("top") or in functions only ("function").
THIRD_PARTY = {"torch": "top", "numpy": "top"}
THIRD_PARTY_OF = {
    "kernels": {"torch": "top", "triton": "top"},
    "integrations": THIRD_PARTY
    | {"transformers": "function", "flashinfer": "function", "sglang": "function"},
    "backends.triton": THIRD_PARTY | {"triton": "function"},
    "tune": THIRD_PARTY | {"triton": "function"},
    "offload": THIRD_PARTY | {"safetensors": "function"},
    "testing": THIRD_PARTY | {"hypothesis": "function", "pytest": "function"},
    "evaluate": THIRD_PARTY | {"transformers": "function"},
    "figures": THIRD_PARTY | {"matplotlib": "function"},
}
THIRD_PARTY_OF["cli"] = THIRD_PARTY | {"typer": "top", "rich": "top", "transformers": "function"}
THIRD_PARTY_OF["demo"] = THIRD_PARTY_OF["cli"]
PEERS = ("sglang", "mamba_ssm", "fla", "flashinfer")  # timed where they are installed
THIRD_PARTY_OF["bench"] = THIRD_PARTY_OF["cli"] | dict.fromkeys(("triton", *PEERS), "function")


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # the module, dotted and absolute
    name: str  # what `from target import name` takes, or ""
    level: int  # leading dots as written
    in_function: bool


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import of a module that lives in `package`, `import_module("literal")` included."""

    def absolute(level: int, name: str | None) -> str:
        if not level:
            return name or ""
        base = package.split(".")[: len(package.split(".")) - level + 1]
        return ".".join([*base, *([name] if name else [])])

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, "", 0, inside)
        elif isinstance(node, ast.ImportFrom):
            target = absolute(node.level, node.module)
            for alias in node.names:
                yield Import(node.lineno, target, alias.name, node.level, inside)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                name = first.value.lstrip(".")
                level = len(first.value) - len(name)
                yield Import(node.lineno, absolute(level, name), "", level, inside)
        deeper = inside or is_type_checking(node)
        deeper = deeper or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, deeper)

    yield from visit(tree, False)


def module_name(path: Path, root: Path) -> str:
    folder, *rest = path.relative_to(root).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


def unit_of(module: str) -> str:
    """`replayinfer.spec.mamba2` -> `spec`; the root is the empty name; triton's backend its own."""
    parts = module.split(".")[1:]
    return "backends.triton" if parts[:2] == ["backends", "triton"] else ".".join(parts[:1])


def broken_rule(module: str, found: Import, root: Path, public: frozenset[str]) -> str | None:
    """The rule that `found`, written in `module`, breaks; None if it is allowed."""
    unit = unit_of(module)
    see = SEES.get(unit.partition(".")[0])
    top_level = found.target.partition(".")[0]
    if top_level in FOLDERS and top_level != "replayinfer":
        return f"`{top_level}` from the root is a second copy; say replayinfer.{top_level}"
    if top_level != "replayinfer":
        if top_level in sys.stdlib_module_names:
            return None
        where = THIRD_PARTY_OF.get(unit, THIRD_PARTY).get(top_level)
        if where is None:
            return f"`{unit or 'replayinfer'}` may not import `{top_level}`"
        if where == "function" and not found.in_function:
            return f"`{unit}` imports `{top_level}` in functions only"
        return None

    target, name = unit_of(found.target), found.name
    if found.target == "replayinfer" and name:  # `from replayinfer import spec`: a unit or a name?
        known = name in SEES or name in FOLDERS
        target = name if known or (root / "replayinfer" / f"{name}.py").is_file() else ""
    if unit == "kernels":
        relative = target == "kernels" and found.level
        return None if relative else "kernels import only torch, triton and, relatively, kernels"
    if unit == "integrations":
        allowed = target in ("integrations", "testing")
        allowed = allowed or (target == "" and (not name or name in public))
        allowed = allowed or (found.target == "replayinfer.backends" and name == "register")
        rule = "integrations use replayinfer.__all__, backends.register and testing"
        return None if allowed else rule
    if see is None:
        return f"unit `{unit}` has no rule: add it to tests/test_layering.py"
    if target in ("kernels", "integrations"):
        if target not in IN_FUNCTIONS.get(unit, ()):
            return f"`{unit or 'replayinfer'}` may not import `{target}`"
        return None if found.in_function else f"`{unit}` imports `{target}` in functions only"
    target = target.partition(".")[0]
    if target == unit.partition(".")[0] or target in see:
        return None
    return f"`{unit or 'replayinfer'}` may not import `{target or 'replayinfer'}`"


def violations(root: Path, public: frozenset[str]) -> list[str]:
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            module = module_name(path, root)
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            for edge in imports_of(ast.parse(path.read_text(encoding="utf-8")), package):
                if rule := broken_rule(module, edge, root, public):
                    took = f"{edge.target}:{edge.name}" if edge.name else edge.target
                    where = f"{path.relative_to(root)}:{edge.line}"
                    found.append(f"{where}: imports {took}: {rule}")
    return found


def test_no_wrong_edge():
    found = violations(ROOT, frozenset(replayinfer.__all__))
    assert not found, "\n" + "\n".join(found)


def in_function(line: str) -> str:
    return f"def f():\n    {line}\n"


SPEC = "replayinfer/spec/mamba2.py"
PLAN = "replayinfer/planner/plan.py"
TORCH = "replayinfer/backends/torch/fold.py"
TRITON = "replayinfer/backends/triton/fold.py"
DEMO = "replayinfer/demo/run.py"
KERNEL = "kernels/gdn/fold.py"
SEAM = "integrations/transformers/seam.py"

WRONG = [
    (SPEC, "from ..pools import pages", "`spec` may not import `pools`"),
    (SPEC, in_function("from ..pools import pages"), "`spec` may not import `pools`"),
    (SPEC, "import importlib\nimportlib.import_module('..pools', __package__)", "import `pools`"),
    (SPEC, "import safetensors", "may not import `safetensors`"),
    (PLAN, "from replayinfer.backends import base", "may not import `backends`"),
    (PLAN, "from replayinfer import backends", "may not import `backends`"),
    (PLAN, "import replayinfer.backends.base", "may not import `backends`"),
    (PLAN, "from .. import cost", "may not import `cost`"),
    ("replayinfer/ops.py", "from replayinfer import StatePool", "may not import `replayinfer`"),
    ("replayinfer/wrapper.py", in_function("from .cli import app"), "may not import `cli`"),
    ("replayinfer/wrapper.py", in_function("from . import kernels"), "may not import `kernels`"),
    ("replayinfer/__init__.py", in_function("from .demo import run"), "may not import `demo`"),
    ("replayinfer/testing/a.py", "from ..backends.torch import b", "may not import `backends`"),
    ("replayinfer/simulate/a.py", "from ..backends import base", "may not import `backends`"),
    ("replayinfer/surprise.py", "from . import errors", "unit `surprise` has no rule"),
    (TORCH, in_function("import triton"), "may not import `triton`"),
    (TORCH, in_function("from ... import kernels"), "may not import `kernels`"),
    (TRITON, "from ...kernels.gdn import fold", "imports `kernels` in functions only"),
    (TRITON, "import triton", "imports `triton` in functions only"),
    (DEMO, "import replayinfer.integrations.transformers", "in functions only"),
    (KERNEL, "from replayinfer.kernels.common import gates", "relatively"),
    (KERNEL, "from ...pools import pages", "kernels import only"),
    (KERNEL, "from kernels.common import gates", "second copy"),
    (KERNEL, "import numpy", "may not import `numpy`"),
    (SEAM, "from transformers import Cache", "in functions only"),
    (SEAM, "from replayinfer.pools import StatePool", "integrations use"),
    (SEAM, "from replayinfer import hidden", "integrations use"),
    (SEAM, "from replayinfer.backends import base", "integrations use"),
]

RIGHT = [
    ("replayinfer/pools/a.py", "from ..spec.base import LayerSpec\nfrom .. import errors, checks"),
    ("replayinfer/pools/a.py", "import math, torch\nimport numpy as np"),
    ("replayinfer/cli/a.py", "import typer\nfrom ..demo import run\nfrom .. import StatePool"),
    (TRITON, in_function("from ...kernels.gdn import fold")),
    (TRITON, "from .. import base\nfrom ...planner import plan"),
    (DEMO, in_function("import replayinfer.integrations.transformers")),
    (KERNEL, "import triton\nimport triton.language as tl\nfrom ..common import gates"),
    (SEAM, "from replayinfer import StatePool\nfrom . import cache"),
    (SEAM, "from replayinfer.backends import register"),
    (SEAM, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
]


def plant(root: Path, path: str, source: str) -> list[str]:
    (root / path).parent.mkdir(parents=True)
    (root / path).write_text(source)
    return violations(root, frozenset({"StatePool"}))


@pytest.mark.parametrize(("path", "source", "rule"), WRONG)
def test_a_planted_wrong_edge_is_caught(tmp_path, path, source, rule):
    (found,) = plant(tmp_path, path, source)
    assert found.startswith(f"{path}:{len(source.splitlines())}: imports ")
    assert rule in found


@pytest.mark.parametrize(("path", "source"), RIGHT)
def test_a_right_edge_passes(tmp_path, path, source):
    assert plant(tmp_path, path, source) == []
