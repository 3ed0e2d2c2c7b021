"""``replayinfer bench`` as a user calls it: its cases, its output, and no times without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from replayinfer import Mamba2Spec
from replayinfer.bench import BenchReport
from replayinfer.cli.app import run
from replayinfer.cost import best_capacity

SMALL = {
    "model_type": "falcon_h1",
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_rms_norm": False,
    "mamba_conv_bias": False,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "torch_dtype": "bfloat16",
}


def row(case):
    shared, count = case.spec.shared_heads
    return {
        "family": case.spec.family, "heads": case.spec.heads, shared: count, "dim": case.spec.dim,
        "state": case.spec.state, "scope": case.scope, "batch": case.batch, "format": case.format,
        "state_dtype": case.standard_format, "capacity": case.capacity, "direct": False,
        "window": case.window, "commit_rate": case.commit_rate,
        "ours_us": 10.0, "baseline": "sglang (tile 16, 1 warp)", "baseline_us": 30.0, "ratio": 3.0,
        "bytes": 1000, "peers": {},
    }  # fmt: skip


@pytest.fixture
def bench(capsys, monkeypatch):
    """Runs a command line with nothing measured: its cases, status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        seen = []

        def measured(cases, *, command, progress):
            report = BenchReport(
                command, "abc", "Some GPU", "2.11", "3.6", 4.57, "2026-01-01T00:00:00+00:00",
                skipped={"flashinfer": "does not import: ModuleNotFoundError"},
            )  # fmt: skip
            for case in cases:
                seen.append(case)
                report.rows.append(row(case))
                progress(case, report.rows[-1], report)
            return report

        monkeypatch.setattr("replayinfer.cli.bench.run_bench", measured)
        status = run(["bench", *arguments])
        return seen, status, *capsys.readouterr()

    return call


def test_the_default_is_nemotron_3_super(bench):
    cases, status, out, err = bench()
    assert status == 0
    assert {case.spec for case in cases} == {Mamba2Spec(heads=128, dim=64, state=128, groups=8)}
    assert {case.scope for case in cases} == {"ssm"}
    assert all(case.conv_bias and not case.gated for case in cases)
    wanted = [(f, b) for f in ("fp32_split", "fp32", "bf16") for b in (1, 8, 32, 128, 256)]
    assert [(case.format, case.batch) for case in cases] == wanted
    assert "mamba2 128 x 64 x 128, 8" in out
    assert "3.00x" in out
    assert "[15/15] ssm, batch 256, bf16, L=32: 10.0 us, 3.00x sglang (tile 16, 1 warp)" in err
    assert "not timed: flashinfer: does not import: ModuleNotFoundError" in err


def test_mixer_adds_a_table_and_its_rows(bench):
    options = ["--batch", "4", "--format", "fp32", "--capacity", "8,16"]
    cases, _, out, _ = bench(*options, "--mixer")
    wanted = [("ssm", 8), ("ssm", 16), ("mixer", 8), ("mixer", 16)]
    assert [(case.scope, case.capacity) for case in cases] == wanted
    assert out.index("The state's step alone") < out.index("The convolution and the step")

    _, _, out, _ = bench(*options, "--mixer", "--json")
    document = json.loads(out)
    assert [r["scope"] for r in document["rows"]] == ["ssm", "ssm", "mixer", "mixer"]
    assert document["skipped"] == {"flashinfer": "does not import: ModuleNotFoundError"}


