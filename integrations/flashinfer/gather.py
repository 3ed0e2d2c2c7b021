"""Attention over pages by gathering them: for CPUs and tests, with torch's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from replayinfer import InputError, UnsupportedError

__all__ = ["GatherAttention"]


class GatherAttention:
    """What `PagedAttentionWrapper` does with ``backend="torch"``.

    Parameters
    ----------
    device : torch.device
    kv_layout : str
    fixed : tuple of int, optional
        Requests and page ids that fit, where the buffers' addresses must stay: for CUDA graphs.
    """

    def __init__(
        self, device: torch.device, kv_layout: str, fixed: tuple[int, int] | None = None
    ) -> None:
        self.device, self.kv_layout, self._fixed = device, kv_layout, fixed
        self._planned = False
        self._queries: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        if fixed is not None:
            requests, ids = fixed
            self._table = torch.zeros((requests, ids // requests), dtype=torch.long, device=device)
            self._kv_len = torch.zeros(requests, dtype=torch.long, device=device)
            self._q_len = torch.zeros(requests, dtype=torch.long, device=device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        *,
        heads: tuple[int, int, int],
        causal: bool,
        sm_scale: float | None,
        window_left: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    ) -> None:
        """Keep the step; device tensors among the offsets are waited for."""
        qo, kv, last = (_host(t) for t in (qo_indptr, kv_indptr, last_page_len))
        requests = int(last.size)
        for name, values in (("qo_indptr", qo), ("paged_kv_indptr", kv)):
            wrong = (
                values.shape != (requests + 1,) or values[:1].any() or (np.diff(values) < 0).any()
            )
            if wrong:
                raise InputError(
                    f"{name}: got {values.tolist()}; allowed {requests + 1} values, one more than "
                    "requests, that start at 0 and never fall; give the running sum of the counts"
                )
        pages = np.diff(kv)
        if kv_indices.numel() < kv[-1] or ((last < 1) | (last > page_size))[pages > 0].any():
            raise InputError(
                f"paged_kv_last_page_len: got {last.tolist()} and {kv_indices.numel()} page ids; "
                f"allowed 1..{page_size} and at least {int(kv[-1])} ids; give every page"
            )
        queries, keys = np.diff(qo), np.maximum((pages - 1) * page_size + last, 0) * (pages > 0)
        reach = max(int(pages.max(initial=0)), 1)
        if self._fixed is not None:
            reach = self._check_fixed(requests, reach, queries)
        place = kv[:-1, None] + np.arange(reach)
        inside = np.arange(reach) < pages[:, None]
        index = torch.from_numpy(np.where(inside, place, 0)).to(kv_indices.device)
        mask = torch.from_numpy(inside).to(kv_indices.device)
        ids = kv_indices.long() if kv_indices.numel() else kv_indices.new_zeros(1).long()
        table = torch.where(mask, ids[index], 0)
        counts = (torch.from_numpy(c.astype(np.int64)) for c in (keys, queries))
        kv_len, q_len = (c.to(self.device) for c in counts)
        if self._fixed is None:
            self._table, self._kv_len, self._q_len = table.to(self.device), kv_len, q_len
        else:
            self._table.copy_(table)
            self._kv_len.copy_(kv_len)
            self._q_len.copy_(q_len)
        width = int(queries.max(initial=0))
        self._uniform = bool((queries == width).all())
        if not self._uniform:
            first = np.repeat(qo[:-1], queries)
            row = np.repeat(np.arange(requests) * width, queries) + np.arange(qo[-1]) - first
            self._places = torch.from_numpy(row).to(self.device)
        self._queries, self._width, self._rows = queries, width, int(qo[-1])
        self._page_size, self._heads, self._causal = page_size, heads, causal
        self._scale, self._window_left, self._dtypes = sm_scale, window_left, dtypes
        self._planned = True

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor | None) -> torch.Tensor:
        """Outputs ``[rows, qo_heads, head_dim]``; zeros where a query sees no key."""
        k, v = self._pages(cache)
        qo_heads, kv_heads, dim = self._heads
        self._check(q, k)
        requests, width = self._queries.size, self._width
        keys, values, exist = self._gather(k, v, q.dtype)
        queries = q
        if not self._uniform:
            queries = q.new_zeros((requests * width, qo_heads, dim))
            queries[self._places] = q
        queries = queries.view(requests, width, qo_heads, dim).transpose(1, 2)
        seen = self._visible(exist)[:, None]
        y = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=self._scale,
            enable_gqa=qo_heads != kv_heads,
        )  # fmt: skip
        # What torch makes of a row that sees nothing depends on its kernel.
        y = torch.where(seen.any(-1, keepdim=True), y, torch.zeros_like(y))
        flat = y.transpose(1, 2).reshape(requests * width, qo_heads, dim)
        flat = (flat if self._uniform else flat[self._places]).to(self._dtypes[2])
        return flat if out is None else out.copy_(flat)

    def _gather(
        self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        requests, reach = self._table.shape
        tokens = reach * self._page_size
        exist = torch.arange(tokens, device=self.device) < self._kv_len[:, None]
        parts = []
        for pages in (k, v):
            rows = pages[self._table].reshape(requests, tokens, *pages.shape[-2:]).to(dtype)
            # Past the length anything may lie, and 0 times NaN is NaN.
            rows = torch.where(exist[..., None, None], rows, torch.zeros_like(rows))
            parts.append(rows.transpose(1, 2))
        return parts[0], parts[1], exist

    def _visible(self, exist: torch.Tensor) -> torch.Tensor:
        """``[requests, width, tokens]``: the last query stands at the last key."""
        key = torch.arange(exist.shape[1], device=self.device)
        place = (self._kv_len - self._q_len)[:, None] + torch.arange(
            self._width, device=self.device
        )
        seen = exist[:, None, :].expand(-1, self._width, -1)
        if self._causal:
            seen = seen & (key <= place[..., None])
        if self._window_left >= 0:
            seen = seen & (key >= place[..., None] - self._window_left)
        return seen

    def _pages(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache
        if self.kv_layout == "HND":
            k, v = k.transpose(-3, -2), v.transpose(-3, -2)
        return k, v

    def _check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        qo_heads, kv_heads, dim = self._heads
        shape, pages = (self._rows, qo_heads, dim), (self._page_size, kv_heads, dim)
        if tuple(q.shape) != shape or tuple(k.shape[1:]) != pages:
            raise InputError(
                f"q: got {list(q.shape)} over pages {list(k.shape[1:])}; allowed {list(shape)} "
                f"over {list(pages)}, as planned; plan this step"
            )
        if (q.dtype, k.dtype) != self._dtypes[:2]:
            raise InputError(
                f"q: got {q.dtype} over pages of {k.dtype}; allowed {self._dtypes[0]} over "
                f"{self._dtypes[1]}, as planned; plan with q_data_type and kv_data_type"
            )

    def _check_fixed(self, requests: int, reach: int, queries: NDArray[np.int64]) -> int:
        assert self._fixed is not None
        most = self._table.shape[1]
        if requests != self._fixed[0] or reach > most:
            raise InputError(
                f"paged_kv_indptr: got {requests} requests of up to {reach} pages; allowed "
                f"{self._fixed[0]} requests of up to {most}, as the buffers for CUDA graphs have "
                "room for; make another wrapper"
            )
        first = not self._planned
        same = first or np.array_equal(queries, self._queries)
        if not same or (queries != queries[:1]).any():
            was = "equal counts" if first else str(self._queries.tolist())
            raise UnsupportedError(
                f"qo_indptr: got {queries.tolist()} queries by request; allowed {was} under CUDA "
                "graphs with backend='torch'; make a wrapper per window"
            )
        return most


def _host(given: torch.Tensor) -> NDArray[np.int64]:
    values: NDArray[np.int64] = given.cpu().numpy().astype(np.int64).reshape(-1)
    return values
