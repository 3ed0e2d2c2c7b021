"""Triton on a machine without a GPU: its interpreter, switched on before anyone imports Triton."""

from __future__ import annotations

import os
import sys

import torch

__all__ = ["interpret_without_gpu"]

_VARIABLE = "TRITON_INTERPRET"


def interpret_without_gpu(backend: str) -> None:
    """Let ``--backend triton`` run on a CPU, and say so on standard error.

    The variable is only read at Triton's first import: once that has happened it is left alone, and
    the backend's own refusal says what to do.
    """
    if backend != "triton" or torch.cuda.is_available():
        return
    if _VARIABLE in os.environ or "triton" in sys.modules:
        return
    os.environ[_VARIABLE] = "1"
    print(
        f"replayinfer: no CUDA device, so Triton's kernels run in its interpreter ({_VARIABLE}=1): "
        "slow, and right for checking only",
        file=sys.stderr,
    )
