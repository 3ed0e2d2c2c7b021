"""Paged state pools: checkpoint pages, input pages, convolution rings, cursors."""

from .capacity import CapacityReport
from .cursors import SequenceId
from .pages import PageAllocator
from .pool import StatePool
from .transfer import SequenceSnapshot

__all__ = ["CapacityReport", "PageAllocator", "SequenceId", "SequenceSnapshot", "StatePool"]
