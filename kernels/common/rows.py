"""Where row ``i`` of a sequence lies: page ``table[i // PAGE_ROWS]``, offset ``i % PAGE_ROWS``."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_offset"]


@triton.jit
def row_offset(table_ptr, row, pages, stride_page, stride_row, PAGE_ROWS: tl.constexpr):
    """int64 element offsets of rows in a field, for a table of `pages` entries.

    The table is read for dead rows too, so that this need not wait for the history; what lies there
    is no page, and a caller masks the load of the row itself.
    """
    entry = row // PAGE_ROWS
    page = tl.load(table_ptr + entry, mask=entry < pages, other=0).to(tl.int64)
    return page * stride_page + (row % PAGE_ROWS) * stride_row
