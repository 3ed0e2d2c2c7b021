"""What the reader of one family returns, and what several families share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..base import LayerSpec
from .attention import AttentionSpec, LatentAttentionSpec
from .fields import Fields
from .kinds import Kind

__all__ = ["Parts", "grouped_attention"]


@dataclass(frozen=True)
class Parts:
    """A model's layers before they are counted off: one shape for each kind of layer."""

    kinds: tuple[Kind, ...]
    ssm: LayerSpec
    attention: AttentionSpec | LatentAttentionSpec | None
    hidden_size: int
    vocab_size: int
    state_dtype: torch.dtype | None = None
    conv_bias: bool = False
    gate_in_readout: bool = False
    notes: tuple[str, ...] = ()


def grouped_attention(
    fields: Fields,
    heads: int,
    kv_heads: int | None,
    *,
    hidden: int,
    head_dim: int | None = None,
) -> AttentionSpec:
    """Grouped-query attention from its usual fields.

    Parameters
    ----------
    heads, kv_heads
        The class's defaults; no `kv_heads`, or a null in the config, means as many as `heads`.
    head_dim
        Where the family has settled it. Otherwise the config's own, else ``hidden // heads``.
    """
    count = fields.integer("num_attention_heads", heads)
    if fields.has("num_key_value_heads") or kv_heads is None:
        kv_heads = fields.optional_integer("num_key_value_heads") or count
    fields.require_divisor("num_key_value_heads", kv_heads, "num_attention_heads", count)
    if head_dim is None:
        head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        fields.require_divisor("num_attention_heads", count, "hidden_size", hidden)
        head_dim = hidden // count
    return AttentionSpec(count, kv_heads, head_dim)
