"""Programmatic dependent launch: a kernel starts while the one before it still drains."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["launch_dependents", "wait_for_previous"]


@triton.jit
def launch_dependents():
    """Let the next kernel, if it was launched with ``launch_pdl=True``, start its prologue.

    Called after `wait_for_previous`, so that a kernel which has started may rely on everything but
    the one kernel right before it.
    """
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the kernel before this one is complete and its writes are visible."""
    gdc_wait()
