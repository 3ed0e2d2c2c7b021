"""What a model's config says about its layers, in this library's terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...errors import UnsupportedError
from ...formats import CheckpointFormat
from ..base import LayerSpec
from .attention import AttentionSpec, LatentAttentionSpec

__all__ = ["ModelLayers"]

_LETTERS = {"mamba2": "M", "gdn": "G", "kda": "K"}


@dataclass(frozen=True)
class ModelLayers:
    """Which layers of a model are recurrent, which attend, and with what shapes.

    Attributes
    ----------
    model_type : str
        As the config has it, of the text model where configs are nested.
    layers : int
        How many layers; each is recurrent, attends, does both, or neither (a feed-forward layer).
    ssm : mapping of int to LayerSpec
        The recurrent layers by model layer index. `dt_limit` is the config's own limit.
    attention : mapping of int to AttentionSpec or LatentAttentionSpec
        The attention layers by model layer index. A layer in both mappings does both.
    hidden_size, vocab_size : int
    dtype : torch.dtype or None
        Of the activations, where the config says it.
    state_dtype : torch.dtype or None
        What the config asks the recurrent state to be kept in, where it says so.
    conv_bias : bool
        Whether the convolutions of the recurrent layers have a bias.
    gate_in_readout : bool
        Whether the output of a recurrent layer is multiplied by ``silu(z)`` right after the
        readout, so that `z` may go into it; otherwise the gate belongs to a norm that follows.
    notes : tuple of str
        What the specifications cannot say.
    """

    model_type: str
    layers: int
    ssm: Mapping[int, LayerSpec]
    attention: Mapping[int, AttentionSpec | LatentAttentionSpec]
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    conv_bias: bool = False
    gate_in_readout: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ssm", "attention"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def spec(self) -> LayerSpec:
        """The one specification of all recurrent layers, as a `StatePool` takes it.

        Raises
        ------
        UnsupportedError
            There is no recurrent layer, or they differ.
        """
        specs = set(self.ssm.values())
        if not specs:
            raise UnsupportedError(
                f"layers: got {self.layers} without a recurrence; allowed at least one recurrent "
                "layer; serve this model without replay"
            )
        if len(specs) > 1:
            raise UnsupportedError(
                f"layers: got recurrent layers of {len(specs)} shapes; allowed one shape; "
                "make a pool for each shape"
            )
        return specs.pop()

    @property
    def layer_map(self) -> str:
        """A letter a layer: M Mamba-2, G Gated DeltaNet, K Kimi Delta Attention, * attention.

        ``+`` stands for a recurrence and attention in one layer, ``-`` for neither.
        """
        return "".join(self._letter(i) for i in range(self.layers))

    def _letter(self, layer: int) -> str:
        if layer not in self.ssm:
            return "*" if layer in self.attention else "-"
        return "+" if layer in self.attention else _LETTERS[self.ssm[layer].family]

    def checkpoint_bytes(self, fmt: CheckpointFormat) -> int:
        """Bytes of the recurrent states of one sequence, over all layers."""
        return sum(spec.checkpoint_bytes(fmt) for spec in self.ssm.values())

    def row_bytes(self, dtype: torch.dtype, fmt: CheckpointFormat) -> int:
        """Bytes of the rows of one token, over all layers."""
        return sum(spec.row_bytes(dtype, fmt) for spec in self.ssm.values())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token adds to the caches of all attention layers."""
        return sum(spec.kv_bytes(dtype) for spec in self.attention.values())

    def shard(self, rank: int, size: int) -> ModelLayers:
        """The part of every layer that tensor-parallel rank `rank` of `size` holds.

        Raises
        ------
        InputError
            The heads of some layer cannot be split so.
        """
        return dataclasses.replace(
            self,
            ssm={i: spec.shard(rank, size) for i, spec in self.ssm.items()},
            attention={i: spec.shard(rank, size) for i, spec in self.attention.items()},
        )
