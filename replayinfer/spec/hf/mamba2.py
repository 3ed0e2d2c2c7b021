"""Configs of models with Mamba-2 layers; defaults are those of the classes in transformers 5.17.

Each function reads one `model_type`. What the classes say in code and not in a field:

* Bamba, Mamba2, Falcon-H1 and GraniteMoeHybrid split ``expand * hidden_size`` channels into heads;
  Nemotron-H multiplies heads by head size and ignores `expand`.
* In Falcon-H1 every layer recurs and attends, side by side; in Zamba2 a hybrid layer is a shared
  attention block, with keys and values of its own, followed by a Mamba-2 layer.
* Zamba2's attention sees the embeddings too: its heads are those of ``2 * hidden_size``.
"""

from __future__ import annotations

import math

import torch

from ...errors import InputError
from ..mamba2 import Mamba2Spec
from .fields import Fields
from .kinds import Kind, all_of, check_count, from_pattern, listed
from .parts import Parts, grouped_attention

__all__ = ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"]


def nemotron_h(fields: Fields) -> Parts:
    fields.require_silu("mamba_hidden_act")
    names = ("layers_block_type", "layer_types")
    kinds = listed(fields, *names, allowed=("ssm", "attention", "neither"))
    pattern = from_pattern(fields, "hybrid_override_pattern")
    if kinds is not None and pattern is not None and kinds != pattern:
        raise InputError(
            f"hybrid_override_pattern: got {len(pattern)} layers that differ from the "
            f"{len(kinds)} of layers_block_type; allowed the same layers; remove one"
        )
    default: tuple[Kind, ...] = ("ssm", "neither", "attention", "neither")
    hidden = fields.integer("hidden_size", 4096)
    heads = fields.integer("mamba_num_heads", 128)
    return Parts(
        kinds=check_count(fields, kinds or pattern or default),
        ssm=_spec(
            fields,
            heads=("mamba_num_heads", heads),
            dim=fields.integer("mamba_head_dim", 64),
            state=fields.integer("ssm_state_size", 128),
            groups=("n_groups", fields.integer("n_groups", 8, "mamba_n_groups")),
            width=fields.width("conv_kernel", 4, "mamba_d_conv"),
            limit=fields.limits("time_step_limit", "mamba_dt_limit"),
        ),
        attention=grouped_attention(
            fields,
            32,
            8,
            hidden=hidden,
            head_dim=fields.integer("head_dim", 128, "attention_head_dim"),
        ),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 131072),
        state_dtype=fields.dtype("mamba_ssm_cache_dtype") or torch.float32,
        conv_bias=fields.flag("use_conv_bias", True, "mamba_conv_bias"),
        notes=_minimum_note(fields),
    )


def bamba(fields: Fields) -> Parts:
    layers = fields.integer("num_hidden_layers", 32)
    attending = fields.integers("attn_layer_indices") or ()
    if attending and max(attending) >= layers:
        raise InputError(
            f"attn_layer_indices: got {max(attending)}; allowed 0..{layers - 1} for "
            f"num_hidden_layers={layers}; correct the config"
        )
    kinds: tuple[Kind, ...] = tuple("attention" if i in attending else "ssm" for i in range(layers))
    hidden = fields.integer("hidden_size", 4096)
    return Parts(
        kinds=kinds,
        ssm=_expanded(fields, hidden),
        attention=grouped_attention(fields, 32, 8, hidden=hidden),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 128000),
        conv_bias=fields.flag("mamba_conv_bias", True),
        notes=_limit_note(fields),
    )


def mamba2(fields: Fields) -> Parts:
    fields.require_silu("hidden_act")
    hidden = fields.integer("hidden_size", 4096)
    heads, dim = fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    _check_channels("num_heads", heads, "head_dim", dim, _width(fields, "expand", hidden))
    return Parts(
        kinds=all_of("ssm", fields.integer("num_hidden_layers", 64)),
        ssm=_spec(
            fields,
            heads=("num_heads", heads),
            dim=dim,
            state=fields.integer("state_size", 128),
            groups=("n_groups", fields.integer("n_groups", 8)),
            width=fields.width("conv_kernel", 4),
            limit=fields.limits("time_step_limit"),
        ),
        attention=None,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 32768),
        conv_bias=fields.flag("use_conv_bias", True),
        notes=_limit_note(fields),
    )


def falcon_h1(fields: Fields) -> Parts:
    hidden = fields.integer("hidden_size", 4096)
    channels = 1024  # the class's own default; only an explicit null means expand * hidden_size
    if fields.has("mamba_d_ssm"):
        given = fields.optional_integer("mamba_d_ssm")
        channels = _width(fields, "mamba_expand", hidden) if given is None else given
    normed = fields.flag("mamba_rms_norm", False)
    notes = list(_limit_note(fields))
    (_, scales), (_, scale) = fields.raw("ssm_multipliers"), fields.raw("ssm_in_multiplier")
    if scales not in (None, [1.0] * 5, (1.0,) * 5) or scale not in (None, 1.0):
        notes.append("ssm_multipliers: z, x, B, C and dt are scaled before the convolution")
    return Parts(
        kinds=all_of("both", fields.integer("num_hidden_layers", 32)),
        ssm=_expanded(fields, hidden, channels),
        attention=grouped_attention(fields, 32, 8, hidden=hidden),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 128000),
        conv_bias=fields.flag("mamba_conv_bias", True),
        gate_in_readout=not normed,
        notes=tuple(notes),
    )