def test_a_config_says_where_the_gate_and_the_bias_are(bench, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (case,), *_ = bench("--model", str(tmp_path), "--batch", "1", "--format", "fp32")
    assert case.spec.state_shape == (4, 8, 16)
    assert case.gated
    assert not case.conv_bias


@pytest.mark.parametrize(
    ("family", "text", "shape", "shared"),
    [
        ("mamba2", "96x80x128/8", (96, 80, 128), ("groups", 8)),
        ("gdn", "48x128x64/16", (48, 128, 64), ("key_heads", 16)),
        ("kda", "32x128x128/32", (32, 128, 128), ("key_heads", 32)),
    ],
)
def test_explicit_shapes(bench, family, text, shape, shared):
    arguments = ["--family", family, "--shape", text, "--batch", "3", "--format", "bf16"]
    (case,), *_ = bench(*arguments, "--direct", "never", "--backend", "triton")
    assert (case.spec.family, case.spec.state_shape) == (family, shape)
    assert case.spec.shared_heads == shared
    assert (case.batch, case.direct, case.backend) == (3, "never", "triton")


def test_files(bench, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--batch", "1,4", "--format", "fp32", "--out", str(tmp_path / "new")]
    bench(*options, "--family", "mamba2", "--shape", "4x8x16/2")
    bench(*options, "--model", "nemotron-3-super", "--name", "mine")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    stems = ("mamba2-4x8x16-2", "mine")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("json", "md", "png")}
    document = json.loads((tmp_path / "new" / "mine.json").read_text())
    assert [r["batch"] for r in document["rows"]] == [1, 4]
    assert "| 4 | fp32 |" in (tmp_path / "new" / "mine.md").read_text()


def test_windows_at_every_rate(bench):
    options = ["--batch", "8", "--format", "fp32_split"]
    cases, _, out, err = bench(*options, "--window", "1,4,8", "--commit-rate", "0.5,0.9")
    got = [(case.window, case.commit_rate) for case in cases]
    assert got == [(1, 1.0), (4, 0.5), (4, 0.9), (8, 0.5), (8, 0.9)]
    for case in cases:
        assert case.capacity == best_capacity(
            case.spec, "fp32_split", window=case.window, commit_rate=case.commit_rate
        )
    assert "L=32, T=4, r=0.5" in err
    assert "32, T=4, r=0.5" in out
    (case,), *_ = bench(*options, "--window", "4", "--capacity", "16")
    assert (case.capacity, case.commit_rate) == (16, 0.7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batch: got '0'; allowed integers >= 1"),
        (["--batch", "many"], "batch: got 'many'"),
        (["--capacity", "4,"], "capacity: got '4,'"),
        (["--format", "fp8"], "format: got 'fp8'"),
        (["--model", "qwen3-next", "--family", "mamba2"], "whose recurrent layers are gdn"),
        (["--family", "rwkv"], "family: got 'rwkv'; allowed mamba2, gdn, kda"),
        (["--shape", "4x8x16/2"], "shape: got '4x8x16/2' with family None"),
        (["--shape", "4x8x16", "--family", "gdn"], "shape: got '4x8x16' with family 'gdn'"),
        (["--shape", "4x8x16/3", "--family", "gdn"], "key_heads: got 3"),
        (["--shape", "4x8x16/2", "--family", "gdn", "--model", "x"], "and model 'x'"),
        (["--direct", "sometimes"], "direct: got 'sometimes'; allowed auto, never, always"),
        (["--window", "0"], "window: got '0'; allowed integers >= 1"),
        (["--window", "4", "--commit-rate", "1.5"], "commit_rate: got '1.5'; allowed numbers"),
        (["--window", "4", "--commit-rate", "0.5,x"], "commit_rate: got '0.5,x'"),
        (["--window", "1,4", "--mixer"], "mixer: got windows of 4; allowed 1"),
        (["--window", "4", "--direct", "always"], "direct: got 'always' for windows of 4"),
        (["--window", "4", "--capacity", "2"], "capacity: got 2 for windows of 4"),
    ],
)
def test_bad_input_is_one_line_and_status_2(bench, arguments, message):
    cases, status, out, err = bench(*arguments)
    assert (cases, status, out) == ([], 2, "")
    (line,) = err.splitlines()
    assert line.startswith("replayinfer: ")
    assert message in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_without_a_gpu_nothing_is_timed(capsys, backend, tmp_path):
    out = tmp_path / "results"
    assert run(["bench", "--batch", "1", "--backend", backend, "--out", str(out)]) == 2
    printed, err = capsys.readouterr()
    assert printed == ""
    assert err == (
        "replayinfer: device: got no CUDA device; allowed a GPU, since an interpreted kernel's "
        "time means nothing; run bench on the machine that serves\n"
    )
    assert not out.exists()


def test_policies_are_a_table_and_files(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from replayinfer.bench import policies

    seen = []

    def measure(spec, **options):
        seen.append((spec.heads, options["batch"], options["format"], options["capacity"]))
        row = policies.PolicyRow("full", "steady", 8, 16, "bf16", 1, 9, 1.0, 2.0, 3.0, 2.0, 4, 5)
        return policies.PolicyReport(options["command"], "c", "GPU", "2", "3", "today", [row])

    monkeypatch.setattr("replayinfer.cli.bench.bench_policies", measure)
    flags = ["--policies", "--batch", "8,9", "--format", "bf16,fp32", "--capacity", "16"]
    assert run(["bench", *flags, "--out", str(tmp_path), "--json"]) == 0
    assert seen == [(128, 8, "bf16", 16)]
    assert json.loads(capsys.readouterr().out)["rows"][0]["tail"] == 2.0
    assert "| steady | full | 8 | 16 | bf16 |" in (tmp_path / "policies.md").read_text()
    assert json.loads((tmp_path / "policies.json").read_text())["device"] == "GPU"
    assert (tmp_path / "policies.png").stat().st_size
