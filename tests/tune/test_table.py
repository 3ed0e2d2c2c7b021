"""Measured choices merged into a table's file, and read back as the kernels read it."""

from __future__ import annotations

import json

import pytest

from replayinfer import InputError
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.table import read_table
from replayinfer.tune.run import Measured, TuneReport
from replayinfer.tune.table import merge_table, read_content, render, write_content

FOLD, FUSED = "fold mamba2:8x64x128/8 fp32", "fused mamba2:8x64x128/8 fp32"
DIRECT = "direct mamba2:8x64x128/8 fp32"
A, B, C = (LaunchConfig(num_warps=8, rows=n) for n in (16, 32, 64))


def report(*measured, date="today", device="NVIDIA Some", **direct) -> TuneReport:
    return TuneReport(
        "replayinfer tune --batch 1", device, "2.13", "3.6", "0.1", date,
        [Measured(*m) for m in measured], direct,
    )  # fmt: skip


def test_a_new_table_says_where_it_comes_from(tmp_path):
    content = merge_table(None, report((FOLD, 8, A), (FUSED, 8, None), **{DIRECT: 2}))
    assert content["device"] == "NVIDIA Some"
    assert content["runs"] == [
        {
            "date": "today", "command": "replayinfer tune --batch 1", "replayinfer": "0.1",
            "torch": "2.13", "triton": "3.6",
        }
    ]  # fmt: skip
    write_content(tmp_path / "deep" / "t.json", content)
    read = read_table(tmp_path / "deep" / "t.json")
    assert read.choices == {FOLD: [(8, A)], FUSED: [(8, None)]}
    assert read.direct_up_to == {DIRECT: 2}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.json"]


def test_only_what_was_measured_again_is_replaced():
    first = merge_table(
        None, report((FOLD, 8, A), (FOLD, 128, A), (FUSED, 8, None), **{DIRECT: 4, "direct x": 1})
    )
    first["measured"] = "a line of somebody's own"
    before = json.dumps(first)
    second = merge_table(
        first, report((FOLD, 32, B), (FOLD, 8, C), (FUSED, 1, A), date="later", **{DIRECT: 0})
    )
    assert json.dumps(first) == before
    a, b, c = ({"num_warps": 8, "rows": n} for n in (16, 32, 64))
    assert second["choices"] == {FOLD: [[8, c], [32, b], [128, a]], FUSED: [[1, a], [8, None]]}
    assert second["direct_up_to"] == {DIRECT: 0, "direct x": 1}
    assert [run["date"] for run in second["runs"]] == ["today", "later"]
    assert second["measured"] == "a line of somebody's own"


def test_equal_neighbours_stay_apart(tmp_path):
    """Or a batch between them, measured later, would decide for one that was measured before."""
    content = merge_table(None, report((FOLD, 8, A), (FOLD, 128, A)))
    content = merge_table(content, report((FOLD, 32, B)))
    assert [batch for batch, _ in content["choices"][FOLD]] == [8, 32, 128]


def test_the_text_is_a_line_a_key_and_the_same_content():
    content = merge_table(None, report((FOLD, 8, A), (FUSED, 8, None), **{DIRECT: 2}))
    text = render(content)
    assert json.loads(text) == content
    (line,) = [line for line in text.splitlines() if FOLD in line]
    assert line.strip().rstrip(",") == f'"{FOLD}": [[8, {{"num_warps": 8, "rows": 16}}]]'
    empty = {"device": "x", "runs": [], "choices": {}, "direct_up_to": {}}
    assert json.loads(render(empty)) == empty


def test_the_table_of_another_device_is_refused(tmp_path):
    content = merge_table(None, report((FOLD, 8, A)))
    write_content(tmp_path / "t.json", content)
    assert read_content(tmp_path / "t.json", "NVIDIA Some") == content
    with pytest.raises(InputError, match="out: got a table of 'NVIDIA Some'; allowed one of 'Ano"):
        read_content(tmp_path / "t.json", "Another")
    with pytest.raises(InputError, match="out: got a table of 'NVIDIA Some'; allowed one of 'Ano"):
        merge_table(content, report((FOLD, 8, B), device="Another"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "an object without choices"),
        ("{}", "an object without choices"),
        ('{"choices": []}', "no attribute 'items'"),
        ('{"choices": {"fold 8x64x128/8 fp32": [[8, {}]]}}', "the key 'fold 8x64x128/8 fp32'"),
        (f'{{"choices": {{"{FOLD}": []}}}}', "does not list integers"),
        (f'{{"choices": {{"{FOLD}": [[8, {{"rows": "2"}}]]}}}}', "does not list integers"),
        (f'{{"choices": {{"{FOLD}": [[8, {{"colour": 2}}]]}}}}', "unexpected keyword"),
        (f'{{"choices": {{"{FOLD}": [[8, {{}}], [8, {{}}]]}}}}', "batches do not rise"),
        (f'{{"choices": {{"{FOLD}": [[0, {{}}]]}}}}', "batches do not rise"),
        ('{"choices": {}, "direct_up_to": {"x": 1}}', "the key 'x'"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(text, reason, tmp_path):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"launch table: got .*some\.json") as error:
        read_content(path, "NVIDIA Some")
    assert reason in str(error.value)
    assert path.read_text() == text


def test_no_file_is_no_table(tmp_path):
    assert read_content(tmp_path / "none.json", "NVIDIA Some") is None
