"""Standard decode kernels of installed peers: they read and write every state in every token.

Their kernels for windows of drafts read it once, and write one per token to choose from.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, MutableMapping
from typing import Literal

import torch

from ...spec import LayerSpec
from . import delta, mamba2
from .base import Bound, Peer, Variant

__all__ = ["Bound", "Peer", "Scope", "Variant", "describe", "peers_of", "standard_kernels"]

Scope = Literal["ssm", "mixer"]
"""What a row times: the state's step alone, or the convolution before it as well."""

_PEERS: dict[tuple[str, str], tuple[Peer, ...]] = {
    ("mamba2", "ssm"): mamba2.STEPS,
    ("gdn", "ssm"): delta.GDN,
    ("kda", "ssm"): delta.KDA,
    ("mamba2", "mixer"): mamba2.MIXERS,
    ("gdn", "mixer"): delta.MIXERS,
    ("kda", "mixer"): delta.MIXERS,
}
_VERIFIERS: dict[tuple[str, str], tuple[Peer, ...]] = {
    ("mamba2", "ssm"): mamba2.VERIFIERS,
    ("gdn", "ssm"): delta.GDN_VERIFIERS,
    ("kda", "ssm"): delta.KDA_VERIFIERS,
}


def peers_of(family: str, scope: Scope, window: int = 1) -> tuple[Peer, ...]:
    """The peers that have a kernel for a family, whether installed or not."""
    return (_PEERS if window == 1 else _VERIFIERS).get((family, scope), ())


def standard_kernels(
    spec: LayerSpec,
    scope: Scope,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    skipped: MutableMapping[str, str],
    versions: MutableMapping[str, str],
    window: int = 1,
) -> Iterator[Variant]:
    """Every installed peer's kernel for `spec`, in each configuration worth trying.

    A peer that cannot be used goes into `skipped` with the reason; none is left out in silence. The
    versions of the others go into `versions`.
    """
    for peer in peers_of(spec.family, scope, window):
        reason = peer.refuses(spec, dtype, state_dtype)
        if reason is None:
            try:
                variants = list(peer.variants(spec))
            except Exception as error:  # not there, or it does not import on this machine
                reason = f"does not import: {describe(error)}"
            else:
                versions[peer.name] = _version(peer.distribution)
                yield from variants
        if reason is not None:
            skipped[peer.name] = reason


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def describe(error: BaseException) -> str:
    """An exception in one line, without the folders of this machine."""
    text = re.sub(r"(?<![\w.])/(?:[^\s/:]+/)+", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
