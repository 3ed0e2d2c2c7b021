"""Draft trees: who descends from whom, and which path of a tree was accepted.

A window of T nodes is a tree when a plan is given ``parents``: node ``t`` continues node
``parents[t] < t``, or the committed history where that is -1. A chain is ``-1, 0, 1, ...``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError

__all__ = [
    "ancestor_masks",
    "ancestors",
    "check_parents",
    "check_paths",
    "convolution_sources",
    "mask_columns",
    "pad_paths",
    "parent_array",
    "parents_of",
]

_BITS = 31  # of an int32 that are not its sign


def check_parents(parents: ArrayLike, windows: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """Validate ``[batch, width]`` parents; entries beyond a window become -1.

    Raises
    ------
    InputError
        A shape or dtype that does not fit, or a parent that does not come before its node.
    """
    given = parent_array(parents, (windows.size, width))
    node = np.arange(width)
    live = node < windows[:, None]
    bad = live & ((given < -1) | (given >= node))
    if bad.any():
        i, t = (int(x[0]) for x in np.nonzero(bad))
        raise InputError(
            f"parents: got {int(given[i, t])} for node {t} of sequence {i}; allowed -1..{t - 1}; "
            "number the nodes so that parents come first"
        )
    return np.where(live, given, -1).astype(np.int32)


def parent_array(parents: ArrayLike, shape: tuple[int, int]) -> NDArray[np.integer[Any]]:
    """Parents of whatever value, or an `InputError` where their shape or dtype does not fit."""
    given = _array(parents)
    if given.dtype.kind not in "iu" or given.shape != shape:
        raise InputError(
            f"parents: got {given.dtype} {list(given.shape)}; allowed integers {list(shape)}; "
            "give the parent of every node, -1 for one that continues the history"
        )
    return given


def ancestors(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """``[batch, t, s]``: whether ``s`` is ``t`` or one of its ancestors."""
    n, width = parents.shape
    reach = np.zeros((n, width, width), dtype=bool)
    row = np.arange(n)
    for t in range(width):  # over nodes, not over sequences
        parent = parents[:, t]
        reach[:, t] = reach[row, parent] & (parent >= 0)[:, None]
        reach[:, t, t] = True
    return reach


def mask_columns(window: int) -> int:
    """Columns of `ancestor_masks` for windows of up to so many tokens."""
    return window if 1 < window <= _BITS else 0


def ancestor_masks(parents: NDArray[np.int32] | None, columns: int) -> NDArray[np.int32]:
    """`ancestors` as bits, int32 ``[batch, columns]``, for kernels; a chain's row for None.

    Bit ``s`` of entry ``t``: node ``s`` is ``t``, or leads to it. Beyond the width of `parents` an
    entry has its own bit alone.
    """
    own = np.int32(1) << np.arange(columns, dtype=np.int32)
    if parents is None:
        return np.cumsum(own, dtype=np.int32)
    masks = np.tile(own, (len(parents), 1))
    row = np.arange(len(parents))
    for t in range(min(columns, parents.shape[1])):  # over nodes, not over sequences
        parent = parents[:, t]
        masks[:, t] |= np.where(parent >= 0, masks[row, parent], 0)
    return masks


def parents_of(masks: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """The parents ``[batch, width]`` behind `ancestor_masks` ``[batch, columns]``."""
    columns = masks.shape[1]
    parents = np.full((len(masks), width), -1, dtype=np.int32)
    above = masks & ~(np.int32(1) << np.arange(columns, dtype=np.int32))
    newest = np.frexp(above.astype(np.float64))[1] - 1  # the highest bit; -1 of none
    parents[:, :columns] = newest[:, :width]
    return parents


def convolution_sources(parents: NDArray[np.int32], taps: int) -> NDArray[np.int64]:
    """Where the ``taps + 1`` inputs of each node's convolution lie, oldest first.

    Indices ``[batch, width, taps + 1]`` into the `taps` rows before the window followed by the
    window's nodes.
    """
    n, width = parents.shape
    sources = np.empty((n, width, taps + 1), dtype=np.int64)
    row = np.arange(n)
    # Walk up from every node. Above the root the walk goes on through the history, newest first.
    place = np.broadcast_to(np.arange(width) + taps, (n, width)).astype(np.int64)
    for back in range(taps, -1, -1):
        sources[:, :, back] = place
        node = place - taps
        up = parents[row[:, None], np.maximum(node, 0)]
        place = np.where(node >= 0, np.where(up >= 0, up + taps, taps - 1), place - 1)
    return sources


def check_paths(
    paths: Sequence[ArrayLike] | NDArray[np.integer],
    parents: NDArray[np.int32],
    windows: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Validate accepted node paths, one a sequence; -1 entries end a path.

    Returns
    -------
    counts : int32 [batch]
        Nodes accepted.
    nodes : int32 [batch, width]
        The paths, padded with -1.

    Raises
    ------
    InputError
        A path that does not start at the history, skips a parent, or leaves the window.
    """
    n, width = parents.shape
    nodes = np.full((n, width), -1, dtype=np.int32)
    counts = np.zeros(n, dtype=np.int32)
    for i, steps in enumerate(_steps(paths, n)):
        above = -1
        for t in steps:
            if not 0 <= t < windows[i] or parents[i, t] != above:
                raise InputError(
                    f"paths: got node {t} after node {above} for sequence {i}; allowed a child of "
                    f"{above} among nodes 0..{int(windows[i]) - 1}; pass the accepted nodes from "
                    "the root down"
                )
            above = t
        nodes[i, : len(steps)] = steps
        counts[i] = len(steps)
    return counts, nodes


def pad_paths(
    paths: Sequence[ArrayLike] | NDArray[np.integer], n: int, width: int
) -> NDArray[np.int32]:
    """Paths ``[n, width]`` of trees that are not known here, padded with -1.

    Raises
    ------
    InputError
        What cannot be a path of any tree of so many nodes.
    """
    nodes = np.full((n, width), -1, dtype=np.int32)
    for i, steps in enumerate(_steps(paths, n)):
        above = -1
        for t in steps:
            if not above < t < width:
                raise InputError(
                    f"paths: got node {t} after node {above} for entry {i}; allowed a child of "
                    f"{above} among nodes 0..{width - 1}; pass the accepted nodes from the root "
                    "down"
                )
            above = t
        nodes[i, : len(steps)] = steps
    return nodes


def _steps(paths: Sequence[ArrayLike] | NDArray[np.integer], n: int) -> Iterator[list[int]]:
    """The nodes of every path, without the -1 that end it."""
    if len(paths) != n:
        raise InputError(
            f"paths: got {len(paths)} paths; allowed {n}; give one path per sequence, [] for none"
        )
    for i, path in enumerate(paths):
        given = _array(path)
        if given.size and (given.ndim != 1 or given.dtype.kind not in "iu"):
            raise InputError(
                f"paths: got {given.dtype} {list(given.shape)} for sequence {i}; allowed a flat "
                "list of node indices; pass the accepted nodes from the root down"
            )
        steps = [int(t) for t in given] if given.size else []
        while steps and steps[-1] == -1:
            steps.pop()
        yield steps


def _array(values: ArrayLike) -> NDArray[Any]:
    """As numpy reads it; lists of several lengths become an array of objects, which is refused."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.asarray(values, dtype=object)
