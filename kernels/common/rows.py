"""Where row ``i`` of a sequence lies: page ``table[i // PAGE_ROWS]``, offset ``i % PAGE_ROWS``."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_offset"]


@triton.jit
def row_offset(table_ptr, row, live, stride_page, stride_row, PAGE_ROWS: tl.constexpr):
    """int64 element offsets of rows in a field; 0 where not `live`, which a caller masks."""
    page = tl.load(table_ptr + row // PAGE_ROWS, mask=live, other=0).to(tl.int64)
    return page * stride_page + (row % PAGE_ROWS) * stride_row
