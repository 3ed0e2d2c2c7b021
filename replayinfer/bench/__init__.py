"""Timings on the user's own GPU, against whichever peers are installed there."""

from .run import BenchCase, BenchReport, run_bench

__all__ = ["BenchCase", "BenchReport", "run_bench"]
