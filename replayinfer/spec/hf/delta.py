"""Configs of models with delta-rule layers; defaults are those of the classes in transformers 5.17.

Each function reads one `model_type`. What the classes say in code and not in a field:

* every query and key is normalised by ``rsqrt(sum of squares + 1e-6)``, queries are scaled by
  ``K ** -0.5``, and no convolution has a bias;
* OlmoHybrid doubles beta, into (0, 2), unless `linear_allow_neg_eigval` is off;
* Kimi-Linear counts layers from 1 in `linear_attn_config`, and has one head size for K and V.
"""

from __future__ import annotations

from ...errors import InputError
from ..gdn import GDNSpec
from ..kda import KDASpec
from .attention import LatentAttentionSpec
from .fields import Fields
from .kinds import Kind, check_count, every_nth_attends, listed
from .parts import Parts, grouped_attention

__all__ = ["kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"]

_EITHER: tuple[Kind, ...] = ("ssm", "attention")


def qwen3_next(fields: Fields) -> Parts:
    return _qwen(fields, layers=48, hidden=2048, kv_heads=2, vocab=151936)


def qwen3_5(fields: Fields) -> Parts:
    return _qwen(fields, layers=32, hidden=4096, kv_heads=4, vocab=248320)


def qwen3_5_moe(fields: Fields) -> Parts:
    return _qwen(fields, layers=40, hidden=2048, kv_heads=2, vocab=248320)


def _qwen(fields: Fields, *, layers: int, hidden: int, kv_heads: int, vocab: int) -> Parts:
    fields.require_silu("hidden_act")
    kinds = listed(fields, "layer_types", "layers_block_type", allowed=_EITHER)
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        kinds = every_nth_attends(fields.integer("num_hidden_layers", layers), interval)
    hidden = fields.integer("hidden_size", hidden)
    return Parts(
        kinds=check_count(fields, kinds),
        ssm=_gdn(
            fields,
            heads=fields.integer("linear_num_value_heads", 32),
            key_heads=fields.integer("linear_num_key_heads", 16),
            dim=fields.integer("linear_value_head_dim", 128),
            state=fields.integer("linear_key_head_dim", 128),
        ),
        attention=grouped_attention(
            fields, 16, kv_heads, hidden=hidden, head_dim=fields.integer("head_dim", 256)
        ),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", vocab),
        state_dtype=fields.dtype("mamba_ssm_dtype"),
    )


def olmo_hybrid(fields: Fields) -> Parts:
    fields.require_silu("hidden_act")
    hidden = fields.integer("hidden_size", 3840)
    attention = grouped_attention(fields, 30, None, hidden=hidden)
    kinds = listed(fields, "layer_types", allowed=_EITHER)
    if kinds is None:
        layers = fields.integer("num_hidden_layers", 32)
        # Of fewer than four layers, the last one attends.
        kinds = every_nth_attends(layers, min(layers, 4))
    if len(set(kinds)) < 2:
        raise InputError(
            f"layer_types: got {len(kinds)} layers of one type; allowed at least one "
            "linear_attention and one full_attention; correct the config"
        )
    key_heads = fields.optional_integer("linear_num_key_heads") or attention.heads
    key_dim = fields.optional_integer("linear_key_head_dim") or int(0.75 * hidden / key_heads)
    double = fields.flag("linear_allow_neg_eigval", True)
    return Parts(
        kinds=check_count(fields, kinds),
        ssm=_gdn(
            fields,
            heads=fields.optional_integer("linear_num_value_heads") or attention.heads,
            key_heads=key_heads,
            dim=fields.optional_integer("linear_value_head_dim") or 2 * key_dim,
            state=key_dim,
            double_beta=double,
        ),
        attention=attention,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 100352),
    )


def kimi_linear(fields: Fields) -> Parts:
    fields.require_silu("hidden_act")
    nested = fields.mapping("linear_attn_config")
    heads = _either(fields, "linear_num_heads", nested, "num_heads", 32)
    size = _either(fields, "linear_head_dim", nested, "head_dim", 128)
    width = _either(fields, "linear_conv_kernel_dim", nested, "short_conv_kernel_size", 4, 2)
    bound = nested.negative("gate_lower_bound")
    layers = fields.integer("num_hidden_layers", 27)
    kinds = listed(fields, "layer_types", allowed=_EITHER)
    counted = _counted_from_one(nested, layers)
    if kinds is not None and counted is not None and kinds != counted:
        raise InputError(
            "layer_types: got other layers than linear_attn_config.kda_layers, which counts from "
            "1; allowed the same layers in both; remove one"
        )
    # The class's own default, which is not how the published checkpoints are laid out.
    default: tuple[Kind, ...] = tuple(
        "attention" if i and i % 4 == 0 else "ssm" for i in range(layers)
    )
    return Parts(
        kinds=check_count(fields, kinds or counted or default),
        ssm=KDASpec(
            heads=heads,
            key_heads=heads,
            dim=size,
            state=size,
            conv_width=width,
            gate="softplus" if bound is None else "bounded",
            lower_bound=-5.0 if bound is None else bound,
        ),
        attention=LatentAttentionSpec(
            heads=fields.integer("num_attention_heads", 32),
            kv_lora_rank=fields.integer("kv_lora_rank", 512),
            rope_dim=fields.integer("qk_rope_head_dim", 64, minimum=0),
            nope_dim=fields.integer("qk_nope_head_dim", 128),
            value_dim=fields.integer("v_head_dim", 128),
            q_lora_rank=fields.optional_integer("q_lora_rank"),
        ),
        hidden_size=fields.integer("hidden_size", 2304),
        vocab_size=fields.integer("vocab_size", 163840),
    )


def _gdn(
    fields: Fields, *, heads: int, key_heads: int, dim: int, state: int, double_beta: bool = False
) -> GDNSpec:
    fields.require_divisor("linear_num_key_heads", key_heads, "linear_num_value_heads", heads)
    return GDNSpec(
        heads=heads,
        key_heads=key_heads,
        dim=dim,
        state=state,
        conv_width=fields.width("linear_conv_kernel_dim", 4),
        beta="sigmoid2" if double_beta else "sigmoid",
    )


def _either(
    fields: Fields, name: str, nested: Fields, inner: str, default: int, minimum: int = 1
) -> int:
    """A size that Kimi-Linear keeps at the top, in `linear_attn_config`, or, equally, in both."""
    top = fields.optional_integer(name, minimum=minimum)
    deep = nested.optional_integer(inner, minimum=minimum)
    if top is not None and deep is not None and top != deep:
        raise InputError(
            f"{name}: got {top} beside linear_attn_config.{inner}={deep}; allowed one value in "
            "both; remove one"
        )
    return next((size for size in (deep, top) if size is not None), default)


def _counted_from_one(nested: Fields, layers: int) -> tuple[Kind, ...] | None:
    """The layers as `kda_layers` and `full_attn_layers` list them, each layer in one of the two."""
    recurrent, attending = nested.integers("kda_layers"), nested.integers("full_attn_layers")
    if recurrent is None and attending is None:
        return None
    recurrent, attending = recurrent or (), attending or ()
    if sorted(recurrent + attending) != list(range(1, layers + 1)):
        raise InputError(
            f"linear_attn_config.kda_layers: got {len(recurrent)} layers beside {len(attending)} "
            f"full_attn_layers; allowed each of 1..{layers} in one of the two, counted from 1; "
            "correct the lists"
        )
    return tuple("ssm" if i in recurrent else "attention" for i in range(1, layers + 1))
