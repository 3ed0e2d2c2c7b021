"""Every family's shapes against the modules and caches that transformers makes of its config."""

import dataclasses

import pytest
import torch

from replayinfer.formats import get_format
from replayinfer.spec import Mamba2Spec
from replayinfer.spec.hf import LatentAttentionSpec, read_config

# One sequence: with a gated norm, Falcon-H1 of transformers 5.17 mixes the sequences of a batch.
BATCH, TOKENS = 1, 5
FP32 = get_format("fp32")


def mixers(model):
    """The recurrent modules by layer: what has a causal convolution."""
    return {m.layer_idx: m for m in model.modules() if hasattr(m, "conv1d")}


def no_dtype(model):
    return dataclasses.replace(model, dtype=None)


@pytest.fixture
def built(peer):
    config = peer.config(**peer.small)
    return read_config(config), peer.build(config)


@pytest.fixture
def cache(built):
    _, model = built
    ids = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        name = "past_key_values" if hasattr(out, "past_key_values") else "cache_params"
        cache = getattr(out, name)
        model(input_ids=ids[:, :1], use_cache=True, **{name: cache})  # a decode step as well
    return cache


def test_defaults_are_those_of_the_class(peer):
    ours, theirs = read_config({"model_type": peer.model_type}), peer.config()
    assert no_dtype(ours) == no_dtype(read_config(theirs))
    assert ours.layers == theirs.num_hidden_layers
    assert (ours.hidden_size, ours.vocab_size) == (theirs.hidden_size, theirs.vocab_size)
    words = {"linear_attention": {"ssm"}, "full_attention": {"attention"}}
    words["hybrid"] = words["linear_attention"] | words["full_attention"]
    for layer, word in enumerate(theirs.layer_types):
        does = {n for n in ("ssm", "attention") if layer in getattr(ours, n)}
        assert does == words.get(word, set()), layer


@pytest.mark.parametrize("small", [False, True], ids=["defaults", "small"])
def test_a_saved_config_reads_like_the_object(peer, small, tmp_path):
    config = peer.config(**(peer.small if small else {}))
    config.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path / "config.json")):
        assert read_config(path) == read_config(config)


def test_small_differs_from_the_defaults_everywhere(peer):
    small, default = read_config(peer.config(**peer.small)), read_config(peer.config())
    same = {"family", "conv_activation", "dt_softplus", "gate", "norm", "norm_eps", "scale"}
    same |= {"lower_bound"} | ({"dt_limit"} if peer.model_type == "zamba2" else set())
    same |= {"beta"} if peer.model_type != "olmo_hybrid" else set()
    for field in dataclasses.fields(small.spec):
        if field.name not in same:
            assert getattr(small.spec, field.name) != getattr(default.spec, field.name), field.name


def test_layers_and_widths(built):
    ours, model = built
    assert set(ours.ssm) == set(mixers(model))
    attending = {m.layer_idx for m in model.modules() if hasattr(m, "o_proj")} - set(mixers(model))
    if model.config.model_type in ("falcon_h1", "zamba2"):  # in one layer, or as a shared block
        attending = {i for i, t in enumerate(model.config.layer_types) if t == "hybrid"}
    assert set(ours.attention) == attending
    assert ours.layers == len(model.get_decoder().layers)
    assert model.get_input_embeddings().weight.shape == (ours.vocab_size, ours.hidden_size)


def test_module_shapes(built):
    ours, model = built
    for layer, mixer in mixers(model).items():
        spec = ours.ssm[layer]
        weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
        assert weight.shape == (spec.conv_channels, 1, spec.conv_width)
        assert (bias is not None) == ours.conv_bias
        gate = getattr(mixer, "forget_gate", mixer)
        assert gate.A_log.numel() == spec.heads
        out = mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
        assert out.weight.shape == (ours.hidden_size, spec.heads * spec.dim)
        weights = {f.name: f.shape for f in spec.weight_fields}
        assert gate.dt_bias.numel() == torch.Size(weights["dt_bias"]).numel()
        if isinstance(spec, Mamba2Spec):
            width = spec.heads * spec.dim + spec.conv_channels + spec.heads
            assert mixer.in_proj.weight.shape == (width, ours.hidden_size)
            assert mixer.D.numel() == spec.heads
        else:
            projected = ("in_proj_qkvz", "in_proj_qkv", "q_proj")
            name = next(n for n in projected if hasattr(mixer, n))
            rows = {
                "in_proj_qkvz": spec.conv_channels + spec.heads * spec.dim,
                "in_proj_qkv": spec.conv_channels,
                "q_proj": spec.key_heads * spec.state,
            }
            assert getattr(mixer, name).weight.shape[0] == rows[name]


