"""One run on a CPU: fake peers, a fake clock, and the real steps, verdicts and rows."""

from __future__ import annotations

import datetime
import functools
import json
import math

import pytest
import torch

from replayinfer import GDNSpec, Mamba2Spec, UnsupportedError
from replayinfer.bench import BenchCase, peers, run, run_bench
from replayinfer.bench.report import markdown_table

from .fakes import bind, missing, peer

MAMBA2 = Mamba2Spec(heads=2, dim=4, state=8, groups=1)
GDN = GDNSpec(heads=2, dim=4, state=8, key_heads=1)
FIELDS = {
    "family", "heads", "dim", "state", "scope", "batch", "window", "format", "state_dtype",
    "capacity", "policy", "commit_rate", "ours_us", "baseline", "baseline_us", "ratio", "bytes",
    "peers",
}  # fmt: skip


class Graph:
    """Records what was captured; a replay runs it, which keeps the arms honest."""

    def __init__(self, launch):
        self.launch = launch
        launch()


@pytest.fixture
def clock(monkeypatch):
    """Microseconds of a graph by name; every timing is noted."""
    micros, looked = {"ours": 100.0}, []

    def interleaved(arms, **options):
        looked.append(list(arms))
        for graph in arms.values():
            graph.launch()
        return {name: micros[name] for name in arms}

    monkeypatch.setattr(run, "capture", Graph)
    monkeypatch.setattr(run, "interleaved", interleaved)
    monkeypatch.setattr(run, "read_ceiling_tbps", lambda device: 4.5678)
    monkeypatch.setattr(run, "_COLD_BYTES", 1)
    monkeypatch.setattr(run, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return micros, looked


def cases(spec=MAMBA2, **options):
    return [BenchCase(spec, 2, capacity=2, backend="torch", **{"layers": 4, **options})]


def install(monkeypatch, *some, spec=MAMBA2, scope="ssm"):
    monkeypatch.setitem(peers._PEERS, (spec.family, scope), some)


def test_a_row_has_every_field_and_the_document_is_json(monkeypatch, clock):
    micros, _ = clock
    install(monkeypatch, peer("good", bind))
    micros["good"] = 60.0
    report = run_bench(cases(), command="replayinfer bench --batch 2")
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    top = {"command", "commit", "device", "torch", "triton", "read_ceiling_tbps", "date", "rows"}
    assert set(document) == top | {"skipped", "versions"}
    assert document["command"] == "replayinfer bench --batch 2"
    assert datetime.datetime.fromisoformat(document["date"]).hour is not None
    assert document["read_ceiling_tbps"] == 4.568
    (row,) = document["rows"]
    assert set(row) >= FIELDS | {"groups"}
    # Ours is a cycle of two steps, theirs one step; both of four layers.
    assert row["ours_us"] == 100 / 2 / 4
    assert row["baseline_us"] == 60 / 4 == row["peers"]["good"]
    assert row["ratio"] == round(row["baseline_us"] / row["ours_us"], 3)
    assert (row["scope"], row["policy"], row["window"], row["commit_rate"]) == ("ssm", "full", 1, 1)
    assert row["layers"] == 4


@pytest.mark.parametrize(
    ("format", "standard"),
    [("fp32", "fp32"), ("fp32_split", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")],
)
def test_the_standard_kernel_keeps_the_same_precision(monkeypatch, clock, format, standard):
    seen = []

    def noting(work):
        seen.append(work.state_dtype)
        return bind(work)

    install(monkeypatch, peer("good", noting))
    clock[0]["good"] = 60.0
    (row,) = run_bench(cases(format=format), command="").rows
    assert row["state_dtype"] == standard
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[standard]
    assert set(seen) == {wanted}


def test_key_heads_of_a_delta_rule(monkeypatch, clock):
    install(monkeypatch, peer("good", bind), spec=GDN)
    clock[0]["good"] = 60.0
    (row,) = run_bench(cases(GDN), command="").rows
    assert (row["family"], row["key_heads"]) == ("gdn", 1)
    assert "groups" not in row


def test_the_fastest_in_turns_with_ours_is_the_baseline(monkeypatch, clock):
    micros, looked = clock
    install(monkeypatch, peer("a", bind, bind, bind), peer("b", bind))
    micros |= {"a": 80.0, "a (1)": 60.0, "a (2)": 90.0, "b": 70.0}
    (row,) = run_bench(cases(), command="").rows
    assert row["baseline"] == "a (1)"
    assert row["peers"] == {"a": 20.0, "a (1)": 15.0, "a (2)": 22.5, "b": 17.5}
    assert looked[:-1] == [["a"], ["a (1)"], ["a (2)"], ["b"]]
    assert set(looked[-1]) == {"ours", "a (1)", "b"}


def test_a_wrong_peer_is_neither_timed_nor_a_baseline(monkeypatch, clock):
    micros, looked = clock
    wrong = functools.partial(bind, spoil="gates")
    install(monkeypatch, peer("wrong", wrong), peer("good", bind))
    micros |= {"wrong": 1.0, "good": 60.0}
    report = run_bench(cases(), command="")
    assert report.rows[0]["baseline"] == "good"
    assert not any("wrong" in arms for arms in looked)
    assert report.skipped["wrong"].startswith("wrong: the first output is off by ")
    assert set(report.versions) == {"wrong", "good"}


def test_one_that_cannot_be_captured_is_skipped_with_the_reason(monkeypatch, clock):
    def large_only(work):
        if work.layers > 1:  # the verdict is given on one layer
            raise RuntimeError("operation not permitted when stream is capturing")
        return bind(work)

    install(monkeypatch, peer("picky", large_only))
    report = run_bench(cases(), command="")
    assert report.skipped == {
        "picky": "RuntimeError: operation not permitted when stream is capturing"
    }
    assert report.rows[0]["baseline"] == "none installed"


def test_nobody_installed(monkeypatch, clock):
    install(monkeypatch, missing("absent", ImportError("No module named 'absent'")))
    report = run_bench(cases(), command="")
    (row,) = report.rows
    assert (row["baseline"], row["baseline_us"], row["ratio"]) == ("none installed", None, None)
    assert row["ours_us"] > 0
    assert report.skipped == {"absent": "does not import: ImportError: No module named 'absent'"}
    text = markdown_table(report)
    assert "| none installed, fp32 | – | – |" in text
    assert "- absent: does not import" in text


def test_a_peer_is_verified_once_for_a_shape_and_type(monkeypatch, clock):
    calls = []

    def verify(variant, spec, **options):
        calls.append((variant.name, options["scope"], options["state_dtype"]))

    monkeypatch.setattr(run, "verify_peer", verify)
    for scope in ("ssm", "mixer"):
        install(monkeypatch, peer("good", functools.partial(bind, scope=scope)), scope=scope)
    clock[0]["good"] = 60.0
    many = [
        BenchCase(MAMBA2, batch, format, 2, backend="torch", scope=scope)
        for scope in ("ssm", "mixer")
        for format in ("fp32", "fp32_split", "bf16")
        for batch in (1, 3)
    ]
    report = run_bench(many, command="")
    f32, bf16 = torch.float32, torch.bfloat16
    assert calls == [
        ("good", "ssm", f32), ("good", "ssm", bf16), ("good", "mixer", f32), ("good", "mixer", bf16)
    ]  # fmt: skip
    assert [row["scope"] for row in report.rows] == ["ssm"] * 6 + ["mixer"] * 6
    text = markdown_table(report)
    assert text.count("| layer | batch |") == 2
    assert text.index("The state's step alone") < text.index("The convolution and the step")


def test_reasons_that_differ_between_cases_are_all_kept(monkeypatch, clock):
    def by_type(spec, dtype, state_dtype):
        return None if state_dtype is torch.float32 else f"state_dtype={state_dtype}"

    install(monkeypatch, peer("picky", functools.partial(bind, spoil="gates"), refuses=by_type))
    many = [BenchCase(MAMBA2, 2, f, 2, backend="torch") for f in ("fp32", "bf16", "fp16")]
    skipped = run_bench(many, command="").skipped
    assert skipped["picky"].startswith("wrong: ")
    assert skipped["picky, ssm, bf16, batch 2"] == "state_dtype=torch.bfloat16"
    assert skipped["picky, ssm, fp16, batch 2"] == "state_dtype=torch.float16"


def test_too_little_memory_ends_the_run(monkeypatch, clock):
    """A lost configuration might have been the best, and the ratio would flatter us."""

    def greedy(work):
        if work.layers > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return bind(work)

    install(monkeypatch, peer("greedy", greedy), peer("good", bind))
    with pytest.raises(torch.OutOfMemoryError):
        run_bench(cases(), command="")


@pytest.mark.parametrize(("layers", "walked"), [(4, 10), (11, 11), (13, 12)])
def test_layers_are_the_models_within_cache_and_memory(monkeypatch, clock, layers, walked):
    state = 2 * math.prod(MAMBA2.state_shape) * 4
    monkeypatch.setattr(run, "_COLD_BYTES", 10 * state)
    monkeypatch.setattr(run, "_MOST_BYTES", 12 * state)
    install(monkeypatch, missing("absent", ImportError("")))
    (row,) = run_bench(cases(layers=layers), command="").rows
    assert row["layers"] == walked


def test_no_gpu_no_times():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match=r"device: got no CUDA device; allowed a GPU"):
        run_bench([], command="")


def test_the_interpreter_is_not_timed_on_a_gpu_either(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match=r"TRITON_INTERPRET: got 1; allowed 0 while timing"):
        run_bench([], command="")
