"""Subclasses of SGLang's linear-attention backends whose decode is replayed.

Prefill, the tracking of prefixes and most of what lies beside the recurrence stay SGLang's. Ours
are the decode of the recurrence, its verify of draft chains, and a fold before anything that reads
a state: an extend of live sequences, and the copies into track slots of ``extra_buffer``. Of a
decode of Gated DeltaNet the convolution is ours as well (`convolution`), and of both delta rules
the gated norm (`norms`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from replayinfer import UnsupportedError

from . import convolution, speculation
from .layers import Family, read_layers
from .norms import replace_norms
from .options import Options
from .slots import SlotReplay, row_bytes_per_slot

__all__ = ["charge", "current", "extra_slot_bytes", "wrap_attention_backend"]

_GDN = "sglang.srt.layers.attention.linear.gdn_backend"
_KDA = "sglang.srt.layers.attention.linear.kda_backend"
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"

# Recurrent layers of other kinds that SGLang counts among these.
_OTHERS = ("Lfm2", "MambaForCausalLM", "FalconMamba", "Zaya", "Inkling", "Jet")

_current: SlotReplay | None = None
_charged = 0  # bytes of a slot, in SGLang's budget


def current() -> SlotReplay | None:
    """The replay of this process's model, once its backend was made."""
    return _current


def family_of(model_config: Any) -> Family:
    """Which of our families a model's recurrent layers are.

    Raises
    ------
    UnsupportedError
        It has none, or others.
    """
    from sglang.srt.configs import hybrid_arch

    names = getattr(model_config.hf_config, "architectures", None) or ["a model"]
    if not names[0].startswith(_OTHERS):
        if hybrid_arch.hybrid_gdn_config(model_config) is not None:
            return "gdn"
        if hybrid_arch.mamba2_config(model_config) is not None:
            return "mamba2"
        if hybrid_arch.hybrid_kda_config(model_config) is not None:
            return "kda"
    raise UnsupportedError(
        f"model: got {names[0]}, which has no recurrent layers of a kind that is replayed; allowed "
        "models with GDN, KDA or Mamba-2 layers; serve without --linear-attn-decode-backend"
    )


def extra_slot_bytes(configurator: Any) -> int:
    """Bytes that each state slot needs beside what SGLang charges for it."""
    layers = read_layers(configurator.model, family_of(configurator.model_config))
    states = configurator.mambaish_config.mamba2_cache_params.dtype.temporal
    return row_bytes_per_slot(
        layers.spec, len(layers.modules), states, configurator.model_dtype, Options.read()
    )


def charge(configurator: Any) -> int:
    """`extra_slot_bytes`, and remember that it was asked for."""
    global _charged
    _charged = extra_slot_bytes(configurator)
    return _charged


def wrap_attention_backend(original: Callable[..., Any], runner: Any, full: Any) -> Any:
    """Around ``attn_backend_wrapper``: it finds our subclasses in the place of SGLang's.

    Raises
    ------
    UnsupportedError
        What it made is not ours: the model has no layers that we serve.
    """
    if runner.is_draft_worker:
        return _wrap_draft(original, runner, full)
    family = family_of(runner.model_config)
    module, name, make = {
        "gdn": (_GDN, "GDNAttnBackend", _gdn),
        "kda": (_KDA, "KDAAttnBackend", _kda),
        "mamba2": (_HYBRID, "Mamba2AttnBackend", _mamba2),
    }[family]
    home = importlib.import_module(module)
    theirs = getattr(home, name)
    ours = make(theirs)
    setattr(home, name, ours)
    try:
        made = original(runner, full)
    finally:
        setattr(home, name, theirs)
    linear = getattr(made, "linear_attn_backend", None)
    if not isinstance(linear, ours):
        raise UnsupportedError(
            f"model: got {type(linear).__name__} for its recurrent layers; allowed {name}, which "
            "is what SGLang makes for GDN, KDA and Mamba-2; serve with another decode backend"
        )
    if family == "gdn":
        convolution.hook_projections()
    if linear.replay.window > 1:
        made.update_mamba_state_after_mtp_verify = functools.partial(speculation.accept, made)
    return made


