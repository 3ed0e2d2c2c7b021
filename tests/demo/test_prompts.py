"""Prompts: real text, as bytes, as many as asked for."""

from __future__ import annotations

import sys

import pytest

from replayinfer import InputError
from replayinfer.demo.prompts import load_prompts


def test_python_brings_text_of_its_own():
    prompts = load_prompts(8)
    assert len({tuple(p) for p in prompts}) == 8
    assert len({len(p) for p in prompts}) == 8
    assert all(24 <= len(p) <= 96 for p in prompts)
    text = bytes(b for p in prompts for b in p).decode()
    assert text.isprintable() or "\n" in text


def test_more_prompts_than_texts():
    prompts = load_prompts(300)
    assert len(prompts) == 300
    assert all(24 <= len(p) <= 96 for p in prompts)


def test_the_zen_stands_in_for_missing_topics(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert bytes(load_prompts(1)[0]).startswith(b"The Zen of Python")
    assert capsys.readouterr().out == ""


def test_files_take_turns(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 500)
    (tmp_path / "b").write_bytes(b"b" * 500)
    prompts = load_prompts(4, [tmp_path / "a", tmp_path / "b"])
    assert [set(p) for p in prompts] == [{97}, {98}, {97}, {98}]


def test_a_text_used_twice_starts_elsewhere(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4)
    first, second = load_prompts(2, [tmp_path / "a"])
    assert first[0] == 0
    assert second[0] == 101


@pytest.mark.parametrize("size", [1, 2, 23, 24, 25, 96, 97])
def test_short_files_are_used_whole_or_in_part(tmp_path, size):
    (tmp_path / "a").write_bytes(bytes(range(size)))
    for prompt in load_prompts(5, [tmp_path / "a"]):
        assert 1 <= len(prompt) <= size
        assert prompt == list(range(prompt[0], prompt[0] + len(prompt)))


def test_any_bytes_are_tokens(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\x00\xfe" * 40)
    assert set(load_prompts(1, [tmp_path / "a"])[0]) == {0xFF, 0x00, 0xFE}


@pytest.mark.parametrize("name", ["missing", "empty", "."])
def test_unreadable_files_are_refused(tmp_path, name):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InputError, match=r"^file: got .*; allowed .*; "):
        load_prompts(1, [tmp_path / name])
