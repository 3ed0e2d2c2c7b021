"""Backends: who executes a plan."""

from .base import Backend
from .registry import available, register, select

__all__ = ["Backend", "available", "register", "select"]
