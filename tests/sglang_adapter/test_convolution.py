"""Decode steps that convolve on the way: what they take over, and what they leave to SGLang."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from replayinfer import PlanError
from replayinfer.integrations.sglang import backends, convolution
from replayinfer.integrations.sglang.backends import _DeltaKernel
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import assert_bitwise_equal, peak_error

from .stand_ins import LAYERS, SLOTS, SPECS, Server, namespace

SPEC = SPECS["gdn"]
RATIO = SPEC.heads // SPEC.key_heads
CHANNELS = SPEC.conv_channels
SIZES = (SPEC.key_heads, SPEC.heads, SPEC.state, SPEC.dim)
WIDTH = 4
BY_HEAD, WHOLE = convolution.PROJECTIONS.values()


class Convolving(Server):
    """A server with SGLang's convolution windows ``[layers, slots, channels, width - 1]``."""

    def __init__(self, rng: torch.Generator, **options) -> None:
        dtype = options.setdefault("dtype", torch.float32)
        super().__init__("gdn", rng, capacity=4, **{"windows": dtype, **options})
        shape = (len(LAYERS), SLOTS, CHANNELS, WIDTH - 1)
        self.conv = torch.randn(shape, generator=rng).to(dtype)
        self.conv[:, 0] = torch.nan
        self.modules = {}
        for layer in LAYERS:
            weight = torch.randn(CHANNELS, WIDTH, generator=rng) * WIDTH**-0.5
            bias = 0.1 * torch.randn(CHANNELS, generator=rng)
            self.modules[layer] = namespace(
                layer_id=layer, conv_weights=weight.to(dtype), bias=bias.to(dtype),
                activation="silu",
            )  # fmt: skip

    def decode_from(self, layer: int, slots: torch.Tensor, line, a, b):
        windows = self.conv[LAYERS.index(layer)]
        return convolution.decode(self.replay, self.modules[layer], line, a, b, windows, slots)

    def convolve(self, layer: int, slots: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
        """The same by hand, in float64; the windows move."""
        module, windows = self.modules[layer], self.conv[LAYERS.index(layer)]
        out = torch.zeros_like(line)
        for row, slot in enumerate(slots.tolist()):
            if slot > 0:
                seen = torch.cat([windows[slot], line[row, :, None]], dim=1)
                y = (seen.double() * module.conv_weights.double()).sum(1) + module.bias.double()
                out[row] = (y * torch.sigmoid(y)).to(line.dtype)
                windows[slot] = seen[:, 1:]
        return out


def project(rng: torch.Generator, slots: list[int], dtype=torch.float32):
    """``q, k, v, z, b, a`` of each key head ``[batch, key_heads, ...]``, NaN where a row is a pad.

    The pads of `z` are numbers: they are copied like the rest.
    """
    sizes = [SPEC.state, SPEC.state, RATIO * SPEC.dim, RATIO * SPEC.dim, RATIO, RATIO]
    parts = [torch.randn(len(slots), SPEC.key_heads, n, generator=rng).to(dtype) for n in sizes]
    pads = torch.tensor(slots) <= 0
    for part in (*parts[:3], *parts[4:]):
        part[pads] = torch.nan
    return parts


def join(parts, by_head: bool) -> torch.Tensor:
    """A projection as its model has it."""
    if by_head:
        return torch.cat(parts, dim=2).flatten(1)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def untouched(*args):
    raise AssertionError("SGLang's own function was called")


@pytest.mark.parametrize(
    ("backend", "order", "steps"), [("torch", [5, 0, 2, -1], 6), ("triton", [0, 5], 1)]
)
def test_projections_are_worth_their_lines(backend, order, steps, seed, monkeypatch):
    """Bit for bit; and lines what a convolution by hand, and a readout of its outputs, make."""
    lines, heads, whole, both, by_hand = (
        Convolving(
            torch.Generator().manual_seed(seed), backend=backend if i < 4 else "torch",
            windows=torch.float32 if i < 4 else None,
        )
        for i in range(5)
    )  # fmt: skip
    servers = (lines, heads, whole, both, by_hand)
    for server in servers:
        server.clear(2, 5)
        shape = server.states[:, [2, 5]].shape
        server.states[:, [2, 5]] = torch.randn(shape, generator=server.rng)
    rng = torch.Generator().manual_seed(seed + 1)
    kernel = _DeltaKernel(by_hand.replay)
    slots = torch.tensor(order, dtype=torch.int32)
    live = slots > 0
    for _ in range(steps):  # six go past a fold
        with forced(fused=None):
            for server in servers:
                server.replay.begin(slots)
            for layer in LAYERS:
                parts = project(rng, order)
                qkvz, ba = (join(p, by_head=False) for p in (parts[:4], parts[4:]))
                line, (b, a) = qkvz[:, :CHANNELS], ba.split(SPEC.heads, dim=1)
                z = parts[3].reshape(-1, SPEC.heads, SPEC.dim)
                want = lines.decode_from(layer, slots, line, a, b)
                assert want is not None
                assert want.shape == (1, len(order), SPEC.heads, SPEC.dim)
                assert not want[0, ~live].any()
                for server, by_head in ((heads, BY_HEAD), (whole, WHOLE), (both, WHOLE)):
                    monkeypatch.setattr(backends, "_current", server.replay)
                    given = [join(p, by_head) for p in (parts[:4], parts[4:])]
                    # RadixLinearAttention passes on whatever is in the gates' place.
                    decode, gates = server.decode_from, (given[1], given[1])
                    if server is both:  # qwen3_5 on CUDA, which asks for z
                        y, z_out = decode(layer, slots, tuple(given), *gates)
                    else:
                        handed, z_out, *_ = convolution._around(by_head)(untouched, *given, *SIZES)
                        y = decode(layer, slots, handed, *gates)
                    assert z_out.shape == z.shape
                    assert_bitwise_equal(y, want)
                    assert_bitwise_equal(z_out, z)
                    live_slots = slots[live].long()
                    assert_bitwise_equal(server.conv[:, live_slots], lines.conv[:, live_slots])
                ready = by_hand.convolve(layer, slots, line)
                assert by_hand.decode_from(layer, slots, line, a, b) is None
                kernel.layer = layer
                reference = kernel.packed_decode(ready, a, b)
                assert peak_error(want[0, live], reference[0, live]) < 2e-5
                assert_bitwise_equal(lines.conv, by_hand.conv)
            for server in servers:
                server.replay.finish()
    for slot in (2, 5) if steps > 1 else ():
        assert_bitwise_equal(heads.state(slot), lines.state(slot))
        assert_bitwise_equal(whole.state(slot), lines.state(slot))
        assert_bitwise_equal(both.state(slot), lines.state(slot))


def planned(case: str, rng: torch.Generator) -> Server:
    options = {"dtype": torch.bfloat16} if case.endswith("type") else {}
    if case == "windows of another type":
        options["windows"] = torch.float32
    if case == "windows that are not ours":
        options["windows"] = None
    if case == "one kernel":
        options["backend"] = "triton"
    if case in ("verify", "decode of a server that verifies"):
        options["window"] = 3
    server = Convolving(rng, **options)
    slots = torch.tensor([2, 5, -1], dtype=torch.int32)
    server.clear(2, 5)
    if case != "no step":
        server.replay.begin(slots, verify=case == "verify")
    if case == "extend":
        server.replay.before_extend(slots)
    if case == "finished":
        server.replay.finish()
    return server


LEFT = (
    "no step", "extend", "finished", "verify", "another type", "windows of another type",
    "windows that are not ours", "one kernel", "fewer rows", "more rows", "no replay",
)  # fmt: skip


@pytest.mark.parametrize("by_head", [BY_HEAD, WHOLE], ids=["by head", "whole"])
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_sglang(case, by_head, rng, monkeypatch):
    server = planned(case, rng)
    monkeypatch.setattr(backends, "_current", None if case == "no replay" else server.replay)
    rows = {"fewer rows": [2, 5], "more rows": [2, 5, 1, 3]}.get(case, [2, 5, 1])
    dtype = torch.bfloat16 if case == "windows of another type" else torch.float32
    parts = project(rng, rows, dtype)
    qkvz, ba = (join(p, by_head) for p in (parts[:4], parts[4:]))
    calls, answer = [], object()

    def original(*args):
        calls.append(args)
        return answer

    assert convolution._around(by_head)(original, qkvz, ba, *SIZES) is answer
    (called,) = calls
    assert called[0] is qkvz
    assert called[1] is ba
    assert called[2:] == SIZES
    if case == "no replay":
        return
    before = server.conv.clone()
    line, gate = qkvz[:, :CHANNELS], ba[:, : SPEC.heads]
    slots = torch.tensor(rows, dtype=torch.int32)
    for given in (line, (qkvz, ba)):
        assert server.decode_from(LAYERS[0], slots, given, gate, gate) is None
    assert_bitwise_equal(server.conv, before)


def test_a_projection_of_no_tensor_is_left_to_sglang(rng, monkeypatch):
    """As quantized ones are: a tuple."""
    server = planned("decode", rng)
    monkeypatch.setattr(backends, "_current", server.replay)
    given = (torch.zeros(3, 4), torch.zeros(3))
    hand_on = convolution._around(WHOLE)
    assert hand_on(lambda *args: args, given, None, *SIZES) == (given, None, *SIZES)


def test_projections_whose_rows_may_be_trimmed_are_taken_apart(rng, monkeypatch):
    """Between the projections and the layer; lines are still ours."""
    server = planned("decode", rng)
    monkeypatch.setattr(backends, "_current", server.replay)
    server.replay.projects = False
    parts = project(rng, [2, 5, -1])
    qkvz, ba = (join(p, WHOLE) for p in (parts[:4], parts[4:]))
    assert convolution._around(WHOLE)(lambda *args: args, qkvz, ba, *SIZES) == (qkvz, ba, *SIZES)
    slots, gate = torch.tensor([2, 5, -1], dtype=torch.int32), ba[:, : SPEC.heads]
    assert server.decode_from(LAYERS[0], slots, qkvz[:, :CHANNELS], gate, gate) is not None


@pytest.mark.parametrize("case", ["decode", "decode of a server that verifies"])
def test_what_is_taken_over(case, rng, monkeypatch):
    """The least change of what is left: with it, nothing would reach the function of `untouched`"""
    server = planned(case, rng)
    monkeypatch.setattr(backends, "_current", server.replay)
    parts = project(rng, [2, 5, -1])
    given = [join(p, BY_HEAD) for p in (parts[:4], parts[4:])]
    handed, z_out, *_ = convolution._around(BY_HEAD)(untouched, *given, *SIZES)
    server.replay.finish()
    slots = torch.tensor([2, 5, -1], dtype=torch.int32)
    before = server.conv.clone()
    with pytest.raises(PlanError, match=r"^decode: got layer 1 in a step that was not planned"):
        server.decode_from(LAYERS[0], slots, handed, given[1], given[1])
    assert_bitwise_equal(server.conv, before)
    assert z_out.isnan().all()


def test_hooks_go_around_the_models_that_are_loaded(monkeypatch):
    registered, applied = [], []
    registry = ModuleType("hook_registry")
    registry.HookType = namespace(AROUND="around")
    registry.HookRegistry = namespace(
        register=lambda *call: registered.append(call), apply_hooks=lambda: applied.append(1)
    )
    target = next(name for name, by_head in convolution.PROJECTIONS.items() if by_head)
    other = next(name for name, by_head in convolution.PROJECTIONS.items() if not by_head)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    home = target.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, home, ModuleType(home))
    monkeypatch.delitem(sys.modules, other.rpartition(".")[0], raising=False)
    convolution.hook_projections()
    assert [(name, kind) for name, _, kind in registered] == [(target, "around")]
    assert len(applied) == 1


