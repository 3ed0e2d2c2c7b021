"""What one step is, at the level of requests: `StepMetadata`, at fixed addresses per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from replayinfer import InputError, PlanError

__all__ = ["MetadataArrays", "MetadataBuffers", "StepMetadata"]

_STAGES = 3  # host buffers in rotation: two steps may be enqueued ahead of the device
_ALIGN = 4  # ints: every array starts on 16 bytes


@dataclass(frozen=True)
class MetadataArrays:
    """The arrays of a step, int32, all in one allocation.

    Attributes
    ----------
    qo_indptr : [bucket + 1]
        Where each request's queries start in the tensor of all queries.
    kv_indptr : [bucket + 1]
        Where each request's pages start in `kv_indices`.
    kv_indices : [kv_indptr[-1]]
        Page ids.
    last_page_len : [bucket]
        Tokens in each request's last page, 1..page_size.
    kv_len : [bucket]
        Keys of each request, those of this step included.
    token_page, token_offset : [rows]
        Where the key and value of each query row go.
    token_live : [rows]
        1 where the row holds a token of a sequence; 0 in pads and past a sequence's own window.
    positions : [rows]
        Tokens before the row in its text; 0 in pads.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    kv_len: torch.Tensor
    token_page: torch.Tensor
    token_offset: torch.Tensor
    token_live: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class StepMetadata:
    """One step of a batch: which sequences, how many tokens of each, and where its keys are.

    A *padded* step has ``bucket * window`` query rows, `window` for every request, as the replay
    wrapper's tensors ``[bucket, window, ...]`` have them flattened. Keys then reach to the end of
    the window for every request (``length + window``), so that row ``t`` sees what it should under
    the causal mask of wrappers that align the last query with the last key; rows past a sequence's
    own window write zeros and mean nothing. A *packed* step has exactly the rows of the tokens.

    Attributes
    ----------
    sequences : int64 [batch]
        Handles.
    windows : int32 [batch]
        New tokens of each.
    lengths : int64 [batch]
        Tokens of each before the step.
    bucket, window : int
        Requests, pads included, and query rows of the longest.
    packed : bool
    page_size : int
    host, device : MetadataArrays
        The same values twice; on a CPU the same tensors. The host's are overwritten a few steps
        later, the device's by the next step of the bucket.
    """

    sequences: NDArray[np.int64]
    windows: NDArray[np.int32]
    lengths: NDArray[np.int64]
    bucket: int
    window: int
    packed: bool
    page_size: int
    host: MetadataArrays
    device: MetadataArrays
    buffers: MetadataBuffers = field(repr=False)
    serial: int = field(repr=False)

    @property
    def batch(self) -> int:
        """Sequences, without pads."""
        return int(self.sequences.size)

    @property
    def rows(self) -> int:
        """Query rows of the step's tensors."""
        return int(self.host.positions.numel())

    @property
    def is_current(self) -> bool:
        """Whether its device arrays still hold this step."""
        return self.buffers.serial == self.serial

    def require_current(self, action: str) -> None:
        """Raise `PlanError` where a later step has overwritten it."""
        if not self.is_current:
            raise PlanError(
                f"{action}: got the metadata of step {self.serial} of its bucket while the buffers "
                f"hold step {self.buffers.serial}; allowed the newest only, since they share "
                "addresses; make the metadata of a step right before it"
            )

    def mark_read(self) -> None:
        """Keep the host arrays until what the current stream copies from them has arrived.

        Called by whoever hands `host` to asynchronous copies, after that.
        """
        self.buffers.mark_read()