def granitemoehybrid(fields: Fields) -> Parts:
    hidden = fields.integer("hidden_size", 4096)
    kinds = listed(fields, "layer_types", "layers_block_type", allowed=("ssm", "attention"))
    if kinds is None:
        kinds = all_of("ssm", fields.integer("num_hidden_layers", 32))
    return Parts(
        kinds=check_count(fields, kinds),
        ssm=_expanded(fields, hidden),
        attention=grouped_attention(fields, 32, None, hidden=hidden),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 32000),
        conv_bias=fields.flag("mamba_conv_bias", True),
        notes=_limit_note(fields),
    )


def zamba2(fields: Fields) -> Parts:
    # hidden_act is the MLP's; the convolution always has silu and a bias.
    hidden = fields.integer("hidden_size", 2560)
    heads = fields.integer("n_mamba_heads", 8)
    channels = _width(fields, "mamba_expand", hidden)
    dim = fields.optional_integer("mamba_headdim") or channels // heads
    _check_channels("n_mamba_heads", heads, "mamba_headdim", dim, channels)
    names = ("layers_block_type", "layer_types")
    kinds = listed(fields, *names, allowed=("ssm", "both"))
    ssm: tuple[Kind, ...] = ("ssm",)
    both: tuple[Kind, ...] = ("both",)
    default = ssm + (ssm * 5 + both) * 7 + ssm * 4 + both + ssm * 3 + both + ssm * 2
    attention_heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.optional_integer("attention_head_dim", "head_dim")
    return Parts(
        kinds=check_count(fields, default if kinds is None else kinds),
        ssm=_spec(
            fields,
            heads=("n_mamba_heads", heads),
            dim=dim,
            state=fields.integer("mamba_d_state", 64),
            groups=("mamba_ngroups", fields.integer("mamba_ngroups", 1)),
            width=fields.width("mamba_d_conv", 4),
            limit=(0.0, math.inf),
        ),
        attention=grouped_attention(
            fields, 32, None, hidden=hidden, head_dim=head_dim or 2 * hidden // attention_heads
        ),
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", 32000),
        conv_bias=True,
        notes=_minimum_note(fields),
    )


def _spec(
    fields: Fields,
    *,
    heads: tuple[str, int],
    dim: int,
    state: int,
    groups: tuple[str, int],
    width: int,
    limit: tuple[float, float],
) -> Mamba2Spec:
    fields.require_divisor(*groups, *heads)
    return Mamba2Spec(
        heads=heads[1], dim=dim, state=state, groups=groups[1], conv_width=width, dt_limit=limit
    )


def _expanded(fields: Fields, hidden: int, channels: int | None = None) -> Mamba2Spec:
    """The layer of Bamba, GraniteMoeHybrid and Falcon-H1, whose fields have the same names."""
    fields.require_silu("hidden_act")
    if channels is None:
        channels = _width(fields, "mamba_expand", hidden)
    heads = fields.integer("mamba_n_heads", 128)
    _, dim = fields.raw("mamba_d_head")
    dim = channels // heads if dim in (None, "auto") else fields.integer("mamba_d_head", 1)
    _check_channels("mamba_n_heads", heads, "mamba_d_head", dim, channels)
    return _spec(
        fields,
        heads=("mamba_n_heads", heads),
        dim=dim,
        state=fields.integer("mamba_d_state", 256),
        groups=("mamba_n_groups", fields.integer("mamba_n_groups", 1)),
        width=fields.width("mamba_d_conv", 4),
        limit=fields.limits("time_step_limit"),
    )


def _width(fields: Fields, name: str, hidden: int) -> int:
    """Channels of the recurrence: ``expand * hidden_size``."""
    return int(fields.positive(name, 2.0) * hidden)


def _check_channels(heads: str, count: int, dim: str, size: int, channels: int) -> None:
    if count * size != channels:
        raise InputError(
            f"{heads}: got {count} with {dim}={size}, {count * size} channels; allowed heads and "
            f"head sizes that make the {channels} channels of the layer; correct either"
        )


def _limit_note(fields: Fields) -> tuple[str, ...]:
    limit = fields.limits("time_step_limit")
    return () if limit == (0.0, math.inf) else (_prefill_only(f"time_step_limit={limit}"),)


def _minimum_note(fields: Fields) -> tuple[str, ...]:
    _, low = fields.raw("time_step_min", "mamba_dt_min")
    low = 0.001 if low is None else low
    return (_prefill_only(f"time_step_min={low}"),) if low else ()


def _prefill_only(what: str) -> str:
    return f"dt: transformers 5.17 clamps it by {what} in its prefill, and not in its decode step"
