"""Traces from files."""

from __future__ import annotations

import pytest

from replayinfer import InputError
from replayinfer.simulate import read_trace

CSV = "arrival,prompt,output\n10.5,7,3\n10.0,5,1\n12,0,40\n"
JSONL = (
    '{"timestamp": 10.5, "input_tokens": 7, "output_tokens": 3, "id": "a"}\n\n'
    '{"timestamp": 10.0, "input_tokens": 5, "output_tokens": 1}\n'
    '{"timestamp": 12, "output_tokens": "40"}\n'
)


@pytest.mark.parametrize(("name", "text"), [("a.csv", CSV), ("a.jsonl", JSONL)])
def test_a_file_in_order_of_arrival(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    trace = read_trace(tmp_path / name)
    assert trace.arrival.tolist() == [0.0, 0.5, 2.0]
    assert trace.prompt.tolist() == [5, 7, 0]
    assert trace.output.tolist() == [1, 3, 40]
    assert len(read_trace(tmp_path / name, 2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival,prompt,output\n1,2,3\n1,2,0\n", r"^output: got '0' in line 3 of a\.csv; allowed"),
        ("arrival,prompt,output\n1,-2,3\n", "^prompt: got '-2' in line 2"),
        ("arrival,prompt,output\nsoon,2,3\n", "^arrival: got 'soon' in line 2"),
        ("arrival,prompt,output\nnan,2,3\n", "^arrival: got 'nan' in line 2"),
        ("arrival,prompt\n1,2\n", "^output: got None in line 2"),
        ("arrival,prompt,output\n", "^trace: got .* without requests"),
        ("", "^trace: got .* without requests"),
    ],
)
def test_what_is_refused(text, message, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(tmp_path / "a.csv")


def test_a_line_that_is_no_json(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"arrival": 1, "output": 2}\nnot json\n')
    with pytest.raises(InputError, match=r"^arrival: got None in line 2"):
        read_trace(tmp_path / "a.jsonl")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"^trace: got .*; allowed a CSV or JSONL file; correct"):
        read_trace(tmp_path / "none.csv")