class MetadataBuffers:
    """The storage of one bucket's metadata; its device side never moves.

    Parameters
    ----------
    bucket : int
        Requests of a step, pads included.
    rows : int
        Query rows that a step may have.
    indices : int
        Page ids that a step may have, over all requests.
    page_size : int
        Tokens of a page.
    pad_page : int
        A page of zeros that no sequence holds: what pads attend to and write zeros to.
    device : torch.device or str

    Examples
    --------
    >>> buffers = MetadataBuffers(4, rows=4, indices=16, page_size=8, pad_page=99)
    >>> meta = buffers.fill([7, 9], lengths=[3, 16], tables=[[5, -1, -1], [2, 0, 6]], window=1)
    >>> meta.device.kv_indptr.tolist(), meta.device.kv_indices.tolist()
    ([0, 1, 4, 5, 6], [5, 2, 0, 6, 99, 99])
    >>> meta.device.last_page_len.tolist()
    [4, 1, 1, 1]
    """

    def __init__(
        self,
        bucket: int,
        *,
        rows: int,
        indices: int,
        page_size: int,
        pad_page: int,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"bucket": bucket, "rows": rows, "indices": indices, "page_size": page_size}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}: got {value!r}; allowed an integer >= 1; give a size")
        self.bucket, self.rows, self.indices = bucket, rows, indices
        self.page_size, self.pad_page = page_size, pad_page
        self.device = torch.device(device)
        self.serial = 0
        spans, stop = {}, 0
        one, per_row = {"qo_indptr": 1, "kv_indptr": 1, "last_page_len": 0, "kv_len": 0}, _PER_ROW
        lengths = {name: bucket + more for name, more in one.items()} | dict.fromkeys(per_row, rows)
        for name, length in (lengths | {"kv_indices": indices}).items():  # indices last
            start = -(-stop // _ALIGN) * _ALIGN
            stop = start + length
            spans[name] = (start, stop)
        self._spans, self._head = spans, spans["kv_indices"][0]
        self._flat = torch.zeros(stop, dtype=torch.int32, device=self.device)
        self._events: list[torch.cuda.Event | None] = []
        self._hosts = [self._flat]
        if self.device.type != "cpu":
            pin = self.device.type == "cuda"
            self._hosts = [
                torch.zeros(stop, dtype=torch.int32, pin_memory=pin) for _ in range(_STAGES)
            ]
            self._events = [None] * _STAGES
        self._stage = 0

    def fill(
        self,
        sequences: Sequence[int] | NDArray[np.int64],
        *,
        lengths: ArrayLike,
        tables: ArrayLike,
        windows: ArrayLike | None = None,
        window: int | None = None,
        packed: bool = False,
    ) -> StepMetadata:
        """Write a step; the whole padded bucket is written each time.

        Parameters
        ----------
        sequences : handles [batch]
            Each once.
        lengths : integers [batch]
            Tokens of each sequence before the step.
        tables : integers [batch, pages]
            Page ids in order; entries past those that the step needs are not read.
        windows : int or integers [batch], optional
            New tokens of each; 1 if omitted.
        window : int, optional
            Query rows of each request; the longest of `windows` if omitted.
        packed : bool
            Rows of the tokens alone, without pads between them.

        Raises
        ------
        InputError
            Nothing is written then.

        Notes
        -----
        One asynchronous upload, no sync.
        """
        handles = np.array(sequences, dtype=np.int64).reshape(-1)
        batch = int(handles.size)
        if batch > self.bucket or np.unique(handles).size != batch:
            raise InputError(
                f"sequences: got {batch} handles, {np.unique(handles).size} of them distinct; "
                f"allowed each once and at most the bucket, {self.bucket}; take a larger bucket"
            )
        before = _integers("lengths", lengths, batch).astype(np.int64)
        new = _integers("windows", 1 if windows is None else windows, batch).astype(np.int32)
        width = max(int(new.max(initial=0)), 1) if window is None else window
        if before.min(initial=0) < 0 or new.min(initial=0) < 0 or new.max(initial=0) > width:
            raise InputError(
                f"windows: got {new.tolist()} after lengths {before.tolist()}; allowed 0..{width} "
                "after 0 or more; give the step's window as well"
            )
        queries = np.zeros(self.bucket, dtype=np.int64)
        queries[:batch] = new
        if not packed:
            queries[:] = width
        rows = int(queries.sum())
        keys = queries.copy()
        keys[:batch] += before
        pages = -(-keys // self.page_size)
        table = np.asarray(tables, dtype=np.int64).reshape(batch, -1 if batch else 0)
        needed = int(pages[:batch].max(initial=0))
        total = int(pages.sum())
        if table.shape[1] < needed or rows > self.rows or total > self.indices:
            raise InputError(
                f"tables: got {table.shape[1]} pages a sequence for a step of {rows} rows and "
                f"{total} page ids; allowed at least {needed}, at most {self.rows} rows and "
                f"{self.indices} ids; make larger buffers"
            )
        used = table[:, :needed]
        valid = np.arange(needed) < pages[:batch, None]
        ids = used[valid]
        if ids.size and int(ids.min()) < 0:
            row = int(np.flatnonzero((valid & (used < 0)).any(axis=1))[0])
            raise InputError(
                f"tables: got page {int(used[row][valid[row]].min())} of sequence "
                f"{int(handles[row])}, which needs {int(pages[row])}; allowed ids >= 0 there; "
                "reserve its pages first"
            )

        stage, out = self._begin()
        out["qo_indptr"][0] = out["kv_indptr"][0] = 0
        out["qo_indptr"][1:] = np.cumsum(queries)
        out["kv_indptr"][1:] = np.cumsum(pages)
        out["kv_len"][:] = keys
        # A request without keys has no last page; its length is read by nobody.
        out["last_page_len"][:] = np.where(pages > 0, keys - (pages - 1) * self.page_size, 1)
        out["kv_indices"][: ids.size] = ids
        out["kv_indices"][ids.size : total] = self.pad_page
        self._fill_rows(out, queries, before, new, table, batch, rows)
        arrays = self._upload(stage, rows, total)
        self.serial += 1
        return StepMetadata(
            handles, new, before, self.bucket, width, packed, self.page_size,
            host=arrays[0], device=arrays[1], buffers=self, serial=self.serial,
        )  # fmt: skip

    def decode_buffers(self) -> dict[str, torch.Tensor]:
        """Arguments of FlashInfer's decode wrapper for CUDA graphs: these addresses."""
        device = self._views(self._flat, self.rows, self.indices)
        return {
            "paged_kv_indptr_buffer": device.kv_indptr,
            "paged_kv_indices_buffer": device.kv_indices,
            "paged_kv_last_page_len_buffer": device.last_page_len,
        }

    def prefill_buffers(self) -> dict[str, torch.Tensor]:
        """Arguments of FlashInfer's prefill wrapper, and of ours, for CUDA graphs."""
        device = self._views(self._flat, self.rows, self.indices)
        return {
            "qo_indptr_buf": device.qo_indptr,
            "paged_kv_indptr_buf": device.kv_indptr,
            "paged_kv_indices_buf": device.kv_indices,
            "paged_kv_last_page_len_buf": device.last_page_len,
        }

    def mark_read(self) -> None:
        """See `StepMetadata.mark_read`."""
        if self.device.type == "cuda":
            event = self._events[self._stage] or torch.cuda.Event()
            event.record()
            self._events[self._stage] = event

    def _begin(self) -> tuple[torch.Tensor, dict[str, NDArray[np.int32]]]:
        self._stage = (self._stage + 1) % len(self._hosts)
        if self._events and (event := self._events[self._stage]) is not None:
            event.synchronize()  # done long ago unless the host runs three steps ahead
        host = self._hosts[self._stage]
        flat = host.numpy()
        return host, {name: flat[a:b] for name, (a, b) in self._spans.items()}

    def _fill_rows(
        self,
        out: dict[str, NDArray[np.int32]],
        queries: NDArray[np.int64],
        before: NDArray[np.int64],
        new: NDArray[np.int32],
        table: NDArray[np.int64],
        batch: int,
        rows: int,
    ) -> None:
        request = np.repeat(np.arange(self.bucket), queries)
        place = np.arange(rows) - np.repeat(np.cumsum(queries) - queries, queries)
        real = request < batch
        token = np.zeros(rows, dtype=np.int64)
        token[real] = before[request[real]] + place[real]
        page = np.full(rows, self.pad_page, dtype=np.int64)
        page[real] = table[request[real], token[real] // self.page_size]
        live = np.zeros(rows, dtype=np.int32)
        live[real] = place[real] < new[request[real]]
        out["token_page"][:rows] = page
        out["token_offset"][:rows] = np.where(real, token % self.page_size, 0)
        out["token_live"][:rows] = live
        out["positions"][:rows] = token

    def _upload(
        self, host: torch.Tensor, rows: int, total: int
    ) -> tuple[MetadataArrays, MetadataArrays]:
        if host is self._flat:
            arrays = self._views(host, rows, total)
            return arrays, arrays
        stop = self._head + total
        self._flat[:stop].copy_(host[:stop], non_blocking=True)
        self.mark_read()
        return self._views(host, rows, total), self._views(self._flat, rows, total)

    def _views(self, flat: torch.Tensor, rows: int, total: int) -> MetadataArrays:
        def view(name: str) -> torch.Tensor:
            start, stop = self._spans[name]
            if name == "kv_indices":
                stop = start + total
            elif name in _PER_ROW:
                stop = start + rows
            return flat[start:stop]

        return MetadataArrays(**{name: view(name) for name in self._spans})


_PER_ROW = ("token_page", "token_offset", "token_live", "positions")


def _integers(name: str, given: ArrayLike, batch: int) -> NDArray[np.int64]:
    values = np.asarray(given)
    if values.dtype.kind not in "iu" and values.size:
        raise InputError(f"{name}: got {values.dtype}; allowed integers; give one per sequence")
    if values.ndim and values.shape != (batch,):
        raise InputError(
            f"{name}: got {list(values.shape)}; allowed [{batch}], one per sequence, or one for all"
        )
    return np.broadcast_to(values, (batch,)).astype(np.int64)
