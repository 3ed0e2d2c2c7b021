"""What a standard kernel is to the bench: a package that may be installed, and its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...spec import LayerSpec
from ..work import Work

__all__ = ["Bound", "Peer", "Variant", "last_state"]


@dataclass(frozen=True)
class Bound:
    """A kernel's calls on one `Work`.

    Attributes
    ----------
    step : function of a layer
        Enqueues the work's window of every sequence in the layer, from the states of the work, and
        returns outputs ``[batch, heads, dim]``, or ``[batch, window, heads, dim]`` for more than
        one token.
    state : function of a layer
        The states after its last token, ``[batch, heads, dim, state]``: those of the work, moved in
        place, or a tensor of the kernel's own.
    """

    step: Callable[[int], torch.Tensor]
    state: Callable[[int], torch.Tensor]


def last_state(work: Work, layer: int) -> torch.Tensor:
    """Of a kernel that moves the work's states, or with a window writes one per token."""
    return work.states[layer] if work.window == 1 else work.token_states(layer)[:, -1]


@dataclass(frozen=True)
class Variant:
    """One configuration of a peer's kernel; `name` is what a report calls it."""

    name: str
    bind: Callable[[Work], Bound]


@dataclass(frozen=True)
class Peer:
    """A package with a standard decode kernel for one family and scope.

    Attributes
    ----------
    name : str
        As in reports.
    distribution : str
        What installs it; its version goes into the report.
    refuses : function of (spec, dtype, state_dtype)
        Why the kernel does not compute such a layer, or None.
    variants : function of the spec
        Imports the package and gives the configurations worth trying, the package's own first.
    """

    name: str
    distribution: str
    refuses: Callable[[LayerSpec, torch.dtype, torch.dtype], str | None]
    variants: Callable[[LayerSpec], Iterator[Variant]]
