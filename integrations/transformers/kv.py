"""Keys and values of the attention layers for sequences of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayinfer import InputError

__all__ = ["SlotLayer", "SlotTable"]

_FIRST_ROOM = 64


@dataclass(frozen=True)
class Batch:
    """The rows of the forward that is running: where each sequence's new tokens go."""

    slots: torch.Tensor  # [batch]
    places: torch.Tensor  # [batch, tokens], in the slot
    positions: torch.Tensor  # [batch, tokens], in the text; siblings of a draft tree share one
    longest: int  # keys that the longest row attends to
    reach: torch.Tensor | None = None  # [batch, tokens, tokens]: ancestors of a tree's nodes


class SlotTable:
    """Which slot each sequence has, and how many tokens are in it; shared by all attention layers.

    Lengths move at `advance` only, so a forward that fails leaves nothing behind: what it wrote
    lies past the length and is written over.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.device = device
        self.layers: list[SlotLayer] = []
        self.batch = Batch(torch.empty(0), torch.empty(0), torch.empty(0), 0)
        self._free = list(range(slots))[::-1]
        self._slot: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._written: dict[int, int] = {}  # past the length where drafts were rejected

    def open(self, sequence: int, length: int = 0) -> None:
        self._slot[sequence] = self._free.pop()
        self._length[sequence] = self._written[sequence] = length

    def close(self, sequence: int) -> None:
        slot = self._slot.pop(sequence)
        used = max(self._length.pop(sequence), self._written.pop(sequence))
        # A masked key weighs 0, and 0 times a NaN left by another sequence would still be NaN.
        for layer in self.layers:
            layer.zero(slot, used)
        self._free.append(slot)

    def length(self, sequence: int) -> int:
        return self._length[sequence]

    def copy(self, source: int, target: int) -> None:
        """Open `target` with what `source` holds."""
        self.open(target, self._length[source])
        for layer in self.layers:
            layer.copy(self._slot[source], self._slot[target], self._length[source])

    def read(self, sequence: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a sequence by layer, ``[heads, length, dim]``, as copies."""
        slot, length = self._slot[sequence], self._length[sequence]
        return [layer.read(slot, length) for layer in self.layers]

    def write(self, sequence: int, data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set an open, empty sequence to what `read` gave."""
        for layer, (keys, values) in zip(self.layers, data, strict=True):
            layer.write(self._slot[sequence], keys.to(self.device), values.to(self.device))

    def begin(
        self, sequences: Sequence[int], tokens: int, parents: torch.Tensor | None = None
    ) -> None:
        """The next forward adds `tokens` tokens to each of `sequences`.

        `parents` ``[batch, tokens]`` makes them the nodes of draft trees.
        """
        lengths = [self._length[s] for s in sequences]
        start = torch.tensor(lengths, device=self.device)
        places = start[:, None] + torch.arange(tokens, device=self.device)
        reach = None if parents is None else _ancestors(parents).to(self.device)
        depths = places if reach is None else start[:, None] + reach.sum(-1) - 1
        self.batch = Batch(
            slots=torch.tensor([self._slot[s] for s in sequences], device=self.device),
            places=places,
            positions=depths,
            longest=max(lengths) + tokens,
            reach=reach,
        )
        for sequence in sequences:
            end = self._length[sequence] + tokens
            self._written[sequence] = max(self._written[sequence], end)

    def advance(self, sequences: Sequence[int], tokens: int) -> None:
        """The forward went well: its tokens count."""
        for sequence in sequences:
            self._length[sequence] += tokens

    def keep(self, sequences: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of the forward's tokens these nodes count; they move to where a chain's would be."""
        for sequence, path in zip(sequences, paths, strict=True):
            start = self._length[sequence]
            if list(path) != list(range(len(path))):
                for layer in self.layers:
                    layer.move(self._slot[sequence], start, path)
            self._length[sequence] += len(path)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask of the running batch, ``[batch, 1, tokens, longest]``."""
        batch = self.batch
        keys = torch.arange(batch.longest, device=self.device)
        hidden = keys > batch.places[:, None, :, None]
        if batch.reach is not None:
            count = batch.places.shape[1]
            node = keys - batch.places[:, :1]  # [batch, longest]; before the window it is negative
            seen = batch.reach.gather(2, node.clamp(0, count - 1)[:, None].expand(-1, count, -1))
            hidden |= ((node >= 0)[:, None] & ~seen)[:, None]
        zero = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
        return zero.masked_fill(hidden, torch.finfo(dtype).min)


class SlotLayer:
    """The cache layer of one attention layer: ``[slots, heads, room, dim]``, a slot a sequence."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, table: SlotTable, slots: int) -> None:
        super().__init__()
        self.table = table
        self.slots = slots
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        table.layers.append(self)

    # Called by the model ----------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room at the first token that is seen; the peer's name for it."""
        self._grow(key_states, value_states, self.table.batch.longest)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens of every row at that row's own length.

        Returns
        -------
        keys, values : Tensor
            ``[batch, heads, longest, dim]``; what lies past a row's length is for the mask to hide.
        """
        batch = self.table.batch
        if key_states.shape[0] != batch.slots.numel():
            raise InputError(
                f"input_ids: got a batch of {key_states.shape[0]}; allowed {batch.slots.numel()}, "
                "the sequences of this forward; call the engine, not the model"
            )
        if self.keys is None or self.values is None or self.keys.shape[2] < batch.longest:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        places = (batch.slots[:, None], slice(None), batch.places)
        self.keys[places] = key_states.transpose(1, 2)
        self.values[places] = value_states.transpose(1, 2)
        rows = slice(batch.longest)
        return self.keys[batch.slots, :, rows], self.values[batch.slots, :, rows]

    def get_seq_length(self) -> int:
        return self.table.batch.longest - self.table.batch.places.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # Called by the table ----------------------------------------------------------------------

    def zero(self, slot: int, length: int) -> None:
        for part in (self.keys, self.values):
            if part is not None:
                part[slot, :, :length] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        for part in (self.keys, self.values):
            if part is not None:
                part[target, :, :length] = part[source, :, :length]

    def move(self, slot: int, start: int, path: Sequence[int]) -> None:
        for part in (self.keys, self.values):
            if part is not None:
                nodes = torch.tensor(path, device=part.device) + start
                part[slot, :, start : start + len(path)] = part[slot, :, nodes]

    def read(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys[slot, :, :length].clone(), self.values[slot, :, :length].clone()

    def write(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        length = keys.shape[1]
        if self.keys is None or self.keys.shape[2] < length:
            self._grow(keys[None], values[None], length)
        assert self.keys is not None
        assert self.values is not None
        self.keys[slot, :, :length] = keys
        self.values[slot, :, :length] = values

    def _grow(self, keys: torch.Tensor, values: torch.Tensor, needed: int) -> None:
        room = _FIRST_ROOM if self.keys is None else self.keys.shape[2]
        while room < needed:
            room *= 2

        def larger(old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
            new = like.new_zeros((self.slots, like.shape[1], room, like.shape[3]))
            if old is not None:
                new[:, :, : old.shape[2]] = old
            return new

        self.keys, self.values = larger(self.keys, keys), larger(self.values, values)


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """``[batch, t, s]``: whether node ``s`` is ``t`` or above it."""
    batch, count = parents.shape
    reach = torch.zeros((batch, count, count), dtype=torch.bool)
    rows = torch.arange(batch)
    for node in range(count):
        above = parents[:, node].long()
        reach[:, node] = reach[rows, above.clamp_min(0)] & (above >= 0)[:, None]
        reach[:, node, node] = True
    return reach
