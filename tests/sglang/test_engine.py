"""SGLang's own engine on a CPU: the same requests, replayed and with the built-in decode.

States, activations and all arithmetic are float32, so the tokens must be equal.
"""

from __future__ import annotations

import pytest

from . import sglang_runs as runs

BOTH = (None, "replayinfer")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
# Small batches take one kernel, which does not convolve; the shim prints what the two are given.
FORCED = {"TEST_TWO_KERNELS": "1"}
MARK = "two kernels: "
NORMS = "gated norms: "


def serve(models, model: str, cache: str, *, short: bool = False, **environment: str):
    """What both backends answered, and what ours printed."""
    job = {"model": models[model], "cache": cache, "short": short}
    jobs = [{**job, "backend": backend} for backend in BOTH]
    processes = [runs.start(job, **environment) for job in jobs]
    (theirs, said), (ours, log) = (runs.result(process) for process in processes)
    assert theirs, said[-3000:]
    assert ours, log[-3000:]
    assert "replayinfer: " in log
    assert "replayinfer: " not in said
    return theirs, ours, log


def replayed(log: str) -> dict[str, int]:
    """The counters of the last line that the server logged."""
    line = [line for line in log.splitlines() if "Replay, " in line][-1]
    parts = line.partition("Replay, ")[2].split(", ")[:-1]  # the last is of another kind
    return {name: int(value) for name, _, value in (part.partition(": ") for part in parts)}


def require_equal(theirs, ours, *groups: str) -> None:
    for group in groups:
        for i, (a, b) in enumerate(zip(theirs[group], ours[group], strict=True)):
            assert a["ids"] == b["ids"], f"{group} {i}"
            assert len(a["ids"]) > 4


def require_prefixes(theirs, ours, most: int) -> None:
    """They were really taken from the cache; in ``no_buffer`` one that ends in an answer, whose
    slot was given to the tree with rows that were not folded.
    """
    cached = [answer["cached"] for answer in ours["again"]]
    assert cached == [answer["cached"] for answer in theirs["again"]]
    assert max(cached) >= most


GROUPS = ("alone", "again", "together", "late", "beside", "after")


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        ("qwen3_next", "extra_buffer"),
        pytest.param("nemotron_h", "no_buffer", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "no_buffer", marks=pytest.mark.slow),
        pytest.param("nemotron_h", "extra_buffer", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_built_in_decode(models, model, cache):
    theirs, ours, log = serve(models, model, cache)
    require_equal(theirs, ours, *GROUPS)
    require_prefixes(theirs, ours, 239 if cache == "no_buffer" else 192)
    assert [answer["reason"] for answer in ours["cancelled"]] == ["abort", "abort"]
    counts = replayed(log)
    assert counts["decode rows"] > 500
    assert counts["folds"] > counts["decode rows"] // 32
    if cache == "no_buffer":
        assert counts["folds for extend"] > 0
    else:
        assert counts["folds for tracking"] > 0


@pytest.mark.parametrize(
    "model", ["nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.slow)]
)
def test_retracted_requests_go_on(models, model):
    theirs, ours, _ = serve(models, model, "no_buffer", **RETRACT)
    assert sum(answer["retracted"] for answer in ours["together"]) > 3
    require_prefixes(theirs, ours, 239)
    require_equal(theirs, ours, *GROUPS)


def taken(log: str, mark: str = MARK) -> list[str]:
    """The kinds of convolved readouts that ran, or of norms, by the shim."""
    return [line.partition(mark)[2] for line in log.splitlines() if mark in line]


@pytest.mark.parametrize(
    ("model", "axes"),
    [("qwen3_next_pairs", 3), pytest.param("qwen3_5", 2, marks=pytest.mark.slow)],
)
def test_projections_go_to_the_kernel_before_the_readout(models, model, axes):
    theirs, ours, log = serve(models, model, "extra_buffer", short=True, **FORCED)
    assert taken(log) == [f"x of {axes} axes, with z"]
    assert taken(log, NORMS) == ["silu of 16 channels"]
    require_equal(theirs, ours, "alone", "again", "together")
    require_prefixes(theirs, ours, 192)
    counts = replayed(log)
    assert counts["folds"] > counts["decode rows"] // 32
    assert counts["folds for tracking"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "more"),
    [("extra_buffer", {}), ("no_buffer", RETRACT)],
    ids=["extra_buffer", "retracted"],
)
def test_lines_go_to_the_kernel_before_the_readout(models, cache, more):
    theirs, ours, log = serve(models, "qwen3_next", cache, **FORCED, **more)
    assert taken(log) == ["x of 2 axes, without z"]
    require_prefixes(theirs, ours, 239 if cache == "no_buffer" else 192)
    require_equal(theirs, ours, *GROUPS)
    if more:
        assert sum(answer["retracted"] for answer in ours["together"]) > 3
    else:
        assert replayed(log)["folds for tracking"] > 0


@pytest.mark.slow
def test_prefill_and_decode_in_one_batch(models):
    theirs, ours, log = serve(models, "nemotron_h", "mixed")
    require_equal(theirs, ours, *GROUPS)
    assert replayed(log)["folds for extend"] > 0


@pytest.mark.slow
def test_split_states_part_at_near_ties_only(models):
    """Readouts see states rounded to bf16, while the states that are kept stay float32.

    So answers follow the built-in's for long, and most to their end: a state that was not split or
    joined where it should be is noise from the first token on.
    """
    split = {"REPLAYINFER_SGLANG_FORMAT": "fp32_split"}
    theirs, ours, log = serve(models, "nemotron_h", "extra_buffer", **split)
    assert "slots of fp32_split states" in log
    require_prefixes(theirs, ours, 192)
    agreed = []
    for group in GROUPS:
        for a, b in zip(theirs[group], ours[group], strict=True):
            same = [p == q for p, q in zip(a["ids"], b["ids"], strict=True)]
            agreed.append([*same, False].index(False) / len(same))
    assert sum(agreed) / len(agreed) > 0.8
