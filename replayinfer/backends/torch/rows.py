"""Rows in and out of pages, sums of gates over segments of rows, and sums of products.

No matrix product is used. A library chooses its order of summation by the size of the whole
product, and the bits of a sequence must not depend on who shares its batch. Here every product is
formed by itself and summed over one axis, in an order that depends on that axis alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...planner import Plan
from ...planner.trees import ancestors, convolution_sources
from ...pools import StatePool

__all__ = [
    "Rows",
    "Window",
    "apply_state",
    "compact_rows",
    "gather_rows",
    "outer_sum",
    "pairwise_sums",
    "suffix_sums",
    "weighted_sum",
]

Rows = dict[str, torch.Tensor]
"""Fields of rows or tokens by name, float32 ``[n, rows, ...]``."""


def gather_rows(pool: StatePool, layer: int, table: torch.Tensor, counts: torch.Tensor) -> Rows:
    """The first ``counts[i]`` rows of sequence ``i``, float32 ``[n, rows, ...]``, zero beyond.

    Dead rows may hold anything, so they are replaced when loaded and never multiplied away. The row
    axis always spans the whole table: a sequence's sums then have the same shape in any batch.
    """
    places = table.shape[1] * pool.sizes.page_rows
    live = torch.arange(places, device=table.device) < counts[:, None]
    pages = table.clamp_min(0)
    rows = {}
    for name, field in pool.inputs.fields.items():
        values = field[layer][pages].flatten(1, 2).float()
        keep = live.view(*live.shape, *(1,) * (values.dim() - 2))
        rows[name] = torch.where(keep, values, 0.0)
    return rows


def suffix_sums(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the rows after each row, and over all rows: ``([n, rows, ...], [n, ...])``.

    A reverse scan that is shifted, never a difference: subtracting prefix sums, or a row's own gate
    from an inclusive scan, loses every digit next to a gate of -1280.
    """
    inclusive = g.flip(1).cumsum(1).flip(1)
    after = torch.cat([inclusive[:, 1:], torch.zeros_like(g[:, :1])], dim=1)
    return after, inclusive[:, 0]


