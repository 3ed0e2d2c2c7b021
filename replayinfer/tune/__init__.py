"""Measure launch choices on the machine at hand, offline, and write them as a launch table."""

from .choose import Outcome, choose
from .run import TuneCase, TuneReport, run_tune
from .table import merge_table, read_content, write_content

__all__ = [
    "Outcome",
    "TuneCase",
    "TuneReport",
    "choose",
    "merge_table",
    "read_content",
    "run_tune",
    "write_content",
]
