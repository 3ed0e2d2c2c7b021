"""Run FlashInfer's own tests of its decode calls against this library's calls of the same names.

::

    python docs/benchmarks/flashinfer_suite.py CHECKOUT [--out docs/benchmarks] [-n WORKERS]

`CHECKOUT` is a copy of FlashInfer's repository, of which only ``tests/mamba`` and ``tests/gdn`` are
read; FlashInfer itself need not be installed and is never imported. Modules of its name, with our
calls in them, are put in its place, and pytest runs its files as they are. It needs a Hopper GPU,
``einops``, and for more than one worker ``pytest-xdist``; it writes ``flashinfer-suite.json`` and
``.md``. A case that a rule below leaves out, or that skips itself, is counted with its reason.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

FILES = (
    "tests/mamba/test_selective_state_update_stp.py",
    "tests/mamba/test_selective_state_update_mtp.py",
    "tests/mamba/test_selective_state_update_varlen.py",
    "tests/mamba/test_checkpointing_ssu.py",
    "tests/gdn/test_decode_delta_rule.py",
    "tests/gdn/test_decode_pretranspose_bf16_padded_pool.py",
    "tests/gdn/test_decode_pretranspose_noncontiguous_pool.py",
)
REPORT = "FLASHINFER_SUITE_REPORT"  # where the controller keeps outcomes while it runs

# Decided before anything runs; the first that matches a case's id counts. Beside them, a case whose
# call is refused as unsupported is left out with what the refusal says.
_INTERNAL = "options of an internal kernel of theirs (accepted steps, recovery, no output)"
_COMPILER = "their compile cache, or a kernel that has no public call"
EXCLUDED = (
    (
        r"test_checkpointing_state_update|test_checkpointing_philox_rounding_unbiased",
        "their Triton reference by itself: calls nothing of ours",
    ),
    (r"test_checkpointing_ssu_rejects_large_T", "expects windows above 16 to be refused"),
    (
        r"MTPInt16\S*\[(vertical|horizontal)-",
        "expects this algorithm to refuse int16 states, which are served",
    ),
    (r"nontranspose", "states stored K first, another call (gated_delta_rule_decode)"),
    (r"recovery|per_request_k|with_accepted_steps|state_only|scatter_validation", _INTERNAL),
    (
        r"wide_vec_mtp|wy_output_only|reuses_compile|compile_cache|cache_keeps_inner|misaligned",
        _COMPILER,
    ),
    (r"test_decode_kernel_bf16_padding_indices", "expects pads to overwrite slot 0"),
    (
        r"fp16_inputs_are_converted_not_reinterpreted",
        "expects float16 inputs to be rounded to bfloat16; they are taken as they are",
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long_running: of FlashInfer's tests")
    install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in EXCLUDED:
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    from replayinfer import UnsupportedError

    if call.excinfo is not None and isinstance(call.excinfo.value, UnsupportedError):
        said = str(call.excinfo.value).partition(";")[0]
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"refused: {said}")
    return report


# What a case came to, by its id. Under pytest-xdist only the controller keeps them.
_outcomes: dict[str, tuple[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _outcomes[report.nodeid] = ("excluded", reason.removeprefix("Skipped: "))
    elif report.failed:
        _outcomes[report.nodeid] = ("failed", last_line(str(report.longrepr)))
    elif report.when == "call":
        _outcomes.setdefault(report.nodeid, ("passed", ""))
    if REPORT in os.environ and "PYTEST_XDIST_WORKER" not in os.environ and report.when != "setup":
        Path(os.environ[REPORT]).write_text(json.dumps(_outcomes))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be read fails; one that skips itself counts as a case."""
    if report.failed:
        _outcomes[report.nodeid] = ("failed", last_line(str(report.longrepr)))
    elif report.skipped and isinstance(report.longrepr, tuple):
        _outcomes[report.nodeid] = ("excluded", report.longrepr[2].removeprefix("Skipped: "))


def last_line(text: str) -> str:
    lines = [line.strip("E ").strip() for line in text.splitlines() if line.startswith("E  ")]
    return (lines or text.strip().splitlines() or [""])[0][:200]


def install() -> None:
    """Put modules of FlashInfer's name in its place."""
    from replayinfer.integrations import flashinfer as ours

    def module(name: str, **contents: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(contents, __path__=[])
        sys.modules[name] = made
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)
        return made

    def capability(device: torch.device) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def blackwell(device: torch.device | None = None) -> bool:
        return capability(device or torch.device("cuda"))[0] == 10

    module("flashinfer")
    module(
        "flashinfer.utils", get_compute_capability=capability, is_cvt_rs_supported=blackwell,
        is_sm100a_supported=blackwell,
    )  # fmt: skip
    module("flashinfer.cute_dsl")
    module("flashinfer.cute_dsl.utils", is_cute_dsl_arch_supported=lambda *capability: True)
    module("flashinfer.mamba", selective_state_update=ours.selective_state_update)
    module("flashinfer.mamba.checkpointing_ssu", checkpointing_ssu=ours.checkpointing_ssu)
    module(
        "flashinfer.gdn_decode",
        gated_delta_rule_decode_pretranspose=ours.gated_delta_rule_decode_pretranspose,
        gated_delta_rule_mtp=ours.gated_delta_rule_mtp,
        gated_delta_rule_decode=not_served,
    )
    module("flashinfer.gdn_kernels")
    module(
        "flashinfer.gdn_kernels.gdn_decode_bf16_state",
        gated_delta_rule=bf16_kernel, gated_delta_rule_mtp=bf16_kernel,
    )  # fmt: skip


