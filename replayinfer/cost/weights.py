"""The parameters that a decode step reads, from a model's config.

Matrices only: norms, biases and convolutions are less than a thousandth. The head is read whatever
shares its weights; of the embedding a step reads a row a token, which is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..spec import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from ..spec.hf import AttentionSpec, LatentAttentionSpec, ModelLayers
from ..spec.hf.fields import Fields
from ..spec.presets import Preset

__all__ = ["DecodeWeights", "decode_weights", "raw_config"]

# What presets leave out, since it shapes no layer of ours. Sources: the files that the presets were
# read from; of Kimi-Linear the class of transformers 5.17, whose defaults are the model's figures.
_FEED_FORWARD: Mapping[str, Mapping[str, int]] = {
    "nemotron-3-nano-4b": {"intermediate_size": 12544},
    "nemotron-3-nano-30b": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    },
    "nemotron-3-super": {
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
    },
    "nemotron-3-ultra": {
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 5120,
        "moe_shared_expert_intermediate_size": 10240,
        "moe_latent_size": 2048,
    },
    "qwen3-next": {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-27b": {"intermediate_size": 17408},
    "qwen3.5-122b": {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
}


def raw_config(model: Preset | str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a text model's config: of a preset, a config.json, or a folder with one."""
    if isinstance(model, Preset):
        return {**model.config, **_FEED_FORWARD.get(model.name, {})}
    values: Mapping[str, Any]
    if isinstance(model, (str, Path)):
        path = Path(model)
        file = path / "config.json" if path.is_dir() else path
        values = json.loads(file.read_text(encoding="utf-8"))
    else:
        values = model
    for name in ("text_config", "llm_config"):
        if isinstance(inner := values.get(name), Mapping):
            return {"model_type": values.get("model_type"), **inner}
    return values


@dataclass(frozen=True)
class DecodeWeights:
    """Parameters by what they are for.

    Attributes
    ----------
    ssm, attention, head : int
        Projections of the recurrent layers, of attention, and onto the vocabulary.
    dense : int
        Feed-forward layers, shared experts and routers: what every token needs.
    expert : int
        One routed expert of one layer.
    moe_layers, experts, experts_per_token : int
        Layers with routed experts, how many each has, and how many a token takes.
    """

    ssm: int
    attention: int
    dense: int
    head: int
    expert: int = 0
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def always(self) -> int:
        """Read by every step."""
        return self.ssm + self.attention + self.dense + self.head

    @property
    def total(self) -> int:
        """All of these, every expert included."""
        return self.always + self.moe_layers * self.experts * self.expert

    @property
    def active(self) -> int:
        """Those that one token needs."""
        return self.always + self.moe_layers * self.experts_per_token * self.expert

    def experts_read(self, tokens: int) -> float:
        """Experts of a layer that `tokens` tokens reach together, if routed evenly.

        ``E (1 - (1 - k / E)^n)``; real routers are less even and reach fewer.
        """
        if not self.experts:
            return 0.0
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1 - missed)

    def read(self, tokens: int) -> float:
        """Parameters that a step of `tokens` tokens reads."""
        return self.always + self.moe_layers * self.expert * self.experts_read(tokens)


def decode_weights(config: Mapping[str, Any], model: ModelLayers) -> DecodeWeights:
    """Count the parameters that a decode step reads.

    Parameters
    ----------
    config : mapping
        As `raw_config` gives it.
    model : ModelLayers
        What `read_config` read from it.

    Raises
    ------
    InputError
        The config lacks a field; the message names all that are missing.
    """
    reader = _Reader(config, model)
    weights = _FEED_FORWARDS[model.model_type](reader)
    if reader.missing:
        names = ", ".join(sorted(reader.missing))
        raise InputError(
            f"config: got none of {names}; allowed a config that has them, since the weights of "
            "the feed-forward layers follow from them; add them, or say how many bytes of weights "
            "a step reads"
        )
    hidden = model.hidden_size
    into = 2 * hidden if model.model_type == "zamba2" else hidden
    gated = model.model_type.startswith("qwen")  # a gate for each value of attention's output
    return replace(
        weights,
        ssm=sum(_recurrence(spec, hidden) for spec in model.ssm.values()),
        attention=weights.attention
        + sum(_attention(spec, hidden, into, gated) for spec in model.attention.values()),
        head=model.vocab_size * hidden,
    )


def _recurrence(spec: LayerSpec, hidden: int) -> int:
    inner = spec.heads * spec.dim
    if isinstance(spec, Mamba2Spec):  # z, x, B, C, dt; the output
        return hidden * (2 * inner + 2 * spec.groups * spec.state + spec.heads) + inner * hidden
    if isinstance(spec, GDNSpec):  # q, k, v, z, b, a; the output
        keys = 2 * spec.key_heads * spec.state
        return hidden * (keys + 2 * inner + 2 * spec.heads) + inner * hidden
    assert isinstance(spec, KDASpec)  # q, k, v, b; two gates of rank dim; the output
    keys = 2 * spec.key_heads * spec.state
    gates = 2 * spec.dim * (hidden + inner)
    return hidden * (keys + inner + spec.heads) + gates + inner * hidden


def _attention(
    spec: AttentionSpec | LatentAttentionSpec, hidden: int, into: int, gated: bool
) -> int:
    if isinstance(spec, AttentionSpec):
        queries = spec.heads * spec.head_dim
        keys = 2 * spec.kv_heads * spec.head_dim
        return into * (queries * (2 if gated else 1) + keys) + queries * hidden
    queries = spec.heads * (spec.nope_dim + spec.rope_dim)
    rank = spec.q_lora_rank
    asked = hidden * queries if rank is None else rank * (hidden + queries)
    latent = hidden * (spec.kv_lora_rank + spec.rope_dim)
    expanded = spec.kv_lora_rank * spec.heads * (spec.nope_dim + spec.value_dim)
    return asked + latent + expanded + spec.heads * spec.value_dim * hidden


