"""Checkpoint pages of ``fp32_split`` rewritten in place as plain float32, or back.

A head's two planes take the place of its plain state, so that one program holds a whole head in
registers: everything is read before anything is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.split import join_planes, split_planes

__all__ = ["recode"]


@triton.jit(
    do_not_specialize=["stride_layer", "stride_page", "heads", "layers"],
    do_not_specialize_on_alignment=["pages_ptr", "chosen_ptr"],
)
def _recode_kernel(
    words_ptr, halves_ptr, pages_ptr, chosen_ptr,
    stride_layer, stride_page, heads, layers,
    VALUES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)  # all of the grid on axis 0
    head = pid % heads
    layer = pid // heads % layers
    i = pid // heads // layers
    if tl.load(chosen_ptr + i) == 0:
        return
    page = tl.load(pages_ptr + i).to(tl.int64)
    if page < 0:
        return
    start = layer * stride_layer + page * stride_page + head * VALUES
    words_ptr += start
    halves_ptr += 2 * start
    at = tl.arange(0, BLOCK)
    inside = at < VALUES
    if SPLIT:
        state = tl.load(words_ptr + at, mask=inside, other=0.0)
        high, low = split_planes(state)
        tl.debug_barrier()  # every warp has read before one writes
        tl.store(halves_ptr + at, high, mask=inside)
        tl.store(halves_ptr + VALUES + at, low, mask=inside)
    else:
        high = tl.load(halves_ptr + at, mask=inside, other=0)
        low = tl.load(halves_ptr + VALUES + at, mask=inside, other=0)
        state = join_planes(high, low)
        tl.debug_barrier()
        tl.store(words_ptr + at, state, mask=inside)


def recode(halves: torch.Tensor, pages: torch.Tensor, chosen: torch.Tensor, *, split: bool) -> None:
    """Launch over the pages ``pages[i]`` where ``chosen[i]``; a negative page is a pad.

    Parameters
    ----------
    halves : int16, [layers, pages, heads, 2, dim, state]
        A page's part of it contiguous.
    pages : int32 or int64, [n]
        Each that is chosen once.
    chosen : bool or uint8, [n]
    split : bool
        From plain float32 to planes; otherwise back.
    """
    layers, _, heads, _, dim, state = halves.shape
    values = dim * state
    block = triton.next_power_of_2(values)
    words = halves.view(torch.float32)
    _recode_kernel[(pages.shape[0] * layers * heads,)](
        words, halves, pages, chosen,
        halves.stride(0) // 2, halves.stride(1) // 2, heads, layers,
        VALUES=values, BLOCK=block, SPLIT=split,
        num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
