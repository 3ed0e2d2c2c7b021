"""Draft trees of a device plan: ancestors of their nodes, and the paths that are accepted.

A window is a tree where node ``t`` continues node ``parents[t] < t``, or the history where that is
-1. A plan holds it as masks: bit ``s`` of entry ``t`` where node ``s`` is ``t`` or leads to it.

- *masks*: a node's parent comes before it, so node by node every mask that is passed on is done.
- *paths*: the node at rank ``r`` of a path is right where its mask is the mask of the node at
  ``r - 1`` (none at rank 0) and its own bit. All ranks are looked at at once; a path ends before
  its first wrong node, and a pad or a sequence that is no longer the planned one accepts nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["accept_paths", "tree_masks"]

_ROWS = 32  # of a program


@triton.jit(
    do_not_specialize=["entries", "width"],
    do_not_specialize_on_alignment=["parent_ptr"],
)
def _tree_masks_kernel(
    ancestor_ptr, slot_ptr, window_ptr, parent_ptr,
    entries, width,
    NODES: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, BLOCK_T)[None, :]
    live = tl.load(slot_ptr + i, mask=i < entries, other=-1) >= 0
    window = tl.load(window_ptr + i, mask=live, other=0)
    inside = live[:, None] & (t < window[:, None]) & (t < width)
    parent = tl.load(parent_ptr + i[:, None] * width + t, mask=inside, other=-1)
    parent = tl.where((parent >= 0) & (parent < t), parent, -1).to(tl.int32)
    mask = tl.zeros([ROWS, BLOCK_T], tl.int32) + (1 << t)
    node = 0
    while node < width - 1:
        done = tl.sum(tl.where(t == node, mask, 0), 1)
        mask |= tl.where(parent == node, done[:, None], 0)
        node += 1
    tl.store(ancestor_ptr + i[:, None] * NODES + t, mask, mask=live[:, None] & (t < NODES))


@triton.jit(
    do_not_specialize=["entries", "bucket", "width"],
    do_not_specialize_on_alignment=["path_ptr"],
)
def _accept_paths_kernel(
    node_ptr, count_ptr, path_ptr,
    slot_ptr, window_ptr, ancestor_ptr, handle_ptr, wide_ptr,
    entries, bucket, width,
    WORDS: tl.constexpr, NODES: tl.constexpr, MOST: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, BLOCK_T)[None, :]
    slot = tl.load(slot_ptr + i, mask=i < entries, other=-1).to(tl.int64)
    planned = tl.load(handle_ptr + i, mask=i < entries, other=-1)
    live = slot >= 0
    live &= tl.load(wide_ptr + slot * (WORDS // 2), mask=live, other=-1) == planned
    window = tl.load(window_ptr + i, mask=live, other=0)[:, None]
    place = path_ptr + i[:, None] * width + rank
    given = live[:, None] & (rank < width)
    node = tl.load(place, mask=given, other=-1)
    above = tl.load(place - 1, mask=given & (rank > 0), other=-1)
    node = tl.where((node >= 0) & (node < window), node, -1).to(tl.int32)
    above = tl.where((above >= 0) & (above < window), above, -1).to(tl.int32)
    own = 1 << tl.maximum(node, 0)
    if NODES:
        masks = ancestor_ptr + i[:, None] * NODES
        mask = tl.load(masks + node, mask=node >= 0, other=0)
        before = tl.load(masks + above, mask=above >= 0, other=0)
    else:  # windows of one token
        mask = own
        before = tl.zeros_like(own)
    right = (node > above) & (mask == (before | own))
    count = tl.min(tl.where(right, BLOCK_T, rank), 1)
    count = tl.minimum(count, width)
    in_bucket = i < bucket
    tl.store(count_ptr + i, count, mask=in_bucket)
    kept = tl.where(rank < count[:, None], node, -1)
    in_nodes = in_bucket[:, None] & (rank < MOST)
    tl.store(node_ptr + i[:, None] * MOST + rank, kept, mask=in_nodes)


def tree_masks(
    ancestors: torch.Tensor, slot: torch.Tensor, window: torch.Tensor, parents: torch.Tensor
) -> None:
    """Launch over a plan's arrays ``[bucket, ...]``, from int32 or int64 `parents`.

    `parents` ``[entries, width]``: one that does not come before its node counts as -1, and what
    lies beyond a window does not matter. Pads are left as they are.
    """
    entries, width = parents.shape
    nodes = ancestors.shape[1]
    _tree_masks_kernel[(triton.cdiv(max(entries, 1), _ROWS),)](
        ancestors, slot, window, parents,
        entries, width,
        NODES=nodes, BLOCK_T=triton.next_power_of_2(nodes), ROWS=_ROWS,
        num_warps=4,
    )  # fmt: skip


def accept_paths(
    nodes: torch.Tensor,
    counts: torch.Tensor,
    paths: torch.Tensor,
    slot: torch.Tensor,
    window: torch.Tensor,
    ancestors: torch.Tensor,
    handle: torch.Tensor,
    records: torch.Tensor,
) -> None:
    """Launch over a plan's arrays, from int32 or int64 `paths` ``[entries, width]``, -1 for none.

    Writes `nodes` ``[bucket, most]``, -1 beyond each path and in pads, and `counts` ``[bucket]``.
    """
    entries, width = paths.shape
    bucket, most = nodes.shape
    _accept_paths_kernel[(triton.cdiv(bucket, _ROWS),)](
        nodes, counts, paths,
        slot, window, ancestors, handle, records.view(torch.int64),
        entries, bucket, width,
        WORDS=records.shape[1], NODES=ancestors.shape[1], MOST=most,
        BLOCK_T=triton.next_power_of_2(most), ROWS=_ROWS,
        num_warps=4,
    )  # fmt: skip
