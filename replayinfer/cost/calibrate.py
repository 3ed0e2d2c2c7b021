"""The constants of `KERNELS` and `STANDARD` from rows of `replayinfer bench`.

``python -m replayinfer.cost.calibrate docs/benchmarks/*.json`` prints them, and how far the model
is from each row. Run it when the kernels have changed and were measured again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..formats import get_format
from ..spec import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from .bytes import SteadyState, fold_bytes, readout_bytes
from .devices import get_device
from .model import KERNELS, MANY, KernelConstants, StepCost

__all__ = ["fit_replay", "fit_standard", "load_rows", "predicted_us", "spec_of"]

_FAMILIES: dict[str, Callable[..., LayerSpec]] = {
    "mamba2": Mamba2Spec,
    "gdn": GDNSpec,
    "kda": KDASpec,
}

Row = dict[str, Any]


def load_rows(files: Iterable[Path]) -> list[Row]:
    """Rows of the state's step alone, of windows of one token, as `replayinfer bench` writes them.

    Other JSON files are passed over.
    """
    found: list[Row] = []
    for file in files:
        report = json.loads(file.read_text(encoding="utf-8"))
        rows = report.get("rows", []) if isinstance(report, dict) else []
        found += [
            row for row in rows if row.get("scope") == "ssm" and row["window"] == 1 and "H200" in
            report.get("device", "")
        ]  # fmt: skip
    return found


def spec_of(row: Row) -> LayerSpec:
    """The layer that a row timed."""
    name = "groups" if row["family"] == "mamba2" else "key_heads"
    return _FAMILIES[row["family"]](row["heads"], row["dim"], row["state"], **{name: row[name]})


def predicted_us(row: Row) -> tuple[float, float]:
    """What the model says of a row's kernel, and of a standard one."""
    cost = StepCost.of(spec_of(row), row["format"])
    return cost.steady_us(row["batch"], row["capacity"]), cost.standard_us(row["batch"])


def fit_replay(rows: Sequence[Row], fold: float) -> KernelConstants:
    """Constants of one family's replay kernels, given the share at which its folds move bytes."""
    bandwidth = get_device("h200").read_tbps * 1e6
    points = []
    for row in rows:
        if row["direct"]:
            continue
        spec, steady = spec_of(row), SteadyState.of(row["capacity"])
        read = readout_bytes(spec, row["format"], rows=steady.rows) / bandwidth
        folds = steady.folds * fold_bytes(spec, row["format"], rows=row["capacity"]) / bandwidth
        n = row["batch"]
        points.append((n, row["ours_us"] - n * folds / fold, n * read, row["ours_us"]))
    return replace(_fit(points), fold=fold)


def fit_standard(rows: Sequence[Row]) -> KernelConstants:
    """Constants of one family's standard kernels; `fold` means nothing there."""
    bandwidth = get_device("h200").read_tbps * 1e6
    points = []
    for row in rows:
        if row["baseline_us"] is None:
            continue
        element = get_format(row["format"]).standard_bytes
        state = 2 * math.prod(spec_of(row).state_shape) * element / bandwidth
        points.append((row["batch"], row["baseline_us"], row["batch"] * state, row["baseline_us"]))
    return _fit(points)


def _fit(points: Sequence[tuple[int, float, float, float]]) -> KernelConstants:
    """Latencies and share from (sequences, time without folds, time at the ceiling, whole time)."""
    large = [p for p in points if p[0] >= MANY]
    weight = np.array([1 / whole for *_, whole in large])
    terms = np.array([[1.0, ceiling] for _, _, ceiling, _ in large]) * weight[:, None]
    times = np.array([time for _, time, _, _ in large]) * weight
    (many, slope), *_ = np.linalg.lstsq(terms, times, rcond=None)
    small = [time - slope * ceiling for n, time, ceiling, _ in points if n == 1]
    one = float(np.mean(small)) if small else float(many)
    return KernelConstants(round(one, 2), round(float(many), 2), round(1 / float(slope), 3), 0.0)


def main(arguments: Sequence[str]) -> None:
    rows = load_rows(Path(a) for a in arguments)
    for family in _FAMILIES:
        mine = [row for row in rows if row["family"] == family]
        if not mine:
            continue
        print(family, "replay  ", fit_replay(mine, KERNELS[family].fold))
        print(family, "standard", fit_standard(mine))
    for row in rows:
        ours, theirs = predicted_us(row)
        print(
            f"{row['family']} {row['heads']} x {row['dim']}, batch {row['batch']}, "
            f"{row['format']}, L={row['capacity']}{', direct' if row['direct'] else ''}: "
            f"{row['ours_us']} us, the model {ours / row['ours_us'] - 1:+.1%}; standard "
            f"{row['baseline_us']} us, the model {theirs / row['baseline_us'] - 1:+.1%}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
