"""Records of sequences on the device, and how the entries of a batch name them.

A record is ``words`` int32 of one slot: handle and token base (int64 each), history, undo,
checkpoint page, own checkpoint page, then the input pages and the own input pages. A sequence owns
as many pages as it can need; where a fork made it use a page that others use too, the own one is
its spare. Free slots have handle -1.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BASE", "CHECKPOINT", "HISTORY", "OWN_CHECKPOINT", "TABLE", "UNDO", "find"]

BASE = tl.constexpr(1)  # in int64; the handle is at 0
HISTORY = tl.constexpr(4)
UNDO = tl.constexpr(5)
CHECKPOINT = tl.constexpr(6)
OWN_CHECKPOINT = tl.constexpr(7)
TABLE = tl.constexpr(8)  # own table after it

_HANDLES = tl.constexpr(1 << 20)  # a handle is never below it, and its low bits are the slot


@triton.jit
def find(sequence_ptr, wide_ptr, i, entries, slots, WORDS: tl.constexpr):
    """Whether entries `i` of a batch name live sequences, their slots, and their handles.

    An entry is a handle, or a slot where it is below 2^20. Negative ones, free slots and handles
    that are no longer, or never were, a slot's are pads.
    """
    given = tl.load(sequence_ptr + i, mask=i < entries, other=-1).to(tl.int64)
    slot = given & (_HANDLES - 1)
    inside = (given >= 0) & (slot < slots)
    handle = tl.load(wide_ptr + slot * (WORDS // 2), mask=inside, other=-1)
    live = inside & (handle >= 0) & ((given < _HANDLES) | (given == handle))
    return live, slot, handle
