"""The plan that a device planner returns: device arrays, and what the host can read from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..pools import StatePool
from .device_step import DeviceStep
from .plan import Plan
from .trees import parents_of

__all__ = ["DevicePlan"]


class DevicePlan(Plan):
    """A plan that lies on the device.

    ``batch`` counts entries; only the device knows which of them are pads. What a host plan knows
    besides (``slots``, ``windows``, ``starts``, ``fold``, ``parents``, ...) is read from the device
    when it is first asked for, which waits for it.
    """

    def __init__(
        self,
        pool: StatePool,
        step: DeviceStep,
        *,
        batch: int,
        bucket: int,
        window: int,
        held: NDArray[np.int64] | None,
        direct: bool = False,
        taken: NDArray[np.int32] | None = None,
        tree: bool = False,
        known: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
    ) -> None:
        self.pool = pool
        self.step = step
        self.arrays = step.arrays
        self.batch, self.bucket, self.window = batch, bucket, window
        self.held = held  # slots, where the host knows them
        self.taken = taken  # tokens of a direct step by entry, where the host knows them
        self.known = known  # parents and windows of trees, where the host knows them
        self._tree = tree
        self._parents: NDArray[np.int32] | None = None
        self.direct = direct
        self.state = "planned"
        self.layers_run = set()
        self.layers_convolved = set()

    def __repr__(self) -> str:
        return f"DevicePlan(bucket={self.bucket}, window={self.window}, state={self.state!r})"

    def __getattr__(self, name: str) -> Any:
        if name not in _READ:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._read()
        return self.__dict__[name]

    @property
    def moved(self) -> bool:
        """Whether a direct step has begun; its windows, which only the device knows, may be 0."""
        return self.direct and bool(self.layers_run)

    @property
    def tree(self) -> bool:
        """Whether the windows are draft trees; nothing is read for it."""
        return self._tree

    @property
    def parents(self) -> NDArray[np.int32] | None:  # type: ignore[override]  # read when asked for
        """As in `Plan`, from the masks that the kernels read."""
        if self._tree and self._parents is None:
            self._parents = parents_of(self._host(self.arrays.ancestors), self.window)
        return self._parents

    def ring_places(self) -> NDArray[np.int64]:
        return self._host(self.arrays.conv_place).astype(np.int64)

    def _host(self, array: torch.Tensor) -> NDArray[Any]:
        values: NDArray[Any] = array[: self.batch].cpu().numpy().copy()  # not a view, on a CPU
        return values

    def _read(self) -> None:
        arrays = self.arrays
        count = int(arrays.fold_count)
        self.handles = self._host(self.step.handle)
        self.slots = self._host(arrays.slot).astype(np.int64)
        self.windows = self._host(arrays.window)
        self.starts = self._host(arrays.history)
        self.pages = self._host(arrays.page)
        self.table = self._host(arrays.table)
        # A page belongs to one sequence once the folds are done, so it names its row.
        targets = arrays.fold_target[:count].cpu().numpy()
        order = np.argsort(self.pages, kind="stable")
        self.fold_index = order[np.searchsorted(self.pages, targets, sorter=order)]
        self.fold = np.zeros(self.batch, dtype=bool)
        self.fold[self.fold_index] = True
        self.fold_rows = self.starts.copy()
        self.fold_rows[self.fold_index] = arrays.fold_rows[:count].cpu().numpy()


_READ = frozenset(
    {
        "handles", "slots", "windows", "starts", "pages", "table",
        "fold", "fold_index", "fold_rows",
    }
)  # fmt: skip
