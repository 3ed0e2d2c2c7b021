"""Which server arguments are served; what is not is refused with one line, before the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replayinfer import UnsupportedError

__all__ = ["BACKEND", "chosen", "require_supported"]

BACKEND = "replayinfer"
_FLAG = f"--linear-attn-decode-backend {BACKEND}"


_SPECULATIVE = ("EAGLE", "EAGLE3", "NEXTN", "NGRAM")
_LONGEST_WINDOW = 16


def _graph(config: Any, phase: str) -> str | None:
    """The backend of a phase's graphs in SGLang's ``cuda_graph_config``."""
    return getattr(getattr(config, phase, None), "backend", None)


# Argument, when it is refused, why, and what to do.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "speculative_algorithm", lambda v: v not in (None, *_SPECULATIVE),
        f"{', '.join(_SPECULATIVE)}, whose drafts are chains of one length",
        "use one of them or drop --speculative-algorithm",
    ),
    (
        "speculative_eagle_topk", lambda v: v not in (None, 1),
        "chains of drafts, one candidate a step: rows of a tree are not in the order of a sequence",
        "use --speculative-eagle-topk 1, and --speculative-ngram-max-bfs-breadth 1 with NGRAM",
    ),
    (
        "speculative_num_draft_tokens", lambda v: v is not None and v > _LONGEST_WINDOW,
        f"windows of up to {_LONGEST_WINDOW} tokens",
        "draft fewer",
    ),
    (
        "speculative_adaptive", bool,
        "windows of one length: another would need graphs and plans of its own",
        "drop --speculative-adaptive",
    ),
    (
        "enable_multi_layer_eagle", bool,
        "one draft model: the heads of several have state pools of their own",
        "drop --enable-multi-layer-eagle",
    ),
    (
        "disaggregation_mode", lambda v: v not in (None, "null"),
        "no disaggregation: the transfer lists state slots without their rows",
        "serve prefill and decode in one server",
    ),
    (
        "enable_unified_memory", bool,
        "no unified memory: its pool calls none of the slot hooks that our rows follow",
        "drop --enable-unified-memory",
    ),
    (
        "enable_page_major_kv_layout", bool,
        "no page-major layout: the states of a layer are not contiguous there",
        "drop --enable-page-major-kv-layout",
    ),
    (
        "enable_int8_mamba_checkpoint", bool,
        "no int8 checkpoint pool: it reads states that lag behind their rows",
        "drop --enable-int8-mamba-checkpoint",
    ),
    (
        "enable_linear_replayssm", bool,
        "one replay at a time: SGLang's own keeps rings of its own",
        "drop --enable-linear-replayssm",
    ),
    (
        "enable_linear_replayssm_spec", bool,
        "one replay at a time: SGLang's own keeps rings of its own",
        "drop --enable-linear-replayssm-spec",
    ),
    (
        "enable_hierarchical_cache", bool,
        "no hierarchical cache: it copies states to the host without their rows",
        "drop --enable-hierarchical-cache",
    ),
    (
        "enable_lmcache", bool,
        "no LMCache: it copies states without their rows",
        "drop --enable-lmcache",
    ),
    (
        "radix_cache_backend", lambda v: v is not None,
        "the built-in radix cache only: another may read states that lag behind their rows",
        "drop --radix-cache-backend",
    ),
    (
        "enable_memory_saver", bool,
        "no memory saver: our rows would outlive the states that it releases",
        "drop --enable-memory-saver",
    ),
    (
        "enable_mamba_cache_stochastic_rounding", bool,
        "a fold rounds to nearest",
        "drop --enable-mamba-cache-stochastic-rounding",
    ),
    ("pp_size", lambda v: v not in (None, 1), "one pipeline stage", "use --tp-size instead"),
    (
        "enable_two_batch_overlap", bool,
        "one plan a step, which two half-batches do not have",
        "drop --enable-two-batch-overlap",
    ),
    (
        "enable_pdmux", bool,
        "one plan a step, which multiplexed streams do not have",
        "drop --enable-pdmux",
    ),
    (
        "use_ray", bool,
        "no Ray: its actors load no plugins, so the decode would silently be SGLang's own",
        "drop --use-ray",
    ),
    (
        "cuda_graph_config", lambda v: _graph(v, "decode") == "breakable",
        "decode graphs in one piece: a broken one loses the step's plan between its pieces",
        "use --cuda-graph-backend-decode full",
    ),
    (
        "cuda_graph_config", lambda v: _graph(v, "prefill") == "full",
        "prefill graphs in pieces, or none: one in one piece has no room for the folds before it",
        "use --cuda-graph-backend-prefill breakable",
    ),
    (
        "debug_cuda_graph", bool,
        "decode graphs in one piece: a broken one loses the step's plan between its pieces",
        "drop --debug-cuda-graph",
    ),
    (
        "device", lambda v: v not in (None, "cuda", "cpu"),
        "NVIDIA GPUs, and a CPU for tests",
        "use --device cuda",
    ),
)  # fmt: skip

_ONLY_DECODE = (
    "linear_attn_backend",
    "linear_attn_prefill_backend",
    "linear_attn_verify_backend",
)


def chosen(arguments: Any) -> bool:
    """Whether any linear-attention flag of these server arguments names us."""
    names = ("linear_attn_decode_backend", *_ONLY_DECODE)
    return any(getattr(arguments, name, None) == BACKEND for name in names)


def require_supported(arguments: Any) -> None:
    """Refuse server arguments (resolved ones) that replay cannot serve.

    Raises
    ------
    UnsupportedError
        One line: what was given, what is allowed and why, what to do.
    """
    for name in _ONLY_DECODE:
        if getattr(arguments, name, None) == BACKEND:
            raise UnsupportedError(
                f"{_flag(name)}: got {BACKEND}; allowed for decode alone: prefill is SGLang's "
                f"own, and verify goes with decode; use {_FLAG}"
            )
    for name, refused, why, advice in _REFUSED:
        value = getattr(arguments, name, None)
        if refused(value):
            got = f" {value}" if isinstance(value, (str, int)) and value is not True else ""
            raise UnsupportedError(
                f"{_FLAG}: got {_flag(name)}{got}; allowed {why}; {advice}, or serve with another "
                "decode backend"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
