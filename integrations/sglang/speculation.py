"""Speculative decoding of linear chains: what SGLang keeps for a verify, and what we need of it.

SGLang's verify writes the recurrent state after each draft token, and copies the last accepted one
back. Ours writes the rows of the window beside the slot and moves its cursor, so of that memory
only the convolution windows are left, which are SGLang's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["accept", "only_chains", "pool_class", "size_pool", "window", "window_bytes"]

_POOL = "sglang.srt.mem_cache.memory_pool"
_SIZING = "sglang.srt.mem_cache.kv_cache_configurator"
_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"


def window() -> int:
    """Tokens of a sequence in a verify step of this process's server; 1 without speculation."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return int(spec.speculative_num_draft_tokens) if spec.speculative_algorithm else 1


# Memory -------------------------------------------------------------------------------------------


def pool_class(theirs: Any) -> type[Any]:
    """SGLang's `MambaPool` without a state for each draft token of each request."""

    class ReplayMambaPool(theirs):
        mamba_cache: Any

        def __init__(self, **sizes: Any) -> None:
            drafts = sizes.get("speculative_num_draft_tokens")
            super().__init__(**{**sizes, "speculative_num_draft_tokens": None})
            if drafts is None:
                return
            windows = _windows(theirs, sizes)
            for name in ("conv_window_axis", "_intermediate_conv_window_phys"):
                setattr(self, name, getattr(windows, name))
            self.mamba_cache = self.SpeculativeState(
                **vars(self.mamba_cache),
                intermediate_ssm=windows.mamba_cache.intermediate_ssm,  # of no elements
                intermediate_conv_window=windows.mamba_cache.intermediate_conv_window,
            )
            self.mem_usage += windows.mem_usage

    ReplayMambaPool.__name__ = ReplayMambaPool.__qualname__ = f"Replay{theirs.__name__}"
    return ReplayMambaPool


def _windows(pool: Any, sizes: dict[str, Any]) -> Any:
    """A pool of theirs with the convolution windows of a verify, and next to nothing else."""
    params = sizes["cache_params"]
    shape = dataclasses.replace(params.shape, temporal=(0, 0, 0))
    log = logging.getLogger(_POOL)
    with _set(log, "disabled", True):  # it would report a cache of no slots
        return pool(
            **{**sizes, "size": 0, "cache_params": dataclasses.replace(params, shape=shape)}
        )


def window_bytes(configurator: Any, requests: int) -> int:
    """What the convolution windows of a verify of `requests` take; 0 without speculation."""
    if configurator.spec_algorithm.is_none():
        return 0
    from sglang.srt.runtime_context import get_spec

    pool = importlib.import_module(_POOL).MambaPool
    windows = _windows(
        pool,
        {
            "spec_state_size": requests,
            "cache_params": configurator.mambaish_config.mamba2_cache_params,
            "mamba_layer_ids": configurator.mambaish_config.mamba2_cache_params.layers,
            "device": "meta",
            "speculative_num_draft_tokens": window(),
            "speculative_eagle_topk": get_spec().speculative_eagle_topk,
        },
    )
    return sum(int(t.nbytes) for t in windows._intermediate_conv_window_phys)


def size_pool(original: Callable[..., float], configurator: Any, rest: float) -> float:
    """Around ``_handle_max_mamba_cache``: how much of `rest` GiB is left beside the state slots.

    SGLang would hold back a state and a convolution window for each draft token of each request.
    It is told that it needs neither, and that it has so much less as the windows take.
    """
    from sglang.srt.runtime_context import get_schedule

    if configurator.spec_algorithm.is_none():
        return original(configurator, rest)
    most = max(1, get_schedule().max_running_requests // configurator.attn_dp_size)
    reserved = window_bytes(configurator, most)
    sizing = importlib.import_module(_SIZING)
    with _set(sizing, "_pd_prefill_skips_mamba_spec_state", lambda: True):
        left = original(configurator, rest - reserved / 2**30)
    # The slots that were found may allow fewer requests.
    fewer = get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio()
    return left + (reserved - window_bytes(configurator, min(most, fewer))) / 2**30


@contextlib.contextmanager
def _set(home: Any, name: str, value: Any) -> Iterator[None]:
    given = getattr(home, name)
    setattr(home, name, value)
    try:
        yield
    finally:
        setattr(home, name, given)


# A verify step ------------------------------------------------------------------------------------


def accept(
    hybrid: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    model: Any,
    req_pool_indices: torch.Tensor | None = None,
) -> None:
    """In the place of ``update_mamba_state_after_mtp_verify``.

    The convolutions, and the side states of some models, go back to the last accepted token as
    SGLang does it; the recurrences by their cursors.
    """
    linear = hybrid.linear_attn_backend
    slots = linear.forward_metadata.mamba_cache_indices
    caches = linear.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    convolutions = SimpleNamespace(
        conv=caches.conv,
        intermediate_conv_window=caches.intermediate_conv_window,
        temporal=caches.temporal[:0],
        intermediate_ssm=None,
    )
    given = (
        slots[: last_correct_step_indices.shape[0]],
        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
    )
    scatter = importlib.import_module(_SCATTER).scatter_mamba_states_after_mtp_verify
    scatter(convolutions, *given)
    hybrid._update_ple_state_after_mtp_verify(*given)
    linear.replay.accept(slots.shape[0], *given[1:])


# Drafts -------------------------------------------------------------------------------------------


def only_chains(
    original: Callable[..., tuple[NDArray[Any], NDArray[Any]]],
    corpus: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Around ``NgramCorpus.batch_get``: of each tree its deepest path.

    Even with a breadth of 1 it gives trees, since suffixes of several lengths may go on in several
    ways, and since it fills a window up with children of the root.
    """
    drafts, masks = original(corpus, *args, **kwargs)
    nodes = int(corpus.draft_token_num)
    tokens, trees = drafts.reshape(-1, nodes), masks.reshape(-1, nodes, nodes)
    chains = np.zeros_like(tokens)
    for chain, own, tree in zip(chains, tokens, trees, strict=True):
        path = np.flatnonzero(tree[tree.astype(bool).sum(-1).argmax()])  # parents come first
        chain[: path.size] = own[path]
    ancestors = np.tri(nodes, dtype=masks.dtype)[None].repeat(len(tokens), 0)
    return chains.reshape(drafts.shape), ancestors.reshape(masks.shape)
