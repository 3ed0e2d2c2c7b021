"""Refusals and hooks, against a stand-in of SGLang's plugin loader."""

from __future__ import annotations

import sys
import types

import pytest

from replayinfer import UnsupportedError
from replayinfer.integrations.sglang import arguments, plugin
from replayinfer.integrations.sglang.layers import read_layers
from replayinfer.integrations.sglang.options import Options

from .stand_ins import LAYERS, SPECS, model, namespace

REFUSED = {
    "speculative_algorithm": "DFLASH",
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 17,
    "speculative_adaptive": True,
    "enable_multi_layer_eagle": True,
    "disaggregation_mode": "prefill",
    "enable_unified_memory": True,
    "enable_page_major_kv_layout": True,
    "enable_int8_mamba_checkpoint": True,
    "enable_linear_replayssm": True,
    "enable_linear_replayssm_spec": True,
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "radix_cache_backend": "other",
    "enable_memory_saver": True,
    "enable_mamba_cache_stochastic_rounding": True,
    "pp_size": 2,
    "enable_two_batch_overlap": True,
    "enable_pdmux": True,
    "device": "npu",
    "use_ray": True,
    "debug_cuda_graph": True,
    "cuda_graph_config": namespace(decode=namespace(backend="breakable")),
    "linear_attn_backend": "replayinfer",
    "linear_attn_prefill_backend": "replayinfer",
    "linear_attn_verify_backend": "replayinfer",
}


def given(**more):
    return namespace(
        linear_attn_decode_backend="replayinfer", linear_attn_backend="triton",
        disaggregation_mode="null", pp_size=1, device="cuda", speculative_algorithm=None, **more,
    )  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_are_refused_in_one_line(name):
    wrong = given()
    setattr(wrong, name, REFUSED[name])
    assert arguments.chosen(wrong)
    with pytest.raises(UnsupportedError) as refusal:
        arguments.require_supported(wrong)
    said = str(refusal.value)
    assert "\n" not in said
    assert f"--{name.replace('_', '-')}" in said
    assert "; allowed " in said


@pytest.mark.parametrize("backend", ["full", "breakable", "disabled"])
def test_prefill_graphs_that_leave_no_room_for_folds(backend):
    """A full one goes past `init_forward_metadata`, where live sequences are folded."""
    graphs = given(cuda_graph_config=namespace(prefill=namespace(backend=backend)))
    if backend == "full":
        with pytest.raises(UnsupportedError, match=r"--cuda-graph-backend-prefill breakable"):
            arguments.require_supported(graphs)
    else:
        arguments.require_supported(graphs)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NGRAM"])
def test_chains_of_drafts_are_served_within_the_capacity(algorithm):
    chains = given()
    chains.speculative_algorithm, chains.speculative_eagle_topk = algorithm, 1
    chains.speculative_num_draft_tokens = 8
    arguments.require_supported(chains)
    Options(9).require_for(chains)
    with pytest.raises(UnsupportedError) as refusal:
        Options(8).require_for(chains)
    assert "CAPACITY: got 8; allowed at least 9 beside --speculative-num-draft-tokens 8" in str(
        refusal.value
    )
    chains.speculative_algorithm = None
    Options(8).require_for(chains)


def test_supported_arguments_pass():
    arguments.require_supported(given())
    assert arguments.chosen(given())
    assert not arguments.chosen(namespace(linear_attn_decode_backend="triton"))


# Hooks ------------------------------------------------------------------------------------------


class Registry:
    """Wraps a function in a closure over its hook, and says nothing where there is none."""

    def __init__(self) -> None:
        self.hooks: dict[str, object] = {}
        self.patched: set[str] = set()

    def register(self, target, hook, kind) -> None:
        self.hooks[target] = hook

    def apply_hooks(self) -> None:
        for target in set(self.hooks) - self.patched:
            home, _, name = target.rpartition(".")
            module = sys.modules.get(home)
            if module is None or not hasattr(module, name):
                continue
            setattr(module, name, self.closed(getattr(module, name), self.hooks[target]))
            self.patched.add(target)

    @staticmethod
    def closed(original, hook):
        def wrapper(*args, **kwargs):
            result = original(*args, **kwargs)
            hook(result, *args, **kwargs)
            return result

        return wrapper