# The backend ------------------------------------------------------------------------------------


class Theirs:
    """SGLang's ``GDNAttnBackend``, which convolves."""

    def __init__(self, server: Convolving, slots: torch.Tensor) -> None:
        self.calls = []
        caches = {
            layer: namespace(conv=[server.conv[i]], temporal=server.states[i])
            for i, layer in enumerate(LAYERS)
        }
        self.req_to_token_pool = namespace(mamba2_layer_cache=caches.__getitem__)
        self.forward_metadata = namespace(mamba_cache_indices=slots)

    def forward_decode(self, layer, forward_batch, **given):
        self.calls.append((layer, forward_batch, given))
        return "theirs"


@pytest.mark.parametrize("ours", [True, False])
def test_the_backend_convolves_and_ends_the_step(ours, rng):
    server = Convolving(rng, windows=torch.float32 if ours else None)
    server.clear(2, 5)
    slots = torch.tensor([2, 5], dtype=torch.int32)
    made = object.__new__(backends._gdn(Theirs))
    Theirs.__init__(made, server, slots)
    made.replay, made._replay_kernel = server.replay, _DeltaKernel(server.replay)
    batch = namespace(mamba_track_mask=None)
    server.replay.begin(slots)
    for layer in LAYERS:
        parts = project(rng, [2, 5])
        given = {
            "mixed_qkv": join(parts[:3], by_head=False),
            "a": parts[5].flatten(1),
            "b": parts[4].flatten(1),
        }
        before = server.conv.clone()
        assert server.replay._plan is not None
        out = made.forward_decode(server.modules[layer], batch, **given, more=1)
        if ours:
            assert out.shape == (1, 2, SPEC.heads, SPEC.dim)
            index = LAYERS.index(layer)
            assert_bitwise_equal(server.conv[index, slots, :, -1], given["mixed_qkv"])
        else:
            assert out == "theirs"
            called = made.calls.pop()
            assert called == (server.modules[layer], batch, {**given, "more": 1})
            assert made._replay_kernel.layer == layer
            assert_bitwise_equal(server.conv, before)
    assert not made.calls
    assert (server.replay._plan is None) == ours  # theirs ends it where it tracks


