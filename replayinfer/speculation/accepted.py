"""Which nodes of a window are kept: pure functions over tokens, choices and distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import InputError
from ..planner.trees import check_parents

__all__ = ["accepted_path", "accepted_paths", "accepted_prefix", "sampled_path"]


def accepted_prefix(
    tokens: torch.Tensor, choices: torch.Tensor, windows: torch.Tensor | None = None
) -> torch.Tensor:
    """How many tokens of each chain are kept, on the tensors' device and without a sync.

    Parameters
    ----------
    tokens : integer tensor, [..., window]
        The newest token, then the drafts.
    choices : integer tensor, [..., window]
        What the model takes after each of them.
    windows : integer tensor, [...], optional
        Tokens of each chain that count; 0 for none. All if omitted.

    Returns
    -------
    int64 tensor, [...]
        The newest token and the drafts up to the first that the model would not have taken; 0 only
        for an empty window. The model's next token is ``choices[..., count - 1]``.

    Examples
    --------
    >>> import torch
    >>> accepted_prefix(torch.tensor([7, 1, 2, 9]), torch.tensor([1, 2, 3, 4])).item()
    3
    """
    if tokens.shape != choices.shape or tokens.dim() < 1:
        raise InputError(
            f"choices: got {list(choices.shape)} for tokens {list(tokens.shape)}; allowed equal "
            "shapes [..., window]; give the model's token after each token of the window"
        )
    right = tokens[..., 1:] == choices[..., :-1]
    count = 1 + right.long().cumprod(-1).sum(-1)
    return count if windows is None else torch.minimum(count, windows.long())


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]
) -> list[int]:
    """The nodes of a draft tree that greedy decoding takes, from the root down.

    Parameters
    ----------
    tokens : ints
        Node 0 is the newest token, the others are drafts.
    parents : ints
        Of every node, as `ReplayDecodeWrapper.plan` takes them: -1 for node 0 alone.
    choices : ints
        What the model takes after each node.

    Returns
    -------
    list of int
        At least node 0; what `commit` takes as a path. The model's next token is
        ``choices[path[-1]]``.

    Examples
    --------
    >>> accepted_path([7, 1, 5, 2], [-1, 0, 0, 2], [5, 0, 2, 8])
    [0, 2, 3]
    """
    children = _children(tokens, parents)
    if len(choices) != len(tokens):
        raise InputError(
            f"choices: got {len(choices)} for {len(tokens)} nodes; allowed one per node; give the "
            "model's token after each"
        )
    path = [0]
    while True:
        wanted = choices[path[-1]]
        found = next((n for n in children[path[-1]] if tokens[n] == wanted), None)
        if found is None:
            return path
        path.append(found)


def accepted_paths(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    choices: torch.Tensor,
    windows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`accepted_path` of many trees at once, on the tensors' device and without a sync.

    Parameters
    ----------
    tokens : integer tensor, [..., window]
        Node 0 is the newest token, the others are drafts.
    parents : int32 or int64 tensor, [..., window]
        Of every node one before it: -1 for node 0. A draft with any other value is in no path.
    choices : integer tensor, [..., window]
        What the model takes after each node.
    windows : integer tensor, [...], optional
        Nodes of each tree that count; 0 for none. All if omitted.

    Returns
    -------
    int32 tensor, [..., window]
        The nodes that are kept, from the root down, then -1: what `commit` takes as paths.

    Examples
    --------
    >>> import torch
    >>> tree = torch.tensor([[7, 1, 5, 2], [-1, 0, 0, 2], [5, 0, 2, 8]])
    >>> accepted_paths(*tree).tolist()
    [0, 2, 3, -1]
    """
    if not tokens.shape == parents.shape == choices.shape or tokens.dim() < 1:
        raise InputError(
            f"tokens: got {list(tokens.shape)} with parents {list(parents.shape)} and choices "
            f"{list(choices.shape)}; allowed equal shapes [..., window]; give both for every node"
        )
    window = tokens.shape[-1]
    node = torch.arange(window, device=tokens.device).expand(tokens.shape)
    above = parents.long()
    drafted = (above >= 0) & (above < node)
    above = torch.where(drafted, above, 0)
    kept = drafted & (tokens == choices.gather(-1, above))
    if windows is not None:
        kept &= node < windows[..., None]
    # Of siblings that the model would take, the first.
    same = (above[..., :, None] == above[..., None, :]) & kept[..., None, :]
    kept &= ~(same & (node[..., None, :] < node[..., :, None])).any(-1)
    kept |= node == 0
    for _ in range((window - 1).bit_length()):  # a node stays if all above it do
        kept = kept & kept.gather(-1, above)
        above = above.gather(-1, above)
    if windows is not None:
        kept &= windows[..., None] > 0
    path = (
        torch.where(kept, node, window).sort(-1).values
    )  # parents come first, so this is in order
    return torch.where(path < window, path, -1).int()


