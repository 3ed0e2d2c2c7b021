"""Arrivals through the real planner and pools, on a CPU and without a model."""

from .outcome import Outcome, plot
from .pool import id_pool
from .run import simulate
from .trace import ARRIVALS, Trace, make_trace, read_trace

__all__ = [
    "ARRIVALS",
    "Outcome",
    "Trace",
    "id_pool",
    "make_trace",
    "plot",
    "read_trace",
    "simulate",
]