def _wrap_draft(original: Callable[..., Any], runner: Any, full: Any) -> Any:
    """For a draft model: SGLang's own backends, which must not see a decode that they do not know.

    It makes them for the layers of the target, of which a draft has none.
    """
    if any(
        type(m).__name__ in ("RadixLinearAttention", "MambaMixer2") for m in runner.model.modules()
    ):
        raise UnsupportedError(
            f"draft model: got {type(runner.model).__name__} with recurrent layers; allowed drafts "
            "without, whose tokens nothing would take back; drop --speculative-algorithm, or serve "
            "with another decode backend"
        )
    home = importlib.import_module("sglang.srt.layers.attention.linear.utils")
    given = home.resolve_linear_attn_backends

    def known(*args: Any, **kwargs: Any) -> Any:
        return _as_triton(given(*args, **kwargs))

    home.resolve_linear_attn_backends = known  # type: ignore[attr-defined]
    try:
        return original(runner, full)
    finally:
        home.resolve_linear_attn_backends = given  # type: ignore[attr-defined]


def _make_replay(backend: Any, runner: Any, family: Family) -> SlotReplay:
    """The replay on the state slots of a runner's pool, registered there."""
    global _current
    requests = runner.req_to_token_pool
    pool = requests.mamba_pool
    layers = read_layers(runner.model, family)
    order = sorted(requests.mamba_map, key=requests.mamba_map.__getitem__)
    states = pool.mamba_cache.temporal
    expected = (len(order), *layers.spec.state_shape)
    if sorted(order) != sorted(layers.modules) or (states.shape[0], *states.shape[2:]) != expected:
        raise UnsupportedError(
            f"model: got states {list(states.shape)} for layers {order}; allowed "
            f"[{len(order)}, slots, heads, dim, state] of layers {sorted(layers.modules)} in the "
            f"shape {list(layers.spec.state_shape)}; serve with another decode backend"
        )
    if backend._track_pools() is None:
        raise UnsupportedError(
            "model: got convolution states that are not tracked in one launch; allowed "
            "[layers, slots, ...]; serve with another decode backend"
        )
    replay = SlotReplay(
        layers, order, states, runner.dtype, Options.read(), window=speculation.window(),
        windows=convolution.windows(pool.mamba_cache.conv[0], layers),
    )  # fmt: skip
    if replay.nbytes > _charged * states.shape[1]:
        raise UnsupportedError(
            f"memory: got {replay.nbytes} bytes of rows and cursors for {states.shape[1]} slots; "
            f"allowed the {_charged} a slot that were charged to SGLang's budget; serve with "
            "another decode backend"
        )
    pool.register_slot_state(replay)
    replace_norms(runner.model, replay)
    _current = replay
    if replay.window > 1 and pool.mamba_cache.intermediate_ssm.numel():
        raise UnsupportedError(
            "memory: got a state for each draft token, as SGLang's own verify has; allowed none, "
            "since none was charged; drop --speculative-algorithm, or serve with another decode "
            "backend"
        )
    ours, theirs = (n / 2**30 for n in (replay.nbytes, states.nbytes))
    _say(
        f"replayinfer: {len(order)} {family} layers, {states.shape[1]} slots of "
        f"{replay.pool.format.name} states, capacity {replay.options.capacity}, backend "
        f"{replay.backend.name}; rows and cursors take {ours:.3f} GiB beside {theirs:.3f} GiB"
        + (f"; verify of {replay.window} tokens" if replay.window > 1 else "")
    )
    return replay


def _say(line: str) -> None:
    import logging

    logging.getLogger("sglang.srt.replayinfer").info(line)


