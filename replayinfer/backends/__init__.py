"""Backends: who executes a plan."""

from .base import Backend, PrefillBackend, ShiftedConvolution
from .registry import available, register, select, select_prefill

__all__ = [
    "Backend",
    "PrefillBackend",
    "ShiftedConvolution",
    "available",
    "register",
    "select",
    "select_prefill",
]
