"""The plan of one step from cursors on the device, in one launch of one program.

It writes what the host's planner would: slots, pages, histories, windows, ring places and tables of
the batch in order, the fold list in the same order, and pads in all the rest of the bucket. No
cursor moves. A sequence folds where its window does not fit (``h + T > L``), where it is told to,
or early to spread the folds of later steps; it folds into the pages that it owns.

*Direct* steps move states in place, so a sequence that takes a token folds whatever rows it has,
and also where its checkpoint page is not its own: without rows that fold copies the page.

*Spread*, without a sort: with ``q = ceil(n / (L // T))`` folds a step as the fair share, this step
needs ``k = max_d (#{deadline <= d} - q d)``. Deadlines are below ``L + 1``, so counts by deadline
give the last one that is taken as a whole, and how many of the next in batch order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .record import BASE, CHECKPOINT, HISTORY, OWN_CHECKPOINT, TABLE, find

__all__ = ["plan_step"]

_MOST_ROWS = 1024  # of a tile; longer batches are walked
_MOST_VALUES = 4096  # of a tile of tables, so that none spills


@triton.jit
def _window(window_ptr, i, live, entries, uniform, most, GIVEN: tl.constexpr):
    """New tokens of the entries, 0..most; 0 for pads."""
    if GIVEN:
        given = tl.load(window_ptr + i, mask=i < entries, other=0)
        window = tl.minimum(tl.maximum(given, 0), most).to(tl.int32)
    else:
        window = tl.zeros_like(i) + uniform
    return tl.where(live, window, 0)


@triton.jit
def _deadline(history, window, must, capacity):
    """Steps until a sequence must fold, if all of its rows are accepted; 0..capacity."""
    left = tl.maximum((capacity - history) // tl.maximum(window, 1), 0)
    return tl.where(must, 0, left)


@triton.jit
def _early_folds(
    sequence_ptr, window_ptr, record_ptr, wide_ptr,
    entries, slots, uniform, most, capacity, budget,
    WINDOWS: tl.constexpr, BUDGET: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Sequences due before `limit` fold, and of those due then the first `quota` of the batch."""
    bins = tl.arange(0, BINS)
    every = tl.zeros([BINS], tl.int32)
    foldable = tl.zeros([BINS], tl.int32)
    batch = 0
    overdue = 0
    longest = 1
    start = 0
    while start < entries:
        i = start + tl.arange(0, ROWS)
        live, slot, _ = find(sequence_ptr, wide_ptr, i, entries, slots, WORDS)
        history = tl.load(record_ptr + slot * WORDS + HISTORY, mask=live, other=0)
        window = _window(window_ptr, i, live, entries, uniform, most, WINDOWS)
        must = live & (history + window > capacity)
        deadline = _deadline(history, window, must, capacity)
        every += tl.histogram(deadline, BINS, mask=live)
        foldable += tl.histogram(deadline, BINS, mask=live & (history > 0))
        batch += tl.sum(live.to(tl.int32))
        overdue += tl.sum(must.to(tl.int32))
        longest = tl.maximum(longest, tl.max(window))
        start += ROWS
    cycle = tl.maximum(capacity // longest, 1)
    share = (batch + cycle - 1) // cycle
    every = tl.cumsum(every, 0)
    if BUDGET:
        share = tl.maximum(tl.maximum(share, budget), tl.max((every + bins) // (bins + 1)))
    wanted = tl.maximum(tl.max(every - share * bins), 0)
    due = tl.cumsum(foldable, 0)
    whole = due <= wanted  # a prefix of the deadlines
    limit = tl.sum(whole.to(tl.int32))
    quota = wanted - tl.max(tl.where(whole, due, 0))
    late = wanted > overdue
    return tl.where(late, limit, 0), tl.where(late, quota, 0)


@triton.jit(
    do_not_specialize=[
        "entries", "bucket", "slots", "uniform", "most", "capacity", "ring", "budget",
    ],
    do_not_specialize_on_alignment=["sequence_ptr", "window_ptr", "force_ptr"],
)  # fmt: skip
def _plan_step_kernel(
    slot_ptr, page_ptr, history_ptr, new_ptr, place_ptr, table_ptr,
    count_ptr, source_ptr, target_ptr, rows_ptr, old_table_ptr, ancestor_ptr, handle_ptr,
    sequence_ptr, window_ptr, force_ptr, record_ptr, wide_ptr,
    entries, bucket, slots, uniform, most, capacity, ring, budget,
    WINDOWS: tl.constexpr, FORCE: tl.constexpr,
    SPREAD: tl.constexpr, BUDGET: tl.constexpr, DIRECT: tl.constexpr,
    WORDS: tl.constexpr, PAGES: tl.constexpr, BLOCK_P: tl.constexpr,
    NODES: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    limit = 0
    quota = 0
    if SPREAD:
        limit, quota = _early_folds(
            sequence_ptr, window_ptr, record_ptr, wide_ptr,
            entries, slots, uniform, most, capacity, budget, WINDOWS, BUDGET, WORDS, ROWS, BINS,
        )  # fmt: skip
    p = tl.arange(0, BLOCK_P)[None, :]
    folds = 0
    passed = 0  # foldable sequences before this tile that are due at the limit
    start = 0
    while start < bucket:
        i = start + tl.arange(0, ROWS)
        in_bucket = i < bucket
        live, slot, handle = find(sequence_ptr, wide_ptr, i, entries, slots, WORDS)
        record = record_ptr + slot * WORDS
        base = tl.load(wide_ptr + slot * (WORDS // 2) + BASE, mask=live, other=0)
        history = tl.load(record + HISTORY, mask=live, other=0)
        page = tl.load(record + CHECKPOINT, mask=live, other=-1)
        own_page = tl.load(record + OWN_CHECKPOINT, mask=live, other=-1)
        in_table = live[:, None] & (p < PAGES)
        old_table = tl.load(record[:, None] + TABLE + p, mask=in_table, other=-1)
        own_table = tl.load(record[:, None] + (TABLE + PAGES) + p, mask=in_table, other=-1)
        window = _window(window_ptr, i, live, entries, uniform, most, WINDOWS)

        chosen = history + window > capacity
        if SPREAD:
            deadline = _deadline(history, window, chosen, capacity)
            at_limit = (history > 0) & (deadline == limit)
            rank = passed + tl.cumsum(at_limit.to(tl.int32), 0) - 1
            chosen |= (deadline < limit) | (at_limit & (rank < quota))
            passed += tl.sum(at_limit.to(tl.int32))
        if FORCE:
            chosen |= tl.load(force_ptr + i, mask=i < entries, other=0) != 0
        fold = chosen & (history > 0)
        if DIRECT:  # own pages have no other holder, so the state may move in place
            fold |= ((history > 0) | (page != own_page)) & (window > 0)
        at = folds + tl.cumsum(fold.to(tl.int32), 0) - 1
        folds += tl.sum(fold.to(tl.int32))

        tl.store(handle_ptr + i, tl.where(live, handle, -1), mask=in_bucket)
        tl.store(slot_ptr + i, tl.where(live, slot, -1).to(tl.int32), mask=in_bucket)
        tl.store(page_ptr + i, tl.where(fold, own_page, page), mask=in_bucket)
        tl.store(history_ptr + i, tl.where(fold, 0, history), mask=in_bucket)
        tl.store(new_ptr + i, window, mask=in_bucket)
        tl.store(place_ptr + i, ((base + history) % ring).to(tl.int32), mask=in_bucket)
        table = tl.where(fold[:, None], own_table, old_table)
        in_rows = in_bucket[:, None] & (p < PAGES)
        tl.store(table_ptr + i[:, None] * PAGES + p, table, mask=in_rows)
        tl.store(source_ptr + at, page, mask=fold)
        tl.store(target_ptr + at, own_page, mask=fold)
        tl.store(rows_ptr + at, history, mask=fold)
        tl.store(old_table_ptr + at[:, None] * PAGES + p, old_table, mask=fold[:, None] & in_table)
        if NODES:  # a chain: every node so far leads to this one
            t = tl.arange(0, BLOCK_T)[None, :]
            chain = tl.where(live[:, None], (2 << t) - 1, 0)
            in_nodes = in_bucket[:, None] & (t < NODES)
            tl.store(ancestor_ptr + i[:, None] * NODES + t, chain, mask=in_nodes)
        start += ROWS

    tl.store(count_ptr, folds)
    start = 0
    while start < bucket:
        i = start + tl.arange(0, ROWS)
        rest = (i >= folds) & (i < bucket)
        none = tl.full([ROWS], -1, tl.int32)
        tl.store(source_ptr + i, none, mask=rest)
        tl.store(target_ptr + i, none, mask=rest)
        tl.store(rows_ptr + i, none + 1, mask=rest)
        empty = none[:, None] + tl.zeros([1, BLOCK_P], tl.int32)
        tl.store(old_table_ptr + i[:, None] * PAGES + p, empty, mask=rest[:, None] & (p < PAGES))
        start += ROWS


def plan_step(
    slot: torch.Tensor,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    place: torch.Tensor,
    table: torch.Tensor,
    fold_count: torch.Tensor,
    fold_source: torch.Tensor,
    fold_target: torch.Tensor,
    fold_rows: torch.Tensor,
    fold_table: torch.Tensor,
    ancestors: torch.Tensor,
    handle: torch.Tensor,
    sequences: torch.Tensor,
    windows: torch.Tensor | None,
    force: torch.Tensor | None,
    records: torch.Tensor,
    *,
    uniform: int,
    most: int,
    capacity: int,
    ring: int,
    spread: bool,
    budget: int = 0,
    direct: bool = False,
) -> None:
    """Launch over a plan's arrays, from `sequences` ``[entries]`` and `records` ``[slots, words]``.

    `windows` ``[entries]`` are clamped to ``0..most``; without them every window is `uniform`.
    `force` ``[entries]`` is bool or uint8. A `direct` step has windows of 0 or 1. `spread` folds
    early: for the fair share of folds a step, or for `budget` of them (at most `entries`) if not 0.
    """
    bucket, pages = table.shape
    nodes = ancestors.shape[1]
    widest = triton.next_power_of_2(max(pages, nodes))
    most_rows = min(_MOST_ROWS, max(_MOST_VALUES // widest, 32))
    rows = min(max(triton.next_power_of_2(bucket), 32), most_rows)
    _plan_step_kernel[(1,)](
        slot, page, history, window, place, table,
        fold_count, fold_source, fold_target, fold_rows, fold_table, ancestors, handle,
        sequences, sequences if windows is None else windows, sequences if force is None else force,
        records, records.view(torch.int64),
        sequences.shape[0], bucket, records.shape[0], uniform, most, capacity, ring, budget,
        WINDOWS=windows is not None, FORCE=force is not None,
        SPREAD=spread, BUDGET=budget > 0, DIRECT=direct,
        WORDS=records.shape[1], PAGES=pages, BLOCK_P=triton.next_power_of_2(pages),
        NODES=nodes, BLOCK_T=triton.next_power_of_2(max(nodes, 1)), ROWS=rows,
        BINS=max(triton.next_power_of_2(capacity + 1), 32),
        num_warps=rows // 32,
    )  # fmt: skip
