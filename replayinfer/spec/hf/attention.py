"""The attention layers of a hybrid model: what they keep per token, and a shard's part of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ...checks import positive_int
from ...errors import InputError

__all__ = ["AttentionSpec", "LatentAttentionSpec"]


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention over keys and values of `kv_heads` heads.

    Examples
    --------
    >>> AttentionSpec(heads=32, kv_heads=2, head_dim=128).kv_bytes(torch.bfloat16)
    1024
    """

    heads: int
    kv_heads: int
    head_dim: int

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that one token leaves in the cache of one layer."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize

    def shard(self, rank: int, size: int) -> AttentionSpec:
        """The part of tensor-parallel rank `rank` of `size`; too few key/value heads replicate."""
        _check_rank(rank, size)
        _check_heads(self.heads, size)
        if self.kv_heads % size and size % self.kv_heads:
            raise InputError(
                f"size: got {size}; allowed a divisor or a multiple of kv_heads={self.kv_heads}; "
                "use another tensor-parallel size"
            )
        return dataclasses.replace(
            self, heads=self.heads // size, kv_heads=max(self.kv_heads // size, 1)
        )


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention: one latent of `kv_lora_rank` and one key of `rope_dim` a token.

    Expanded keys are `nope_dim` + `rope_dim` long, values `value_dim`; the cache holds neither.
    """

    heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_lora_rank: int | None = None

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that one token leaves in the cache of one layer."""
        return (self.kv_lora_rank + self.rope_dim) * dtype.itemsize

    def shard(self, rank: int, size: int) -> LatentAttentionSpec:
        """The part of tensor-parallel rank `rank` of `size`: its heads and the whole latent."""
        _check_rank(rank, size)
        _check_heads(self.heads, size)
        return dataclasses.replace(self, heads=self.heads // size)


def _check_rank(rank: int, size: int) -> None:
    positive_int("size", size)
    positive_int("rank", rank, minimum=0, maximum=size - 1)


def _check_heads(heads: int, size: int) -> None:
    if heads % size:
        raise InputError(
            f"size: got {size}; allowed a divisor of the {heads} attention heads; use another "
            "tensor-parallel size"
        )