def sampled_path(
    tokens: Sequence[int],
    target: torch.Tensor,
    *,
    parents: Sequence[int] | None = None,
    draft: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[list[int], int]:
    """The nodes that speculative sampling keeps, and the token after them.

    Tokens so chosen are distributed as if each had been drawn from `target` alone: a draft ``x``
    is kept with probability ``min(1, p(x) / q(x))``; once it is refused, its siblings are tried
    against what remains of ``p``, the normalised ``max(p - q, 0)``; and where no child is left, the
    next token is drawn from what remains.

    Parameters
    ----------
    tokens : ints
        Node 0 is the newest token, the others are drafts.
    target : float tensor, [nodes, vocabulary]
        The model's distribution after each node.
    parents : ints, optional
        As in `accepted_path`; a chain if omitted.
    draft : float tensor, [nodes, vocabulary], optional
        What each draft was drawn from, given the nodes above it and its earlier siblings; row 0 is
        not read. If omitted, drafts were chosen and not drawn.
    generator : torch.Generator, optional
        On the device of `target`.

    Returns
    -------
    path : list of int
    token : int
    """
    parents = list(range(-1, len(tokens) - 1)) if parents is None else parents
    children = _children(tokens, parents)
    for name, given in (("target", target), ("draft", draft)):
        if given is not None and (given.dim() != 2 or given.shape[0] != len(tokens)):
            raise InputError(
                f"{name}: got {list(given.shape)}; allowed [nodes={len(tokens)}, vocabulary]; give "
                "a distribution for every node"
            )
    path = [0]
    while True:
        left = target[path[-1]].double()
        for node in children[path[-1]]:
            token = tokens[node]
            chance, remains = left[token], left.clone()
            if draft is None:
                remains[token] = 0
            else:
                q = draft[node].double()
                chance, remains = left[token] / q[token], (left - q).clamp_min(0)
            if torch.rand((), generator=generator, device=target.device) < chance:
                path.append(node)
                break
            # Nothing remains only where p equals q, and then the draft is refused by rounding only.
            left = remains / remains.sum() if remains.sum() > 0 else left
        else:
            return path, int(torch.multinomial(left, 1, generator=generator))


def _children(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Of every node, in order; refuses what is no tree under node 0."""
    count = len(tokens)
    if not count or len(parents) != count:
        raise InputError(
            f"parents: got {len(parents)} for {count} tokens; allowed one per token and at least "
            "one; node 0 is the newest token"
        )
    given = np.asarray(parents)[None]
    checked = check_parents(given, np.array([count], dtype=np.int32), count)[0].tolist()
    if any(parent < 0 for parent in checked[1:]):
        raise InputError(
            f"parents: got {list(parents)}; allowed -1 for node 0 alone; let every draft descend "
            "from the newest token"
        )
    children: list[list[int]] = [[] for _ in range(count)]
    for node, parent in enumerate(checked[1:], start=1):
        children[parent].append(node)
    return children