def pairwise_sums(
    g: torch.Tensor, allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over ``(s, t]`` of the rows that lead to ``t``, and over all of them.

    ``[n, t, s, ...]`` and ``[n, t, ...]`` from ``[n, rows, ...]``. `allowed` ``[n, t, s]`` says
    which rows lead to ``t`` (its ancestors and itself, in order); by default every row up to it.
    For each ``t`` it is a reverse scan over those rows, shifted by one.
    """
    rows = g.shape[1]
    if allowed is None:
        allowed = torch.ones(1, rows, rows, dtype=torch.bool, device=g.device).tril()
    masked = torch.where(allowed.view(*allowed.shape, *(1,) * (g.dim() - 2)), g[:, None], 0.0)
    inclusive = masked.flip(2).cumsum(2).flip(2)
    after = torch.cat([inclusive[:, :, 1:], torch.zeros_like(inclusive[:, :, :1])], dim=2)
    return after, inclusive[:, :, 0]


def apply_state(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``S x_t`` for every token: ``[n, t, h, d]`` from ``[n, h, d, s]`` and ``[n, t, h, s]``."""
    return torch.stack([(state * x_t[:, :, None]).sum(-1) for x_t in x.unbind(1)], dim=1)


def weighted_sum(
    weights: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """``sum_j w_tj x_j``: ``[n, t, h, d]`` from ``[n, t, j, h]`` and ``[n, j, h, d]``.

    Terms that are not `allowed` ``[n, t, j]`` are replaced, never multiplied away: a draft whose
    inputs are not finite must not reach the tokens before it.
    """
    terms = weights[..., None] * rows[:, None]
    if allowed is not None:
        terms = torch.where(allowed[..., None, None], terms, 0.0)
    return terms.sum(2)


def outer_sum(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``sum_j x_j b_j^T``: ``[n, h, d, s]`` from ``[n, j, h, d]`` and ``[n, j, h, s]``."""
    total = x[:, 0, :, :, None] * b[:, 0, :, None]
    for j in range(1, x.shape[1]):
        total += x[:, j, :, :, None] * b[:, j, :, None]
    return total


@dataclass(frozen=True)
class Window:
    """The new tokens of a step: which entries of ``[batch, window, ...]`` are real, and where
    their rows go.
    """

    batch: int
    live: torch.Tensor  # bool [batch, window]
    sequence: torch.Tensor  # [tokens]
    token: torch.Tensor  # [tokens]
    page: torch.Tensor  # [tokens]
    offset: torch.Tensor  # [tokens]
    ring: torch.Tensor  # [tokens]: places in the convolution ring
    slot: torch.Tensor  # [tokens]
    allowed: (
        torch.Tensor
    )  # bool [batch, window, window]: rows that lead to a token, itself included
    taps: torch.Tensor  # [batch, window, width]: convolution inputs, see `convolution_sources`

    @classmethod
    def of(cls, pool: StatePool, plan: Plan) -> Window:
        n, rows = plan.batch, pool.sizes.page_rows
        live = np.arange(plan.window) < plan.windows[:, None]
        sequence, token = np.nonzero(live)
        row = plan.starts[sequence] + token
        page = plan.table[sequence, row // rows]
        # A direct step writes no rows, and so has no pages for them.
        assert plan.direct or not page.size or int(page.min()) >= 0, "a window row has no page"
        place = (plan.ring_places()[sequence] + token) % pool.conv.ring
        send = pool.device_ids
        parents = plan.parents
        if parents is None:
            parents = np.broadcast_to(np.arange(plan.window, dtype=np.int32) - 1, live.shape)
        return cls(
            batch=n,
            live=torch.from_numpy(live).to(pool.device),
            sequence=send(sequence),
            token=send(token),
            page=send(page),
            offset=send(row % rows),
            ring=send(place),
            slot=send(plan.slots[sequence]),
            allowed=torch.from_numpy(ancestors(parents)).to(pool.device),
            taps=send(convolution_sources(parents, pool.conv.taps)),
        )

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A step input in float32 without pads: ``[batch, window, ...]``, dead tokens zero."""
        return self.only_live(x[: self.batch].float())

    def only_live(self, x: torch.Tensor) -> torch.Tensor:
        """Zero for dead tokens: a gate or beta of an absent input is not 0 by itself."""
        return torch.where(self.live.view(*self.live.shape, *(1,) * (x.dim() - 2)), x, 0.0)

    def put(self, out: torch.Tensor, y: torch.Tensor) -> None:
        """Write an output: zeros in pads and dead tokens."""
        keep = self.live.view(*self.live.shape, *(1,) * (y.dim() - 2))
        out[: self.batch] = torch.where(keep, y, 0.0).to(out.dtype)
        out[self.batch :] = 0

    def append(self, pool: StatePool, layer: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Write window rows ``[batch, window, ...]`` into their pages."""
        for name, values in rows.items():
            field = pool.inputs.fields[name]
            field[layer, self.page, self.offset] = values[self.sequence, self.token].to(field.dtype)


def compact_rows(pool: StatePool, plan: Plan, nodes: NDArray[np.int32] | torch.Tensor) -> None:
    """Move the rows of accepted nodes ``[batch, window]`` (-1: none) to where a chain has them.

    Rows in every field and layer, and the convolution rings. Everything is read before it is
    written. Nodes on the device are waited for.
    """
    if isinstance(nodes, torch.Tensor):
        nodes = nodes[: plan.batch].cpu().numpy()
    sequence, rank = np.nonzero(nodes >= 0)
    node = nodes[sequence, rank]
    moved = node != rank
    sequence, rank, node = sequence[moved], rank[moved], node[moved]
    if not sequence.size:
        return
    rows, send = pool.sizes.page_rows, pool.device_ids

    def place(index: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
        row = plan.starts[sequence] + index
        return send(plan.table[sequence, row // rows]), send(row % rows)

    (page, offset), (to_page, to_offset) = place(node), place(rank.astype(np.int32))
    for field in pool.inputs.fields.values():
        field[:, to_page, to_offset] = field[:, page, offset]
    slot, before, ring = send(plan.slots[sequence]), plan.ring_places()[sequence], pool.conv
    source, target = send((before + node) % ring.ring), send((before + rank) % ring.ring)
    ring.rows[:, slot, target] = ring.rows[:, slot, source]
