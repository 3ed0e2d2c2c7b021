"""Prompts of real text, a token per byte: files the user names, or text that ships with Python."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence
from pathlib import Path

from replayinfer import InputError

__all__ = ["load_prompts"]

_SHORTEST, _SPREAD = 24, 73


def load_prompts(count: int, files: Sequence[str | Path] = ()) -> list[list[int]]:
    """`count` prompts of differing lengths, 24 to 96 bytes where the text is that long.

    Parameters
    ----------
    count : int
    files : sequence of path
        Read as bytes, in turn; without any, the topics of Python's own help.

    Raises
    ------
    InputError
        A file that cannot be read, or is empty.
    """
    texts = [_read(Path(f)) for f in files] or _python_text()
    prompts = []
    for i in range(count):
        text = texts[i % len(texts)]
        # Steps that are coprime to the ranges: neighbours differ in length, and a text that is used
        # again starts elsewhere.
        length = min(_SHORTEST + i * 31 % _SPREAD, len(text))
        start = i // len(texts) * 101 % (len(text) - length + 1)
        prompts.append(list(text[start : start + length]))
    return prompts


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"file: got {str(path)!r}; allowed a readable file ({error.strerror or error}); "
            "name another"
        ) from None
    if not text:
        raise InputError(f"file: got {str(path)!r}; allowed at least one byte; it is empty")
    return text


def _python_text() -> list[bytes]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):  # some distributions split it off
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            zen = importlib.import_module("this")
        return ["".join(zen.d.get(c, c) for c in zen.s).encode()]
    # A topic starts with an underlined heading; the prose after it is what a prompt looks like.
    bodies = (topics[name].partition("\n\n")[2].strip().encode() for name in sorted(topics))
    return [body for body in bodies if len(body) >= _SHORTEST + _SPREAD]