def not_served(*args: Any, **options: Any) -> None:
    raise NotImplementedError("states stored K first")


def bf16_kernel(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    b: Any = None,
    initial_state_source: Any = None,
    initial_state_indices: Any = None,
    output_state_indices: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    ssm_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The call behind FlashInfer's public one for bfloat16 states, over our public one."""
    from replayinfer.integrations.flashinfer import gated_delta_rule_mtp

    y, _ = gated_delta_rule_mtp(
        q, k, v, initial_state_source, initial_state_indices, A_log, a, dt_bias, b, scale=scale,
        output=output, intermediate_states_buffer=intermediate_states_buffer,
        ssm_state_indices=ssm_state_indices, disable_state_update=disable_state_update,
        use_qk_l2norm=use_qk_l2norm_in_kernel, output_state_indices=output_state_indices,
    )  # fmt: skip
    return y


def run(checkout: Path, workers: int, extra: list[str], report: Path) -> int:
    """Outcomes go to `report` case by case, so that they are there if this is stopped."""
    spread = ["-n", str(workers)] if workers > 1 else []
    command = [
        sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
        "-p", Path(__file__).stem, "-c", os.devnull, "--rootdir", str(checkout), "--tb=short",
        *spread, *extra, *FILES,
    ]  # fmt: skip
    path = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = os.environ | {"PYTHONPATH": path, REPORT: str(report.resolve())}
    return subprocess.run(command, cwd=checkout, env=environment, check=False).returncode


def write(report: Path, out: Path, revision: str) -> dict[str, Any]:
    outcomes: dict[str, tuple[str, str]] = json.loads(report.read_text())
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter[str] = collections.Counter()
    failures = {}
    for case, (outcome, reason) in sorted(outcomes.items()):
        files[case.partition("::")[0].removeprefix("tests/")][outcome] += 1
        if outcome == "excluded":
            reasons[reason] += 1
        elif outcome == "failed":
            failures[case] = reason
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {
        "command": "python docs/benchmarks/flashinfer_suite.py CHECKOUT",
        "tests": revision,
        "device": device,
        "torch": torch.__version__,
        **{o: sum(f[o] for f in files.values()) for o in ("passed", "failed", "excluded")},
        "excluded_reasons": dict(reasons.most_common()),
        "failures": failures,
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "flashinfer-suite.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "flashinfer-suite.md").write_text(page(result))
    return result


def page(result: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | {c.get('passed', 0)} | {c.get('failed', 0)} | {c.get('excluded', 0)} |"
        for name, c in result["files"].items()
    ]
    reasons = [f"| {count} | {reason} |" for reason, count in result["excluded_reasons"].items()]
    failures = [f"- `{case}`: {reason}" for case, reason in result["failures"].items()]
    return "\n".join(
        [
            "# FlashInfer's tests, run on our calls",
            "",
            f"**{result['passed']} passed, {result['failed']} failed, {result['excluded']} "
            f"excluded**, {result['device']}, torch {result['torch']}. Their tests: "
            f"{result['tests']}. They compare with their own Triton or torch references, most of "
            "them loosely; `tests/flashinfer` holds the same calls to a float64 recurrence.",
            "",
            "```console",
            "$ python docs/benchmarks/flashinfer_suite.py CHECKOUT",
            "```",
            "",
            "| their file | passed | failed | excluded |",
            "| --- | --: | --: | --: |",
            *rows,
            "",
            *(["Excluded, by reason:", "", "| cases | reason |", "| --: | --- |", *reasons, ""]
              if reasons else []),
            *(["Failed:", "", *failures, ""] if failures else []),
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--revision", default="")
    parser.add_argument("-n", "--workers", type=int, default=1)
    options, extra = parser.parse_known_args()
    missing = [f for f in FILES if not (options.checkout / f).is_file()]
    if missing:
        parser.error(
            f"checkout: got {options.checkout} without {missing[0]}; allowed a copy of "
            "FlashInfer's repository; clone it"
        )
    if importlib.util.find_spec("einops") is None:
        parser.error("einops: got none; allowed any; FlashInfer's tests import it, install it")
    revision = options.revision or subprocess.run(
        ["git", "-C", str(options.checkout), "describe", "--tags", "--always"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    report = options.out / "outcomes.json"
    options.out.mkdir(parents=True, exist_ok=True)
    code = run(options.checkout.resolve(), options.workers, extra, report)
    if not report.exists():  # pytest has said why
        sys.exit(code or 1)
    result = write(report, options.out, revision or "unknown revision")
    report.unlink()
    print({name: result[name] for name in ("passed", "failed", "excluded")})
    sys.exit(bool(result["failed"]) or not result["passed"])


if __name__ == "__main__":
    main()
