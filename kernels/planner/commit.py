"""Cursors on the device moved by a step: once its fold is enqueued, and at commit or abort.

- *fold*: a sequence whose plan starts without rows, but which has some, folded them: its base takes
  them, and it uses the pages that the plan gave it. So does one whose page a direct step copied.
- *commit*: every history grows by its accepted count, clamped to ``0..window``.
- *direct*: the commit of a direct step. Its tokens are in the states already, so bases grow
  instead, and no rollback reaches behind them.
- *abort*: nothing is accepted; a rollback may not reach rows whose place in the convolution ring
  the dropped window may have taken.

A sequence that was freed since the plan was made, or whose slot is another's now, is left alone.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from .record import BASE, CHECKPOINT, HISTORY, TABLE, UNDO

__all__ = ["Action", "move_cursors"]

Action = Literal["fold", "commit", "abort", "direct"]

_ROWS = 128  # of a program; a row a thread, so that no row is read by one and written by another
_FOLD, _COMMIT = tl.constexpr(0), tl.constexpr(1)
_ABORT, _DIRECT = tl.constexpr(2), tl.constexpr(3)
_ACTIONS: dict[Action, int] = {"fold": 0, "commit": 1, "abort": 2, "direct": 3}


@triton.jit(
    do_not_specialize=["entries", "bucket", "max_window"],
    do_not_specialize_on_alignment=["accepted_ptr"],
)
def _move_kernel(
    count_ptr, accepted_ptr,
    slot_ptr, page_ptr, history_ptr, window_ptr, table_ptr, handle_ptr,
    record_ptr, wide_ptr,
    entries, bucket, max_window,
    ACTION: tl.constexpr, GIVEN: tl.constexpr,
    WORDS: tl.constexpr, PAGES: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_bucket = i < bucket
    slot = tl.load(slot_ptr + i, mask=in_bucket, other=-1).to(tl.int64)
    planned = tl.load(handle_ptr + i, mask=in_bucket, other=-1)
    record, wide = record_ptr + slot * WORDS, wide_ptr + slot * (WORDS // 2)
    live = slot >= 0
    live &= tl.load(wide, mask=live, other=-1) == planned
    history = tl.load(record + HISTORY, mask=live, other=0)
    if ACTION == _FOLD:
        start = tl.load(history_ptr + i, mask=live, other=0)
        page = tl.load(page_ptr + i, mask=live, other=-1)
        old_page = tl.load(record + CHECKPOINT, mask=live, other=-1)
        folded = live & ((start < history) | (page != old_page))
        base = tl.load(wide + BASE, mask=folded, other=0)
        tl.store(wide + BASE, base + history, mask=folded)
        tl.store(record + HISTORY, start, mask=folded)
        tl.store(record + CHECKPOINT, page, mask=folded)
        p = tl.arange(0, BLOCK_P)[None, :]
        both = folded[:, None] & (p < PAGES)
        table = tl.load(table_ptr + i[:, None] * PAGES + p, mask=both, other=-1)
        tl.store(record[:, None] + TABLE + p, table, mask=both)
    else:
        window = tl.load(window_ptr + i, mask=live, other=0)
        if ACTION == _ABORT:
            undo = tl.load(record + UNDO, mask=live, other=0)
            tl.store(record + UNDO, tl.minimum(undo, max_window - window), mask=live)
        else:
            count = window
            if GIVEN:
                count = tl.load(accepted_ptr + i, mask=live & (i < entries), other=0)
                count = tl.minimum(tl.maximum(count, 0), window).to(tl.int32)
            tl.store(count_ptr + i, count, mask=in_bucket)
            if ACTION == _DIRECT:
                base = tl.load(wide + BASE, mask=live, other=0)
                tl.store(wide + BASE, base + count, mask=live)
                tl.store(record + UNDO, tl.zeros_like(count), mask=live)
            else:
                tl.store(record + HISTORY, history + count, mask=live)
                tl.store(record + UNDO, count, mask=live)


def move_cursors(
    action: Action,
    slot: torch.Tensor,
    page: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    table: torch.Tensor,
    handle: torch.Tensor,
    records: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
    max_window: int = 0,
) -> None:
    """Launch over a plan's arrays ``[bucket, ...]``, on `records` ``[slots, words]``.

    A commit, of a direct step too, is of `accepted` ``[entries]``, or of whole windows, and
    `counts` ``[bucket]`` says what it was; an abort takes `max_window`.
    """
    bucket, pages = table.shape
    _move_kernel[(triton.cdiv(bucket, _ROWS),)](
        slot if counts is None else counts, slot if accepted is None else accepted,
        slot, page, history, window, table, handle,
        records, records.view(torch.int64),
        0 if accepted is None else accepted.shape[0], bucket, max_window,
        ACTION=_ACTIONS[action], GIVEN=accepted is not None,
        WORDS=records.shape[1], PAGES=pages, BLOCK_P=triton.next_power_of_2(pages), ROWS=_ROWS,
        num_warps=4,
    )  # fmt: skip
