"""The entry point of SGLang's plugin loader, and the hooks that it leaves there.

SGLang logs and swallows what a plugin raises while it loads, and a hook that finds no target. So
every hook is looked for after it was applied, and what is missing is raised from a place where an
exception does stop the server: where the arguments are published.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from importlib import metadata
from typing import Any

from replayinfer import UnsupportedError

from . import arguments

__all__ = ["SUPPORTED_VERSION", "register"]

SUPPORTED_VERSION = "0.5.23"

_PUBLISH = "sglang.srt.runtime_context.publish"
_WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
_SIZING = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache"
_REPORT = (
    "sglang.srt.managers.scheduler_components.metrics_reporter"
    ".SchedulerMetricsReporter.report_decode_stats"
)
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",  # of a session that wrote them from outside
)
_NGRAM = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get"
_MARK = "_replayinfer"

_reason: str | None = None  # why this process cannot serve the flag


def register() -> None:
    """Add ``replayinfer`` to ``--linear-attn-decode-backend``, and wait for somebody to choose it.

    Called by SGLang in every process. It imports nothing that is not loaded anyway.
    """
    global _reason
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _reason = _version_problem()
    HookRegistry.register(_PUBLISH, _marked(_published), HookType.AFTER)
    HookRegistry.apply_hooks()
    if not _took(_PUBLISH):
        _reason = _missing([_PUBLISH])
        logging.getLogger(__name__).error("replayinfer: %s", _reason)
    elif _reason is None:  # only now: nothing would look at a choice that was made
        from sglang.srt.arg_groups.choices import add_linear_attn_kernel_backend_choices

        add_linear_attn_kernel_backend_choices([arguments.BACKEND])


def _version_problem() -> str | None:
    version = metadata.version("sglang")
    if version == SUPPORTED_VERSION:
        return None
    return (
        f"sglang: got {version}; allowed {SUPPORTED_VERSION}, whose inner seams this adapter uses; "
        f"pip install sglang=={SUPPORTED_VERSION}, or serve with another decode backend"
    )


def _published(result: Any, server_args: Any, *, role: str, **options: Any) -> None:
    """After a process's arguments are final, before anything is built from them."""
    if not arguments.chosen(server_args):
        return
    if _reason is not None:
        raise UnsupportedError(_reason)
    from sglang.srt.arg_groups.overrides import resolved_view

    from .options import Options

    resolved = resolved_view(server_args)
    arguments.require_supported(resolved)
    Options.read().require_for(resolved)
    if role == "tokenizer":
        _require_recurrent_layers(server_args)
    if role == "scheduler":
        _apply(resolved.speculative_algorithm)


def _require_recurrent_layers(server_args: Any) -> None:
    """In the first process, so that none is started for a model that has none."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from .backends import family_of

    family_of(model_config_of(server_args))


def _apply(speculative: str | None = None) -> None:
    """The hooks of a process that runs the model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import backends, speculation

    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (_WRAPPER, backends.wrap_attention_backend, HookType.AROUND),
        (_SIZING, _size, HookType.AROUND),
        (_REPORT, _report, HookType.AFTER),
        *((_UPDATER + name, _bind_again, HookType.AFTER) for name in _UPDATES),
    ]
    if speculative == "NGRAM":
        hooks.append((_NGRAM, speculation.only_chains, HookType.AROUND))
    if _took(_WRAPPER):  # published twice
        return
    if speculative is not None:
        _set_pool(speculation.pool_class)
    for target, hook, kind in hooks:
        HookRegistry.register(target, _marked(hook), kind)
    HookRegistry.apply_hooks()
    if missing := [target for target, _, _ in hooks if not _took(target)]:
        raise UnsupportedError(_missing(missing))


def _set_pool(make: Callable[[Any], type[Any]]) -> None:
    """The class of state pools, in the place that SGLang has for it."""
    requests = pkgutil.resolve_name("sglang.srt.mem_cache.memory_pool").HybridReqToTokenPool
    requests.mamba_pool_cls = make(requests.mamba_pool_cls)


def _size(original: Callable[..., float], configurator: Any, rest: float) -> float:
    """Around SGLang's division of the memory: what our part of a state slot takes."""
    from .backends import charge
    from .speculation import size_pool

    if configurator.is_draft_worker:
        return original(configurator, rest)
    configurator.extra_mamba_cache_bytes_per_req = charge(configurator)
    return size_pool(original, configurator, rest)


def _report(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    """A line beside SGLang's own, as often."""
    from .backends import current

    replay = current()
    if replay is None or reporter.forward_ct_decode % reporter.decode_log_interval:
        return
    if reporter.is_stats_logging_rank:
        counts = replay.counters()
        saved = counts.pop("bytes saved") / 2**30
        said = ", ".join(f"{name}: {value}" for name, value in counts.items())
        logging.getLogger("sglang.srt.replayinfer").info(
            "Replay, %s, state traffic saved: %.3f GiB", said, saved
        )


def _bind_again(*args: Any, **kwargs: Any) -> None:
    """After weights were updated in place: folds and readouts use copies of some."""
    from .backends import current

    if (replay := current()) is not None:
        replay.bind()


def _marked(hook: Callable[..., Any]) -> Callable[..., Any]:
    setattr(hook, _MARK, True)
    return hook


def _took(target: str) -> bool:
    """Whether a hook of ours is on `target`: SGLang's wrappers hold them in their closures."""
    home, _, name = target.rpartition(".")
    try:
        function = getattr(pkgutil.resolve_name(home), name)
    except (AttributeError, ImportError):
        return False
    while function is not None:
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        if any(getattr(cell, _MARK, False) for cell in cells if callable(cell)):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _missing(targets: list[str]) -> str:
    return (
        f"sglang: got {metadata.version('sglang')} without {', '.join(targets)} to hook; allowed "
        f"{SUPPORTED_VERSION} as released; reinstall it, or serve with another decode backend"
    )