def test_cache_shapes(built, cache):
    ours, _ = built
    for layer, spec in ours.ssm.items():
        state, conv = cache.layers[layer].recurrent_states[0], cache.layers[layer].conv_states[0]
        if not isinstance(spec, Mamba2Spec):
            state = state.mT  # theirs is [key, value]
        assert state.shape == (BATCH, *spec.state_shape)
        assert spec.checkpoint_bytes(FP32) == state.nbytes // BATCH
        assert conv.shape == (BATCH, spec.conv_channels, spec.conv_width)
    per_token = 0
    for layer, spec in ours.attention.items():
        keys, values = cache.layers[layer].keys, cache.layers[layer].values
        if isinstance(spec, LatentAttentionSpec):
            shapes = [(1, spec.kv_lora_rank), (1, spec.rope_dim)]
        else:
            shapes = [(spec.kv_heads, spec.head_dim)] * 2
        for tensor, (heads, size) in zip((keys, values), shapes, strict=True):
            assert tensor.shape == (BATCH, heads, TOKENS + 1, size)
            per_token += tensor.nbytes // (BATCH * (TOKENS + 1))
    assert ours.kv_bytes_per_token(torch.float32) == per_token
    assert ours.checkpoint_bytes(FP32) == sum(
        cache.layers[i].recurrent_states[0].nbytes // BATCH for i in ours.ssm
    )


def test_what_is_not_a_shape(built):
    ours, model = built
    config = model.config
    for mixer in mixers(model).values():
        if isinstance(ours.spec, Mamba2Spec):
            gated = ours.gate_in_readout
            assert gated == isinstance(mixer.norm, torch.nn.Identity)
            # Theirs clamps in the prefill alone; where it has a limit of its own, a note says so.
            declared = tuple(getattr(config, "time_step_limit", (0.0, float("inf"))))
            assert ours.spec.dt_limit == declared
            assert (mixer.time_step_limit == (0.0, float("inf"))) == (not ours.notes)
            for bound in mixer.time_step_limit:
                assert bound == float("inf") or f"{bound:g}" in ours.notes[0]
        else:
            doubled = getattr(mixer, "allow_neg_eigval", False)
            assert ours.spec.beta == ("sigmoid2" if doubled else "sigmoid")
            assert ours.spec.gate == "softplus"


def test_default_olmo_hybrid_doubles_beta(peer_of):
    peer = peer_of("olmo_hybrid")
    assert peer.config().linear_allow_neg_eigval
    assert read_config(peer.config()).spec.beta == "sigmoid2"


def test_falcon_h1_gates_in_the_readout_without_a_norm(peer_of):
    peer = peer_of("falcon_h1")
    config = peer.config(**peer.small | {"mamba_rms_norm": False})
    (mixer, *_) = mixers(peer.build(config)).values()
    assert isinstance(mixer.norm, torch.nn.Identity)
    assert read_config(config).gate_in_readout


def given(**fields):
    return fields


# As on the hub: older names, and lists that today's classes turn into layer_types.
HUB = {
    "nemotron pattern": given(
        model_type="nemotron_h", hybrid_override_pattern="M-M*-EM", num_hidden_layers=7,
        mamba_n_groups=4, mamba_d_conv=3, mamba_conv_bias=False, torch_dtype="bfloat16"),
    "nemotron list": given(
        model_type="nemotron_h", layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"],
        mamba_ssm_cache_dtype="float16"),
    "bamba": given(model_type="bamba", num_hidden_layers=6, attn_layer_indices=[2, 5],
                  mamba_d_head=64, num_key_value_heads=None),
    "falcon": given(model_type="falcon_h1", mamba_d_ssm=None, head_dim=64, mamba_n_groups=2,
                   attn_layer_indices=None, num_key_value_heads=None),
    "granite": given(model_type="granitemoehybrid", num_hidden_layers=4,
                    layer_types=["mamba", "mamba", "attention", "mamba"], mamba_n_heads=64),
    "zamba2": given(model_type="zamba2", num_hidden_layers=3, n_mamba_heads=80, mamba_headdim=64,
                   layers_block_type=["mamba", "hybrid", "mamba"], attention_head_dim=96),
    "qwen3_next": given(model_type="qwen3_next", num_hidden_layers=6, full_attention_interval=3),
    "qwen3_5_text": given(model_type="qwen3_5_text", num_hidden_layers=5, head_dim=64,
                         full_attention_interval=5),
    "olmo": given(model_type="olmo_hybrid", num_hidden_layers=3, linear_num_value_heads=60),
    "kimi": given(model_type="kimi_linear", num_hidden_layers=5, linear_attn_config=given(
        kda_layers=[1, 2, 4], full_attn_layers=[3, 5], num_heads=8, head_dim=64,
        short_conv_kernel_size=3)),
}  # fmt: skip


@pytest.mark.parametrize("fields", HUB.values(), ids=HUB)
def test_hub_spellings(fields, peer_of):
    peer = peer_of(fields["model_type"])
    theirs = read_config(peer.config(**{k: v for k, v in fields.items() if k != "model_type"}))
    ours = read_config(fields)
    assert ours == theirs
    assert ours != read_config({"model_type": fields["model_type"]})


@pytest.mark.parametrize("moe", [False, True])
def test_multimodal_configs_are_read_for_their_text(moe):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    kind = "qwen3_5_moe" if moe else "qwen3_5"
    text = given(num_hidden_layers=8, linear_num_value_heads=64, dtype="bfloat16")
    config = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(text_config=text)
    for ours in (read_config(config), read_config({"model_type": kind, "text_config": text})):
        assert ours.layer_map == "GGG*GGG*"
        assert ours.spec.heads == 64
        assert ours.hidden_size == config.text_config.hidden_size
        assert ours.attention[3].kv_heads == config.text_config.num_key_value_heads
        assert ours.dtype is torch.bfloat16
    assert read_config({"model_type": kind} | text).spec == ours.spec
