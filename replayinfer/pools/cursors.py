"""Where every sequence stands, and the handles by which callers name sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NewType, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, PlanError, StaleHandleError

__all__ = ["Cursors", "SequenceId", "SlotArray"]

SequenceId = NewType("SequenceId", int)
SlotArray = NDArray[np.int64]

# A handle is one int64 >= 0, so that thousands are checked with two array operations:
# pool tag (11 bits) | generation (32 bits) | slot (20 bits).
_SLOT_BITS = 20
_GENERATION_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_GENERATION_MASK = (1 << _GENERATION_BITS) - 1
_TAGS = 1 << 11
MAX_SLOTS = 1 << _SLOT_BITS

_FREE = np.iinfo(np.int64).min  # the prefix of no handle, not even of a negative number

_tag_counter = itertools.count(1)


class Cursors:
    """Per-slot state of the sequences of one pool, as host arrays indexed by slot.

    Attributes
    ----------
    base : int64
        Tokens that the checkpoint covers.
    history : int32
        Committed rows after the checkpoint.
    undo : int32
        Committed rows that a rollback may still drop without older convolution rows.
    checkpoint : int32
        Checkpoint page, -1 where the slot is free.
    table : int32 [slots, pages per sequence]
        Input pages, -1 where none is held.
    generation : int64
        Even while free, odd while live; moves at alloc and free only.
    busy : bool
        A plan holds the sequence, from plan to commit or abort.
    given : bool
        A seed or an import gave the state, which then need not be zero at token 0.
    unnamed : int
        Device plans in progress whose sequences only the device knows.
    """

    def __init__(self, slots: int, pages_per_sequence: int) -> None:
        self.slots = slots
        self.base = np.zeros(slots, dtype=np.int64)
        self.history = np.zeros(slots, dtype=np.int32)
        self.undo = np.zeros(slots, dtype=np.int32)
        self.checkpoint = np.full(slots, -1, dtype=np.int32)
        self.table = np.full((slots, pages_per_sequence), -1, dtype=np.int32)
        self.generation = np.zeros(slots, dtype=np.int64)
        self.busy = np.zeros(slots, dtype=bool)
        self.given = np.zeros(slots, dtype=bool)
        self.asleep = False
        self.unnamed = 0
        self._tag = next(_tag_counter) % _TAGS
        self._live_prefix = np.full(slots, _FREE, dtype=np.int64)  # handle >> slot bits
        self._stamp = np.zeros(slots, dtype=np.int64)
        self._retired = 0  # the highest generation of a slot that `resize` cut off

    def open(self, slots: NDArray[np.int32]) -> list[SequenceId]:
        """Make free slots live and return their new handles."""
        self.generation[slots] = (self.generation[slots] + 1) & _GENERATION_MASK
        self.base[slots] = 0
        self.history[slots] = 0
        self.undo[slots] = 0
        self.given[slots] = False
        self.table[slots] = -1
        prefix = (self._tag << _GENERATION_BITS) | self.generation[slots]
        self._live_prefix[slots] = prefix
        handles: list[SequenceId] = ((prefix << _SLOT_BITS) | slots).tolist()
        return handles

    def close(self, slots: SlotArray) -> None:
        """Make live slots free; their handles go stale."""
        self.generation[slots] = (self.generation[slots] + 1) & _GENERATION_MASK
        self._live_prefix[slots] = _FREE
        self.checkpoint[slots] = -1
        self.table[slots] = -1

    @property
    def live(self) -> SlotArray:
        """The slots in use."""
        return np.flatnonzero(self._live_prefix >= 0)

    def resolve(
        self, sequences: Sequence[int] | NDArray[np.int64] | int, *, on_device: bool = False
    ) -> SlotArray:
        """Slots of live handles, in order.

        Parameters
        ----------
        on_device : bool
            For a plan on the device, which may be made beside plans of unnamed sequences.

        Raises
        ------
        StaleHandleError
            A handle that was freed, or that another pool gave out.
        InputError
            Not handles at all, or one of them twice.
        PlanError
            A sequence that a plan holds, or may hold.
        """
        self.require_awake()
        try:
            handles = np.asarray(sequences)
        except ValueError:  # lists of several lengths
            handles = np.asarray(sequences, dtype=object)
        if handles.ndim == 0:
            handles = handles[None]
        if handles.size == 0:
            return np.empty(0, dtype=np.int64)
        if handles.dtype != np.int64 or handles.ndim != 1:
            raise InputError(
                f"sequences: got {handles.dtype} {list(handles.shape)}; allowed a flat list or "
                "int64 array of handles; pass what alloc or fork returned"
            )
        slots = handles & _SLOT_MASK
        known = slots < self.slots
        if not known.all() or not (self._live_prefix[slots] == (handles >> _SLOT_BITS)).all():
            self._refuse_handle(handles.tolist())
        order = np.arange(slots.size)
        self._stamp[slots] = order
        if not (self._stamp[slots] == order).all():
            twice = handles[self._stamp[slots] != order][0]
            raise InputError(
                f"sequences: got {self.describe(int(twice))} twice; allowed each once; "
                "remove the duplicate"
            )
        if self.busy[slots].any():
            held = int(handles[self.busy[slots]][0])
            raise PlanError(
                f"sequences: got {self.describe(held)}, which a plan holds; allowed after that "
                "plan's commit or abort; finish the step first"
            )
        if self.unnamed and not on_device:
            raise PlanError(
                f"sequences: got {self.describe(int(handles[0]))} while a plan made from a device "
                "tensor is in progress, which may hold it; allowed after its commit or abort; "
                "finish the step first"
            )
        return slots

    def one(self, sequence: int) -> int:
        """The slot of one live handle that no plan holds."""
        return int(self.resolve([_as_int(sequence)])[0])

    def peek(self, sequence: int) -> int:
        """As `one`, but a plan may hold the sequence: for reading only."""
        self.require_awake()
        handle = _as_int(sequence)
        slot = handle & _SLOT_MASK
        if slot >= self.slots or self._live_prefix[slot] != handle >> _SLOT_BITS:
            self._refuse_handle([handle])
        return slot

    def handles(self, slots: SlotArray) -> list[SequenceId]:
        """The handles of live slots."""
        values: list[SequenceId] = ((self._live_prefix[slots] << _SLOT_BITS) | slots).tolist()
        return values

    def handle_or_none(self, slots: SlotArray | NDArray[np.int32]) -> NDArray[np.int64]:
        """The handles of slots, -1 where they are free."""
        prefix = self._live_prefix[slots]
        handles: NDArray[np.int64] = np.where(prefix < 0, -1, (prefix << _SLOT_BITS) | slots)
        return handles

    def resize(self, slots: int) -> None:
        """Change the number of slots; those cut off must be free."""
        keep = min(slots, self.slots)
        # A slot that comes back starts above all that was cut off, or old handles would live again.
        self._retired = int(self.generation[keep:].max(initial=self._retired))
        for name in (
            "base", "history", "undo", "checkpoint", "table", "generation", "busy", "given",
        ):  # fmt: skip
            old = getattr(self, name)
            fill = {"checkpoint": -1, "table": -1, "generation": self._retired}.get(name, 0)
            new = np.full((slots, *old.shape[1:]), fill, dtype=old.dtype)
            new[:keep] = old[:keep]
            setattr(self, name, new)
        prefix = np.full(slots, _FREE, dtype=np.int64)
        prefix[:keep] = self._live_prefix[:keep]
        self._live_prefix = prefix
        self._stamp = np.zeros(slots, dtype=np.int64)
        self.slots = slots

    def require_awake(self) -> None:
        """Raise where the pool has given its memory back."""
        if self.asleep:
            raise PlanError(
                "pool: got a call while it sleeps; allowed awake; call pool.wake() first"
            )

    def describe(self, handle: int) -> str:
        generation = (handle >> _SLOT_BITS) & _GENERATION_MASK
        return f"sequence {handle} (slot {handle & _SLOT_MASK}, generation {generation})"

    def _refuse_handle(self, handles: Iterable[int]) -> NoReturn:
        for handle in handles:
            slot = handle & _SLOT_MASK
            if handle >= 0 and handle >> (_SLOT_BITS + _GENERATION_BITS) != self._tag:
                raise StaleHandleError(
                    f"sequence: got {handle}, which is no handle of this pool; allowed handles "
                    "that its alloc or fork returned; use the pool that made it"
                )
            if handle < 0 or slot >= self.slots:
                raise StaleHandleError(
                    f"sequence: got {handle}; allowed handles that alloc or fork returned; "
                    "leave pads out, the bucket adds them"
                )
            if self._live_prefix[slot] != handle >> _SLOT_BITS:
                raise StaleHandleError(
                    f"sequence: got {self.describe(handle)}, which was freed; allowed live "
                    "handles; drop it after free"
                )
        raise AssertionError("every handle was live")


def _as_int(sequence: int) -> int:
    if isinstance(sequence, bool) or not isinstance(sequence, (int, np.integer)):
        raise InputError(
            f"sequence: got {type(sequence).__name__}; allowed one handle (an int); "
            "pass what alloc or fork returned"
        )
    return int(sequence)
