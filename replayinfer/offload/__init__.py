"""Sequences outside device memory: files."""

from .file import load_sequence, save_sequence

__all__ = ["load_sequence", "save_sequence"]
