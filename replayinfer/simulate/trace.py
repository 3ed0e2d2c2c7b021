"""When requests arrive, how long their prompts are, and how many tokens they decode."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import positive_int
from ..errors import InputError

__all__ = ["ARRIVALS", "Trace", "make_trace", "read_trace"]

ARRIVALS = ("backlogged", "bursty", "steady", "synchronized")
"""What `make_trace` makes."""

_LOADS = {"backlogged": 1.5, "bursty": 0.8, "steady": 0.8}  # of what the batch can serve
_NAMES = {
    "arrival": ("arrival", "arrival_s", "timestamp", "time"),
    "prompt": ("prompt", "prompt_tokens", "input_tokens", "input_length"),
    "output": ("output", "output_tokens", "output_length"),
}


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes
    ----------
    name : str
    arrival : float64 [requests]
        Seconds since the first.
    prompt, output : int32 [requests]
        Tokens; a request decodes at least one.
    """

    name: str
    arrival: NDArray[np.float64]
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.arrival.size)


def make_trace(
    kind: str,
    requests: int,
    *,
    batch: int,
    step_s: float,
    output_mean: int = 128,
    prompt_mean: int = 512,
    rate: float | None = None,
    seed: int = 0,
) -> Trace:
    """One of our own traces; lengths are geometric about their means.

    - ``backlogged``: bursts of a quarter of the batch at random times, 1.5 times as many requests
      as the batch can serve, after a whole batch at once, so that it stays at its cap;
    - ``bursty``: such bursts, at 0.8 of what it can serve;
    - ``steady``: one at a time, at 0.8;
    - ``synchronized``: a whole batch at once, all outputs of the same length, and the next when it
      is through: the worst that can happen to a policy.

    Parameters
    ----------
    batch : int
        The cap of the batch.
    step_s : float
        Seconds of a step at the cap. A batch serves ``batch / (output_mean x step_s)`` requests a
        second.
    rate : float, optional
        Requests a second, instead of what follows from the kind.
    """
    if kind not in ARRIVALS:
        raise InputError(f"arrivals: got {kind!r}; allowed {', '.join(ARRIVALS)}; pick one")
    count = positive_int("requests", requests)
    positive_int("output_mean", output_mean)
    positive_int("prompt_mean", prompt_mean)
    if rate is not None and not 0 < rate < math.inf:
        raise InputError(f"rate: got {rate}; allowed a number > 0; give requests per second")
    rng = np.random.default_rng(seed)
    prompt = rng.geometric(1 / prompt_mean, count).astype(np.int32)
    if kind == "synchronized":
        arrival = np.zeros(count)
        output = np.full(count, output_mean, dtype=np.int32)
        return Trace(kind, arrival, prompt, output)
    output = rng.geometric(1 / output_mean, count).astype(np.int32)
    pace = rate if rate is not None else _LOADS[kind] * batch / (output_mean * step_s)
    burst = 1 if kind == "steady" else max(batch // 4, 1)
    gaps = rng.exponential(burst / pace, -(-count // burst))
    gaps[0] = 0.0
    arrival = np.repeat(np.cumsum(gaps), burst)[:count]
    if kind == "backlogged":
        arrival[:batch] = 0.0
    return Trace(kind, arrival, prompt, output)


def read_trace(path: Path, requests: int | None = None) -> Trace:
    """A trace from a file: CSV with a header, or one JSON object a line (``.jsonl``, ``.json``).

    Parameters
    ----------
    path : Path
        Columns ``arrival`` (seconds), ``prompt`` and ``output`` (tokens); also ``timestamp``,
        ``prompt_tokens``, ``input_tokens``, ``output_tokens`` and their like. The prompt may be
        missing. Rows need not be in order.
    requests : int, optional
        Only the first of them.

    Raises
    ------
    InputError
        No such file, a column is missing, or a value is none; the message names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = _json_rows(file) if path.suffix in (".jsonl", ".json") else _csv_rows(file)
            rows = [_values(path, line, row) for line, row in lines]
    except FileNotFoundError:
        raise InputError(
            f"trace: got {str(path)!r}; allowed a CSV or JSONL file; correct the path"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"trace: got {str(path)!r}, which cannot be read ({error}); allowed a CSV or JSONL "
            "file; correct it"
        ) from error
    if not rows:
        raise InputError(f"trace: got {str(path)!r} without requests; allowed at least one; add it")
    table = np.array(rows, dtype=np.float64)
    table = table[np.argsort(table[:, 0], kind="stable")][:requests]
    return Trace(
        path.name,
        table[:, 0] - table[0, 0],
        table[:, 1].astype(np.int32),
        table[:, 2].astype(np.int32),
    )


def _csv_rows(file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file, skipinitialspace=True)
    for row in reader:
        yield reader.line_num, row


def _json_rows(file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        yield line, row if isinstance(row, dict) else {}


def _values(path: Path, line: int, row: Mapping[str, Any]) -> tuple[float, int, int]:
    found = []
    for field, default, low, high in (
        ("arrival", None, -math.inf, math.inf),
        ("prompt", 0, 0, 2**31),
        ("output", None, 1, 2**31),
    ):
        name = next((n for n in _NAMES[field] if row.get(n) not in (None, "")), None)
        value = default if name is None else row[name]
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not (low <= number < high and math.isfinite(number)):
            rule = "seconds" if field == "arrival" else f"an integer from {low}"
            raise InputError(
                f"{field}: got {value!r} in line {line} of {path.name}; allowed {rule}, under one "
                f"of {', '.join(_NAMES[field])}; correct the trace"
            )
        found.append(number)
    return found[0], int(found[1]), int(found[2])
