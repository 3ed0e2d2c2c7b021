"""Random draft trees, their paths, and their root-to-leaf chains."""

from __future__ import annotations

import numpy as np

from ..pools.kit import random_int


def random_tree(nodes: int, rng) -> list[int]:
    """Parents of `nodes` nodes; several may continue the history."""
    return [random_int(rng, -1, t - 1) for t in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root down to `node`; none for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def leaves(parents: list[int]) -> list[int]:
    return [t for t in range(len(parents)) if t not in parents]


def matrix(trees: list[list[int]], width: int | None = None) -> np.ndarray:
    """What a plan takes: a row a tree; beyond a window anything may stand."""
    width = max(map(len, trees)) if width is None else width
    full = np.full((len(trees), max(width, 1)), 99)
    for row, parents in enumerate(trees):
        full[row, : len(parents)] = parents
    return full
