"""Plots that commands write: two panels beside each other, as a PNG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UnsupportedError

__all__ = ["two_panels"]


@contextmanager
def two_panels(path: Path) -> Iterator[tuple[Any, Any]]:
    """The axes of both panels; what is drawn on them is written to `path` at the end.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed (extra ``bench``).
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise UnsupportedError(
            "matplotlib: got no installation; allowed any; pip install 'replayinfer[bench]'"
        ) from None
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    try:
        yield tuple(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)
