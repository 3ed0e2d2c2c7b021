"""Backends: who executes a plan."""

from .base import Backend, PrefillBackend, ShiftedConvolution
from .convolved import why_not_convolved
from .registry import available, register, select, select_prefill
from .scratch import scratch_bytes

__all__ = [
    "Backend",
    "PrefillBackend",
    "ShiftedConvolution",
    "available",
    "register",
    "scratch_bytes",
    "select",
    "select_prefill",
    "why_not_convolved",
]