class _Replayed:
    """What the three subclasses share; mixed in before SGLang's class."""

    replay: SlotReplay
    forward_metadata: Any

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        mode = forward_batch.logical_forward_mode
        slots = self.forward_metadata.mamba_cache_indices
        # Of data-parallel ranks a decode may run as an extend, whose rows are trimmed on the way.
        self.replay.projects = forward_batch.forward_mode.is_decode()
        if mode.is_decode() or mode.is_target_verify():
            self.replay.begin(slots, verify=mode.is_target_verify())
        elif mode.is_extend():
            self.replay.before_extend(slots)
            mask = forward_batch.mamba_track_mask
            if mask is not None and self.forward_metadata.has_mamba_track_mask:
                # Theirs by the end of the forward; nothing reads them before.
                targets = forward_batch.mamba_track_indices
                self.replay.written(targets, mask[: targets.shape[0]], plain=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        mode = forward_batch.forward_mode
        self.replay.projects = mode.is_decode()
        if mode.is_decode() or mode.is_target_verify():
            slots = self.forward_metadata.mamba_cache_indices
            self.replay.begin(slots, verify=mode.is_target_verify())

    def _track_mamba_state_decode(
        self,
        forward_batch: Any,
        conv_states: Any,
        ssm_states: Any,
        cache_indices: torch.Tensor,
        layer_id: int | None = None,
    ) -> None:
        """After each layer of a decode step; states are whole after the last one only."""
        if layer_id != self.replay.last_layer:
            return
        self.replay.finish()
        mask = forward_batch.mamba_track_mask
        if mask is None:
            return
        mask = mask[: cache_indices.shape[0]]
        self.replay.fold_now(cache_indices, mask)
        super()._track_mamba_state_decode(  # type: ignore[misc]
            forward_batch, conv_states, ssm_states, cache_indices, layer_id
        )
        targets = self.forward_metadata.mamba_track_indices[: cache_indices.shape[0]]
        self.replay.written(targets, mask, plain=False)

    def _extended(self, layer_id: int, forward_batch: Any, out: Any) -> Any:
        """After a layer's prefill or verify: what it returned.

        After the last layer the states of a prefill are taken back, and a verify waits for the
        tokens that are accepted.
        """
        if layer_id == self.replay.last_layer:
            if forward_batch.forward_mode.is_target_verify():
                self.replay.pause()
            else:
                self.replay.after_extend(self.forward_metadata.mamba_cache_indices)
        return out


class _DeltaKernel:
    """A kernel of decode and verify for SGLang's dispatchers of GDN and KDA."""

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_safe_gate_verify = True
    supports_strided_target_verify_qkv = True
    supports_fused_chain_verify = False

    def __init__(self, replay: SlotReplay) -> None:
        self.replay = replay
        self.layer = -1

    def packed_decode(
        self, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Outputs ``[1, batch, heads, dim]`` of ``q | k | v [batch, channels]`` and raw gates."""
        spec: Any = self.replay.pool.spec
        batch = mixed_qkv.shape[0]
        keys = spec.key_heads * spec.state
        q, k, v = (
            part.view(batch, 1, heads, -1)
            for part, heads in zip(
                mixed_qkv.split([keys, keys, spec.heads * spec.dim], dim=-1),
                (spec.key_heads, spec.key_heads, spec.heads),
                strict=True,
            )
        )
        return self._readout(batch, 1, q, k, v, a, b).transpose(0, 1)

    def target_verify(
        self, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
        b: torch.Tensor, cache_steps: int, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Outputs ``[1, batch * window, heads, dim]`` of ``q, k, v [1, batch * window, ...]``."""
        window = cache_steps
        batch = q.shape[1] // window
        q, k, v = (part[0].unflatten(0, (batch, window)) for part in (q, k, v))
        return self._readout(batch, window, q, k, v, a, b).flatten(0, 1)[None]

    def _readout(
        self, batch: int, window: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        a: torch.Tensor, b: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        spec: Any = self.replay.pool.spec
        gate = [int(getattr(spec, name)) for name in spec.gate_dims]
        return self.replay.readout(
            self.layer, q=q, k=k, v=v,
            a=a.reshape(batch, window, *gate), b=b.reshape(batch, window, spec.heads),
        )  # fmt: skip


@contextlib.contextmanager
def _decode_by_triton(runner: Any) -> Iterator[None]:
    """Their dispatchers refuse a name that they do not know: show them one that they do."""
    given = runner.linear_attn_backends
    runner.linear_attn_backends = _as_triton(given)
    try:
        yield
    finally:
        runner.linear_attn_backends = given


def _as_triton(given: Any) -> Any:
    triton = type(given.decode).TRITON
    return type(given)(decode=triton, prefill=given.prefill, verify=triton)


def _delta(theirs: Any, family: Family) -> type[Any]:
    class ReplayDelta(_Replayed, theirs):
        def __init__(self, model_runner: Any) -> None:
            with _decode_by_triton(model_runner):
                super().__init__(model_runner)
            self.replay = _make_replay(self, model_runner, family)
            kernel = _DeltaKernel(self.replay)
            self.kernel_dispatcher.decode_kernel = self.kernel_dispatcher.verify_kernel = kernel
            self.kernel_dispatcher.supports_packed_decode = True
            self.kernel_dispatcher.supports_packed_decode_safe_gate = True
            self._replay_kernel = kernel
            self._fused_chain_verify_fn = None  # KDA's, which would pass us by

        def forward_decode(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
            self._replay_kernel.layer = layer.layer_id
            # Kimi's kernel that fuses the recurrence with its neighbours would pass us by.
            if getattr(layer, "_k3_fused_decode_args", None) is not None:
                layer._k3_fused_decode_args = None
            return super().forward_decode(layer, *args, **kwargs)

        def forward_extend(self, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._replay_kernel.layer = layer.layer_id
            out = super().forward_extend(layer, forward_batch, *args, **kwargs)
            return self._extended(layer.layer_id, forward_batch, out)

        def _can_run_dspark_cutedsl_mtp(self, **options: Any) -> bool:
            return False  # nor this one

        def supports_prefill_graph_extend(self) -> bool:
            return False  # its graphs hold no fold

    ReplayDelta.__name__ = ReplayDelta.__qualname__ = f"Replay{theirs.__name__}"
    return ReplayDelta


def _gdn(theirs: Any) -> type[Any]:
    delta: Any = _delta(theirs, "gdn")

    class ReplayGDN(delta):
        def forward_decode(
            self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
        ) -> Any:
            """Theirs, or with the convolution in the kernel before our readout."""
            cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
            slots = self.forward_metadata.mamba_cache_indices
            out = convolution.decode(self.replay, layer, mixed_qkv, a, b, cache.conv[0], slots)
            if out is None:
                return super().forward_decode(
                    layer, forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
                )
            self._track_mamba_state_decode(
                forward_batch, cache.conv[0], cache.temporal, slots, layer.layer_id
            )
            return out

    ReplayGDN.__name__ = ReplayGDN.__qualname__ = delta.__name__
    return ReplayGDN


def _kda(theirs: Any) -> type[Any]:
    return _delta(theirs, "kda")


class _StateUpdate:
    """In the place of SGLang's selective state update: ours in planned steps."""

    def __init__(self, inner: Any, replay: SlotReplay) -> None:
        self.inner, self.replay = inner, replay
        self.layer: int | None = None  # whose decode or verify is running, if it is ours

    @property
    def name(self) -> str:
        return f"{self.inner.name}, decode and verify by replayinfer"

    def install(self) -> None:
        """Take the place of whatever SGLang calls; it makes that once, at a moment of its own."""
        dispatch: Any = sys.modules["sglang.kernels.ops.mamba.triton_ops.ssu_dispatch"]
        if dispatch._mamba_ssu_backend is not self:
            self.inner = dispatch._mamba_ssu_backend
            dispatch._mamba_ssu_backend = self

    def __call__(
        self, state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: Any, B: torch.Tensor,
        C: torch.Tensor, D: Any = None, z: torch.Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if self.layer is None:
            self.inner(state, x, dt, A, B, C, D=D, z=z, **options)
            return
        inputs = {"x": x, "dt": dt[..., 0], "B": B, "C": C}  # dt is the same in a whole head
        if z is not None:
            inputs["z"] = z
        out: torch.Tensor = options["out"]
        if x.dim() == 3:  # a decode has no axis of tokens
            inputs, out = {name: t[:, None] for name, t in inputs.items()}, out[:, None]
        self.replay.readout(self.layer, out=out, **inputs)


def _mamba2(theirs: Any) -> type[Any]:
    class ReplayMamba2(_Replayed, theirs):
        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self.replay = _make_replay(self, model_runner, "mamba2")
            self._update = _StateUpdate(None, self.replay)

        def forward(
            self, mixer: Any, hidden_states: Any, output: Any, layer_id: int, forward_batch: Any,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            call = (mixer, hidden_states, output, layer_id, forward_batch, *args)
            mode = forward_batch.logical_forward_mode
            if not mode.is_decode() and not mode.is_target_verify():
                return self._extended(layer_id, forward_batch, super().forward(*call, **kwargs))
            self._update.install()
            # Their copies into track slots come after every layer, before our fold.
            mask, forward_batch.mamba_track_mask = forward_batch.mamba_track_mask, None
            self._update.layer = layer_id
            try:
                out = super().forward(*call, **kwargs)
            finally:
                self._update.layer = None
                forward_batch.mamba_track_mask = mask
            if mode.is_target_verify():
                return self._extended(layer_id, forward_batch, out)
            slots = self.forward_metadata.mamba_cache_indices
            self._track_mamba_state_decode(forward_batch, None, None, slots, layer_id)
            return out

    ReplayMamba2.__name__ = ReplayMamba2.__qualname__ = f"Replay{theirs.__name__}"
    return ReplayMamba2
