"""Which models are served, and the reasons why others are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayinfer import UnsupportedError
from replayinfer.integrations.transformers import (
    FAMILIES,
    ReplayCache,
    ReplayEngine,
    describe,
    unsupported_reason,
)


def test_the_package_does_not_import_its_peer():
    code = (
        "import sys, replayinfer.integrations.transformers as t\n"
        "[getattr(t, name) for name in t.__all__]\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_is_an_attribute_error():
    import replayinfer.integrations.transformers as package

    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_mamba2_model(models):
    binding = describe(models["nemotron_h"])
    assert binding.family is FAMILIES["nemotron_h"]
    assert binding.layers == [0, 2, 4, 6]
    spec = binding.spec
    assert (spec.heads, spec.dim, spec.state, spec.groups) == (8, 32, 64, 2)
    assert spec.conv_channels == binding.mixers[0].conv1d.weight.shape[0]
    # The peer's decode step does not clamp dt, whatever its prefill does.
    assert spec.dt_limit == (0.0, float("inf"))


def test_gated_delta_model(models):
    binding = describe(models["qwen3_next"])
    assert binding.layers == [0, 1, 2]
    spec = binding.spec
    assert (spec.heads, spec.key_heads, spec.dim, spec.state) == (4, 2, 32, 64)
    assert spec.conv_channels == binding.mixers[0].conv1d.weight.shape[0]


def test_a_served_model_has_no_reason(model):
    assert unsupported_reason(model) is None


def test_another_architecture_is_refused():
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    llama = AutoModelForCausalLM.from_config(config)
    reason = unsupported_reason(llama)
    assert reason is not None
    assert "model_type='llama'" in reason
    assert all(name in reason for name in FAMILIES)
    for entry in (ReplayCache.from_model, ReplayEngine):
        with pytest.raises(UnsupportedError, match="llama"):
            entry(llama)


def test_not_a_model_is_refused():
    assert "model_type='Linear'" in str(unsupported_reason(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("activation", "gelu", "activation: got 'gelu' in layer 2"),
        ("conv_kernel_size", 3, r"got recurrent layers \[2\] of another shape"),
    ],
)
def test_a_layer_that_differs_is_refused(models, monkeypatch, attribute, value, reason):
    model = models["nemotron_h"]
    monkeypatch.setattr(describe(model).mixers[2], attribute, value)
    with pytest.raises(UnsupportedError, match=reason):
        describe(model)


def test_an_older_version_is_refused(models, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.16.2")
    with pytest.raises(UnsupportedError, match=r"transformers: got 5\.16\.2; allowed 5\.17"):
        describe(models["nemotron_h"])


def test_a_missing_peer_is_refused(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'replayinfer\[transformers\]'"):
        describe(models["nemotron_h"])


def test_the_folder_of_kernels_is_not_taken_for_the_hubs_package():
    """``python -m …`` in a checkout puts a folder `kernels` on the path, where the peer looks."""
    code = (
        "from replayinfer.integrations.transformers import peer\n"
        "assert peer._shadows_hub_package()\n"
        "peer.load()\n"
        "import sys, transformers.integrations.hub_kernels\n"
        "assert 'kernels' not in sys.modules"
    )
    checkout = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=checkout)


def test_attention_without_a_mask_per_row_is_refused_by_the_engine(model, monkeypatch):
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(UnsupportedError, match="attn_implementation: got 'flash_attention_2'"):
        ReplayEngine(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "int4"}, "format: got 'int4'"),
        ({"backend": "nobody"}, "backend: got 'nobody'"),
        ({"policy": "never"}, "policy: got 'never'"),
    ],
)
def test_options_are_refused_at_construction(model, options, reason):
    for entry in (ReplayCache.from_model, ReplayEngine):
        with pytest.raises(UnsupportedError, match=reason):
            entry(model, **options)
