"""`KVPagePool`: keys and values of the attention layers in pages, the same ids in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from replayinfer import InputError, PageAllocator, PlanError, StaleHandleError

from .metadata import MetadataBuffers, StepMetadata

__all__ = ["KVPagePool"]

_FIRST_ROWS = 8


class KVPagePool:
    """Reference-counted pages of keys and values for the sequences of a `StatePool`.

    Sequences go by the handles of the state pool. A page id is the same in every layer. A fork
    shares the full pages and copies the partial one, so nothing is ever written into a page that
    another sequence holds.

    Parameters
    ----------
    layers : iterable of int
        Model layer indices that attend.
    pages : int
        Pages that sequences may hold. One more is kept for pads, and is always zero.
    page_size : int
        Tokens of a page.
    kv_heads, head_dim : int
    max_tokens : int
        Tokens a sequence may hold, the window of a step included.
    dtype : torch.dtype
    device : torch.device or str
    kv_layout : {"NHD", "HND"}
        Order inside a page, as FlashInfer has it: ``[2, page_size, kv_heads, head_dim]`` or ``[2,
        kv_heads, page_size, head_dim]``.

    Examples
    --------
    >>> import torch
    >>> kv = KVPagePool([1], pages=8, page_size=4, kv_heads=2, head_dim=8, max_tokens=32)
    >>> kv.open([17])
    >>> meta = kv.step([17], 6, packed=True)
    >>> kv.append(1, torch.ones(6, 2, 8), torch.ones(6, 2, 8), meta)
    >>> kv.commit(meta)
    >>> kv.length(17), kv.pages_in_use()
    (6, 2)
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_layout: Literal["NHD", "HND"] = "NHD",
    ) -> None:
        self.layers = tuple(layers)
        sizes = {
            "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim,
            "max_tokens": max_tokens,
        }  # fmt: skip
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}: got {value!r}; allowed an integer >= 1; give a size")
        if kv_layout not in ("NHD", "HND"):
            raise InputError(f"kv_layout: got {kv_layout!r}; allowed 'NHD' or 'HND'; pick one")
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise InputError(
                f"layers: got {list(self.layers)}; allowed at least one, each once; list the "
                "layers that attend"
            )
        self.page_size, self.kv_heads, self.head_dim = page_size, kv_heads, head_dim
        self.max_tokens, self.kv_layout = max_tokens, kv_layout
        self.device, self.dtype = torch.device(device), dtype
        self.pad_page = pages
        self.page_ids = PageAllocator("KV pages", pages, "free sequences, or make more pages")
        inner = (page_size, kv_heads) if kv_layout == "NHD" else (kv_heads, page_size)
        # Zeros: a step may attend to a page whose rest was never written.
        self.storage = torch.zeros(
            (len(self.layers), pages + 1, 2, *inner, head_dim), dtype=dtype, device=self.device
        )
        self._index = {layer: i for i, layer in enumerate(self.layers)}
        self._columns = -(-max_tokens // page_size)
        self._rows: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._lengths = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._busy = np.zeros(0, dtype=bool)
        self._tables = np.zeros((0, self._columns), dtype=np.int32)
        self._buffers: dict[tuple[int, int, bool], MetadataBuffers] = {}
        self._steps: dict[int, StepMetadata] = {}

    # Sequences --------------------------------------------------------------------------------

    def open(self, sequences: Sequence[int]) -> None:
        """Start sequences without tokens; pages are taken as steps need them."""
        known = [s for s in sequences if s in self._rows]
        if known or len(set(sequences)) != len(sequences):
            raise InputError(
                f"sequences: got {list(sequences)}, of which {known} are open; allowed each once "
                "and not open yet; free them first"
            )
        for sequence in sequences:
            self._rows[int(sequence)] = self._new_row()

    def free(self, sequences: Sequence[int]) -> None:
        """End sequences; pages that nobody else holds become free.

        Raises
        ------
        StaleHandleError, PlanError
            One is not open, or in a step; none is freed then.
        """
        rows = self._resolve(sequences, "free")
        for row in rows.tolist():
            self.page_ids.release(self._tables[row, : self._counts[row]])
            self._counts[row] = self._lengths[row] = 0
            self._free_rows.append(row)
        for sequence in sequences:
            del self._rows[int(sequence)]

    def fork(self, parent: int, children: Sequence[int]) -> None:
        """Start `children`, handles of the state pool's fork, with what `parent` holds.

        Raises
        ------
        CapacityError
            No page for the copy of the partial one; nothing is taken.
        """
        row = int(self._resolve([parent], "fork")[0])
        full, rest = divmod(int(self._lengths[row]), self.page_size)
        count = len(children)
        self.page_ids.require(count if rest else 0)
        self.open(children)
        fresh = self.page_ids.take(count if rest else 0)
        shared = self._tables[row, :full]
        for i, child in enumerate(children):
            new = self._rows[int(child)]
            self.page_ids.share(shared)
            self._tables[new, :full] = shared
            self._lengths[new], self._counts[new] = self._lengths[row], full + bool(rest)
            if rest:
                self._tables[new, full] = fresh[i]
        if rest and count:
            self._copy(np.full(count, self._tables[row, full]), fresh, rest)

    def rollback(self, sequence: int, tokens: int) -> None:
        """Drop the last `tokens` tokens of a sequence, and the pages that held only them."""
        row = int(self._resolve([sequence], "rollback")[0])
        length = int(self._lengths[row])
        if isinstance(tokens, bool) or not 0 <= tokens <= length:
            raise InputError(
                f"tokens: got {tokens}; allowed 0..{length}, those of sequence {sequence}; drop "
                "fewer"
            )
        self._lengths[row] = length - tokens
        keep = -(-(length - tokens) // self.page_size)
        self.page_ids.release(self._tables[row, keep : self._counts[row]])
        self._counts[row] = min(keep, self._counts[row])

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return int(self._lengths[self._row(sequence)])

    def table(self, sequence: int) -> NDArray[np.int32]:
        """Page ids of a sequence in order, as a copy."""
        row = self._row(sequence)
        return self._tables[row, : self._counts[row]].copy()

    def pages_in_use(self) -> int:
        return self.page_ids.used

    @property
    def nbytes(self) -> int:
        """Device bytes of all pages."""
        return self.storage.nbytes

    # A step -----------------------------------------------------------------------------------

    def step(
        self,
        sequences: Sequence[int] | NDArray[np.int64],
        windows: ArrayLike | None = None,
        *,
        bucket: int | None = None,
        window: int | None = None,
        packed: bool = False,
    ) -> StepMetadata:
        """Take the pages of a step and describe it; `commit` or `abort` ends it.

        Parameters
        ----------
        sequences, windows, window, packed
            As in `MetadataBuffers.fill`.
        bucket : int, optional
            Requests, pads included; the batch if omitted.

        Raises
        ------
        CapacityError
            Too few pages; nothing is taken.
        InputError, StaleHandleError, PlanError
            Nothing has changed then.

        Notes
        -----
        A padded step takes pages for the whole window of every sequence, so ``length + window`` is
        what `max_tokens` bounds. Host cost: about 0.4 ms for 256 sequences of 4,096 tokens.
        """
        rows = self._resolve(sequences, "step")
        batch = int(rows.size)
        size = max(batch, 1) if bucket is None else bucket
        new = np.asarray(1 if windows is None else windows)
        if new.shape not in ((), (batch,)):
            raise InputError(
                f"windows: got {list(new.shape)}; allowed [{batch}], one per sequence; give each "
                "its own, or one for all"
            )
        new = np.broadcast_to(new, (batch,))
        width = max(int(new.max(initial=0)), 1) if window is None else window
        reach = self._lengths[rows] + (new if packed else width)
        if int(reach.max(initial=0)) > self.max_tokens:
            worst = int(np.argmax(reach))
            raise InputError(
                f"windows: got sequence {int(np.asarray(sequences)[worst])} with "
                f"{int(self._lengths[rows[worst]])} tokens and {int(reach[worst])} after the step; "
                f"allowed {self.max_tokens}; make the pool with more max_tokens"
            )
        buffers = self._buffers_for(size, width, int(new.sum()), packed)
        need = np.maximum(-(-reach // self.page_size), self._counts[rows])
        missing = need - self._counts[rows]
        partial = self._lengths[rows] // self.page_size
        open_page = (self._lengths[rows] % self.page_size > 0) & (reach > self._lengths[rows])
        held = self._tables[rows, np.minimum(partial, self._columns - 1)]
        copied = np.flatnonzero(open_page & (self.page_ids.refs[held] > 1))
        fresh_count = int(missing.sum())
        self.page_ids.require(fresh_count + copied.size)

        across = max(int(need.max(initial=0)), 1)
        table = self._tables[rows, :across]
        fresh = self.page_ids.take(fresh_count + int(copied.size))
        columns = np.arange(across)
        table[(columns >= self._counts[rows, None]) & (columns < need[:, None])] = fresh[
            :fresh_count
        ]
        table[copied, partial[copied]] = fresh[fresh_count:]
        try:  # what it refuses leaves the pool as it was
            meta = buffers.fill(
                sequences, lengths=self._lengths[rows], tables=table, windows=windows,
                window=width, packed=packed,
            )  # fmt: skip
        except BaseException:
            self.page_ids.release(fresh)
            raise
        if copied.size:
            self._copy(held[copied], fresh[fresh_count:], self.page_size)
            self.page_ids.release(held[copied])
        self._tables[rows, :across], self._counts[rows] = table, need
        self._busy[rows] = True
        self._steps[id(meta)] = meta
        return meta

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, meta: StepMetadata) -> None:
        """Write the step's keys and values in one layer.

        Parameters
        ----------
        k, v : Tensor, [rows, kv_heads, head_dim] or [bucket, window, kv_heads, head_dim]
            Rounded to the pool's dtype. Rows that hold no token are not read: zeros go there.

        Notes
        -----
        No allocation of pages and no sync; can be captured in a CUDA graph.
        """
        meta.require_current("append")
        if layer not in self._index:
            raise InputError(
                f"layer: got {layer!r}; allowed the layers of this pool, {list(self.layers)}; use "
                "the pool that holds the layer"
            )
        shape = (meta.rows, self.kv_heads, self.head_dim)
        at = meta.device
        live = at.token_live.bool()[:, None, None]
        page, offset = at.token_page.long(), at.token_offset.long()
        for part, (name, given) in enumerate((("k", k), ("v", v))):
            if given.numel() != shape[0] * shape[1] * shape[2] or given.shape[-2:] != shape[1:]:
                raise InputError(
                    f"{name}: got {list(given.shape)}; allowed {list(shape)}, a row per query of "
                    "the step; reshape it"
                )
            rows = given.reshape(shape).to(self.dtype)
            rows = torch.where(live, rows, torch.zeros_like(rows))
            self._tokens(layer)[:, part][page, offset] = rows

    def commit(self, meta: StepMetadata, accepted: ArrayLike | None = None) -> None:
        """Advance every sequence by its accepted tokens, by default all of its window."""
        rows = self._step_rows(meta, "commit")
        counts = meta.windows if accepted is None else np.asarray(accepted)
        if counts.shape != (meta.batch,) or ((counts < 0) | (counts > meta.windows)).any():
            raise InputError(
                f"accepted: got {counts.tolist()}; allowed 0..window for each, {meta.windows}; "
                "give one count per sequence of the step"
            )
        self._lengths[rows] += counts
        self._end(meta, rows)

    def abort(self, meta: StepMetadata) -> None:
        """Drop the step's tokens; its pages stay for the next one."""
        self._end(meta, self._step_rows(meta, "abort"))

    def cache(self, layer: int) -> torch.Tensor:
        """Pages of a layer as FlashInfer's ``run`` takes them: keys at ``[:, 0]``, values at 1."""
        if layer not in self._index:
            raise InputError(
                f"layer: got {layer!r}; allowed the layers of this pool, {list(self.layers)}; use "
                "the pool that holds the layer"
            )
        return self.storage[self._index[layer]]

    def buffers(self, bucket: int, window: int = 1) -> MetadataBuffers:
        """Where padded steps of this bucket and window lie, e.g. for wrappers with CUDA graphs."""
        return self._buffers_for(bucket, window, bucket * window, False)

    # Inside -----------------------------------------------------------------------------------

    def _buffers_for(self, bucket: int, window: int, tokens: int, packed: bool) -> MetadataBuffers:
        rows = 1 << (max(tokens, 1) - 1).bit_length() if packed else bucket * window
        key = (bucket, rows if packed else window, packed)
        if key not in self._buffers:
            self._buffers[key] = MetadataBuffers(
                bucket, rows=rows, indices=bucket * self._columns, page_size=self.page_size,
                pad_page=self.pad_page, device=self.device,
            )  # fmt: skip
        return self._buffers[key]

    def _tokens(self, layer: int) -> torch.Tensor:
        """``[pages, 2, page_size, kv_heads, head_dim]`` in either layout."""
        pages = self.cache(layer)
        return pages if self.kv_layout == "NHD" else pages.transpose(-3, -2)

    def _copy(self, source: NDArray[np.int32], target: NDArray[np.int32], tokens: int) -> None:
        """The first `tokens` tokens of pages, in every layer."""
        old, new = (torch.from_numpy(i.astype(np.int64)).to(self.device) for i in (source, target))
        for layer in self.layers:
            pages = self._tokens(layer)
            pages[new, :, :tokens] = pages[old, :, :tokens]

    def _new_row(self) -> int:
        if not self._free_rows:
            old = self._lengths.size
            more = max(old, _FIRST_ROWS)
            self._lengths = np.append(self._lengths, np.zeros(more, dtype=np.int64))
            self._counts = np.append(self._counts, np.zeros(more, dtype=np.int64))
            self._busy = np.append(self._busy, np.zeros(more, dtype=bool))
            empty = np.zeros((more, self._columns), dtype=np.int32)
            self._tables = np.concatenate([self._tables, empty])
            self._free_rows = list(range(old + more - 1, old - 1, -1))
        return self._free_rows.pop()

    def _row(self, sequence: int) -> int:
        try:
            return self._rows[int(sequence)]
        except KeyError:
            raise StaleHandleError(
                f"sequence: got {sequence}; allowed one that is open in this pool "
                f"({len(self._rows)} are); call open first"
            ) from None

    def _resolve(
        self, sequences: Sequence[int] | NDArray[np.int64], action: str
    ) -> NDArray[np.int64]:
        rows = np.array([self._row(s) for s in sequences], dtype=np.int64)
        if np.unique(rows).size != rows.size:
            raise InputError(
                f"sequences: got {list(sequences)}; allowed each once; drop the repetition"
            )
        if self._busy[rows].any():
            held = [int(s) for s, r in zip(sequences, rows, strict=True) if self._busy[r]]
            raise PlanError(
                f"{action}: got sequences {held}, which are in a step; allowed after its commit or "
                "abort; finish it"
            )
        return rows

    def _step_rows(self, meta: StepMetadata, action: str) -> NDArray[np.int64]:
        if self._steps.get(id(meta)) is not meta:
            raise PlanError(
                f"{action}: got a step that is not open in this pool; allowed what step returned, "
                "once; make another"
            )
        return np.array([self._rows[s] for s in meta.sequences.tolist()], dtype=np.int64)

    def _end(self, meta: StepMetadata, rows: NDArray[np.int64]) -> None:
        self._busy[rows] = False
        del self._steps[id(meta)]