@pytest.mark.parametrize("activations", [("silu", "swish"), (None, None), ("silu", "gelu")])
@pytest.mark.parametrize("across", [False, True])
def test_windows_that_are_not_ours(activations, across):
    """A CPU with AMX has windows across; what is not SiLU would silently be nothing."""
    modules = dict(enumerate(namespace(activation=name) for name in activations))
    states = torch.zeros(2, SLOTS, CHANNELS, WIDTH - 1, dtype=torch.bfloat16)
    if across:
        states = states.mT.contiguous().mT
    ours = not across and "gelu" not in activations
    found = convolution.windows(states, namespace(modules=modules))
    assert found == (torch.bfloat16 if ours else None)


def test_scratch_memory_is_counted(rng):
    """What the prepass hands to the readout, for each batch size that was run."""
    server = Convolving(rng, backend="triton")
    server.clear(2, 5)
    assert server.replay.scratch_nbytes == 0
    held = []
    for order in ([2], [2, 5]):
        with forced(fused=None):
            server.replay.begin(torch.tensor(order, dtype=torch.int32))
            for layer in LAYERS:
                parts = project(rng, order)
                line = join(parts[:3], by_head=False)
                slots = torch.tensor(order, dtype=torch.int32)
                server.decode_from(layer, slots, line, parts[5].flatten(1), parts[4].flatten(1))
        server.replay.finish()
        held.append(server.replay.scratch_nbytes)
    line = CHANNELS * server.replay.pool.dtype.itemsize
    assert held[0] >= line
    assert held[1] >= held[0] + 2 * line