class _Reader:
    """Fields of a config; those that are missing are collected, and count as 0."""

    def __init__(self, config: Mapping[str, Any], model: ModelLayers) -> None:
        self._fields = Fields(config)
        self.config, self.model = config, model
        self.missing: set[str] = set()

    def size(self, name: str, *older: str) -> int:
        found = self._fields.optional_integer(name, *older, minimum=0)
        if found is None:
            self.missing.add(name)
        return found or 0

    def optional(self, name: str, default: int) -> int:
        found = self._fields.optional_integer(name, minimum=0)
        return default if found is None else found

    def gated(self, name: str, *older: str) -> int:
        """A feed-forward layer with a gate: three matrices."""
        return 3 * self.model.hidden_size * self.size(name, *older)


def _no_feed_forward(reader: _Reader) -> DecodeWeights:
    return DecodeWeights(0, 0, 0, 0)


def _every_layer(reader: _Reader) -> DecodeWeights:
    return DecodeWeights(0, 0, reader.model.layers * reader.gated("intermediate_size"), 0)


def _nemotron(reader: _Reader) -> DecodeWeights:
    config, hidden = reader.config, reader.model.hidden_size
    listed = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern") or "".join(
        {"moe": "E", "mlp": "-"}.get(kind, "M") for kind in listed or ()
    )
    # Without either, the class's own four layers: the second is dense, the fourth has experts.
    dense, moe = (pattern.count("-"), pattern.count("E")) if pattern else (1, 1)
    always = dense * 2 * hidden * reader.size("intermediate_size") if dense else 0
    if not moe:
        return DecodeWeights(0, 0, always, 0)
    experts, latent = reader.size("n_routed_experts"), reader.optional("moe_latent_size", 0)
    shared = 2 * hidden * reader.size("moe_shared_expert_intermediate_size")
    always += moe * (shared + experts * hidden + 2 * hidden * latent)
    expert = 2 * (latent or hidden) * reader.size("moe_intermediate_size")
    return DecodeWeights(
        0, 0, always, 0, expert, moe, experts, reader.size("num_experts_per_tok")
    )  # fmt: skip


def _granite(reader: _Reader) -> DecodeWeights:
    layers, hidden = reader.model.layers, reader.model.hidden_size
    always = layers * reader.gated("shared_intermediate_size")
    experts = reader.size("num_local_experts")
    if not experts:
        return DecodeWeights(0, 0, always, 0)
    return DecodeWeights(
        0, 0, always + layers * experts * hidden, 0, reader.gated("intermediate_size"), layers,
        experts, reader.size("num_experts_per_tok"),
    )  # fmt: skip


def _qwen_moe(reader: _Reader) -> DecodeWeights:
    layers, hidden = reader.model.layers, reader.model.hidden_size
    experts = reader.size("num_experts")
    step, only = reader.optional("decoder_sparse_step", 1), reader.config.get("mlp_only_layers")
    sparse = [i for i in range(layers) if i not in (only or ()) and (i + 1) % max(step, 1) == 0]
    moe = len(sparse) if experts or "num_experts" in reader.missing else 0
    shared = reader.gated("shared_expert_intermediate_size") + hidden
    always = moe * (shared + experts * hidden)
    if moe < layers:
        always += (layers - moe) * reader.gated("intermediate_size")
    return DecodeWeights(
        0, 0, always, 0, reader.gated("moe_intermediate_size"), moe, experts,
        reader.size("num_experts_per_tok"),
    )  # fmt: skip


def _kimi(reader: _Reader) -> DecodeWeights:
    layers, hidden = reader.model.layers, reader.model.hidden_size
    kinds = reader.config.get("mlp_layer_types")
    dense = kinds.count("dense") if kinds else reader.optional("first_k_dense_replace", 1)
    dense = min(dense, layers)
    # Of absent fields the class's defaults are the published model's.
    experts = reader.optional("num_experts", reader.optional("num_local_experts", 256))
    expert = 3 * hidden * reader.optional("moe_intermediate_size", 1024)
    taken = reader.optional("num_experts_per_token", reader.optional("num_experts_per_tok", 8))
    always = dense * 3 * hidden * reader.optional("intermediate_size", 9216)
    shared = reader.optional("num_shared_experts", 1) * expert
    always += (layers - dense) * (shared + experts * hidden)
    return DecodeWeights(0, 0, always, 0, expert, layers - dense, experts, taken)


def _zamba(reader: _Reader) -> DecodeWeights:
    """The shared blocks are read again wherever they are applied."""
    hidden, blocks = reader.model.hidden_size, len(reader.model.attention)
    inner, rank = reader.size("intermediate_size"), reader.size("adapter_rank")
    block = 3 * hidden * inner + rank * (hidden + 2 * inner) + hidden * hidden
    adapters = 3 * rank * 4 * hidden if reader.config.get("use_shared_attention_adapter") else 0
    return DecodeWeights(0, blocks * adapters, blocks * block, 0)


_FEED_FORWARDS = {
    "nemotron_h": _nemotron,
    "bamba": _every_layer,
    "mamba2": _no_feed_forward,
    "falcon_h1": _every_layer,
    "granitemoehybrid": _granite,
    "zamba2": _zamba,
    "qwen3_next": _qwen_moe,
    "qwen3_5": _every_layer,
    "qwen3_5_text": _every_layer,
    "qwen3_5_moe": _qwen_moe,
    "qwen3_5_moe_text": _qwen_moe,
    "olmo_hybrid": _every_layer,
    "kimi_linear": _kimi,
}