@pytest.fixture
def peer(monkeypatch):
    """Enough of SGLang to load a plugin into: registry, choices, `publish`."""
    registry, choices = Registry(), []
    modules = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": namespace(AFTER=0, AROUND=1, BEFORE=2),
        },
        "sglang.srt.arg_groups.choices": {"add_linear_attn_kernel_backend_choices": choices.extend},
        "sglang.srt.runtime_context": {"publish": lambda *args, **kwargs: "context"},
        "sglang.srt.arg_groups.overrides": {"resolved_view": lambda given: given},
    }
    for name, content in modules.items():
        for i in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:i])
            if part not in sys.modules or part in modules:
                module = types.ModuleType(part)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, part, module)
        vars(sys.modules[name]).update(content)
    monkeypatch.setattr(plugin.metadata, "version", lambda name: plugin.SUPPORTED_VERSION)
    monkeypatch.setattr(plugin, "_reason", None)
    return namespace(
        choices=choices, registry=registry, context=sys.modules["sglang.srt.runtime_context"]
    )


def test_the_choice_is_added_and_inert(peer):
    plugin.register()
    assert peer.choices == ["replayinfer"]
    other = namespace(linear_attn_decode_backend="triton", disaggregation_mode="prefill")
    assert peer.context.publish(other, role="scheduler") == "context"


def test_arguments_are_checked_when_they_are_published(peer):
    plugin.register()
    assert peer.context.publish(given(), role="detokenizer") == "context"
    with pytest.raises(UnsupportedError, match="--enable-lmcache"):
        peer.context.publish(given(enable_lmcache=True), role="detokenizer")


def test_another_version_is_refused_only_if_chosen(peer, monkeypatch):
    monkeypatch.setattr(plugin.metadata, "version", lambda name: "0.5.24")
    plugin.register()
    assert peer.choices == []
    peer.context.publish(namespace(linear_attn_decode_backend=None), role="scheduler")
    with pytest.raises(UnsupportedError, match=r"sglang: got 0\.5\.24; allowed 0\.5\.23"):
        peer.context.publish(given(), role="scheduler")


def test_a_hook_that_found_no_target_stops_the_server(peer):
    plugin.register()
    with pytest.raises(UnsupportedError, match=r"without .*attn_backend_wrapper.* to hook"):
        peer.context.publish(given(), role="scheduler")


def test_a_missing_first_hook_is_said(peer, caplog):
    del peer.context.publish
    plugin.register()
    assert "without sglang.srt.runtime_context.publish to hook" in caplog.text
    assert peer.choices == []


def test_deterministic_inference_needs_folds_that_know_no_batch(peer, monkeypatch):
    plugin.register()
    fixed = given(enable_deterministic_inference=True)
    with pytest.raises(UnsupportedError, match="POLICY: got spread; allowed full"):
        peer.context.publish(fixed, role="detokenizer")
    monkeypatch.setenv("REPLAYINFER_SGLANG_POLICY", "full")
    assert peer.context.publish(fixed, role="detokenizer") == "context"


# Models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_layers_are_read_from_a_model(name, rng):
    spec = SPECS[name]
    whole, weights = model(spec, rng)
    layers = read_layers(whole, spec.family)
    assert layers.spec == spec
    assert list(layers.modules) == list(LAYERS)
    for layer in LAYERS:
        for key, value in layers.weights(layer).items():
            assert value.flatten().tolist() == weights[layer][key].flatten().tolist()


def test_models_that_cannot_be_served_are_refused(rng):
    whole, _ = model(SPECS["gdn"], rng)
    with pytest.raises(UnsupportedError, match=r"no layers of it \(mamba2\)"):
        read_layers(whole, "mamba2")
    whole.model["layers"][LAYERS[1]]["mixer"].num_v_heads = 6
    with pytest.raises(UnsupportedError, match="layers of 2 shapes"):
        read_layers(whole, "gdn")
    whole.model["layers"][LAYERS[0]]["mixer"].num_q_heads = 1
    with pytest.raises(UnsupportedError, match="got 1 query heads of 16 and 2 key heads"):
        read_layers(whole, "gdn")
    whole, _ = model(SPECS["mamba2"], rng)
    whole.model = whole.model["layers"][LAYERS[0]]["mixer"]
    with pytest.raises(UnsupportedError, match="a Mamba-2 mixer called 'model'"):
        read_layers(whole, "mamba2")
