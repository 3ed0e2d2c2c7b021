"""Backends: who executes a plan."""

from .base import Backend, PrefillBackend
from .registry import available, register, select, select_prefill

__all__ = [
    "Backend",
    "PrefillBackend",
    "available",
    "register",
    "select",
    "select_prefill",
]
