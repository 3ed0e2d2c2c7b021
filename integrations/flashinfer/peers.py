"""FlashInfer's attention wrappers as the planner sees them: told apart by name, never imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from replayinfer import InputError, UnsupportedError

from .attention import PagedAttentionWrapper
from .metadata import StepMetadata

__all__ = ["AttentionShape", "kind_of", "plan_attention"]

Kind = Literal["decode", "prefill", "holistic"]

_KINDS: dict[str, Kind] = {
    "BatchDecodeWithPagedKVCacheWrapper": "decode",
    "BatchPrefillWithPagedKVCacheWrapper": "prefill",
    "BatchAttention": "holistic",
}


@dataclass(frozen=True)
class AttentionShape:
    """What the attention layers of a model share.

    Attributes
    ----------
    num_qo_heads, num_kv_heads, head_dim : int
    q_dtype, kv_dtype : torch.dtype
        Of queries and pages.
    sm_scale : float, optional
        ``1 / sqrt(head_dim)`` if omitted.
    window_left : int
        Keys before its own that a query sees; -1: all.
    logits_soft_cap : float
        0: none.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0


def kind_of(wrapper: Any) -> Kind:
    """Which of the calls `wrapper` takes; its subclasses take them too."""
    if isinstance(wrapper, PagedAttentionWrapper):
        return "prefill"
    for base in type(wrapper).__mro__:
        if base.__name__ in _KINDS:
            return _KINDS[base.__name__]
    raise UnsupportedError(
        f"attention_wrapper: got {type(wrapper).__name__}; allowed {', '.join(_KINDS)} or "
        "PagedAttentionWrapper; plan others from StepMetadata yourself"
    )


def require_step(kind: Kind, meta: StepMetadata, shape: AttentionShape) -> None:
    """Refuse what a wrapper of this kind cannot say, before anything is planned."""
    if kind == "decode" and meta.packed and (meta.windows != 1).any():
        raise InputError(
            f"meta: got a packed step of windows {meta.windows.tolist()} for a decode wrapper; "
            "allowed a padded step, or one token each; use a prefill wrapper, or packed=False"
        )
    if kind == "holistic" and shape.window_left >= 0:
        raise UnsupportedError(
            f"window_left: got {shape.window_left} for BatchAttention; allowed -1, it has no "
            "sliding window; use the prefill wrapper"
        )


def plan_attention(
    kind: Kind, wrapper: Any, meta: StepMetadata, shape: AttentionShape, options: dict[str, Any]
) -> None:
    """Plan one step.

    Offsets and lengths go as host tensors, which their planners read without waiting for the
    device; page ids go as device tensors, which graph-mode wrappers copy without waiting either.
    """
    host, ids = meta.host, meta.device.kv_indices
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    common: dict[str, Any] = {
        "sm_scale": shape.sm_scale,
        "logits_soft_cap": shape.logits_soft_cap,
        "q_data_type": shape.q_dtype,
        "kv_data_type": shape.kv_dtype,
    }
    if kind == "holistic":
        wrapper.plan(
            host.qo_indptr, host.kv_indptr, ids, host.kv_len,
            *heads, shape.head_dim, meta.page_size, causal=True, **common, **options,
        )  # fmt: skip
        return
    common |= {
        "window_left": shape.window_left,
        "non_blocking": True,
        "seq_lens": host.kv_len,
    }
    if kind == "decode":
        wrapper.plan(
            host.kv_indptr, ids, host.last_page_len, *heads, meta.page_size,
            q_len_per_req=1 if meta.packed else meta.window, **common, **options,
        )  # fmt: skip
        return
    if not meta.packed:
        common["uniform_q_len"] = meta.window
    wrapper.plan(
        host.qo_indptr, host.kv_indptr, ids, host.last_page_len, *heads, meta.page_size,
        causal=True, **common, **options,
    )  # fmt: skip
