"""Gated norms behind a readout: which are replaced, when ours run, and what goes to SGLang's."""

from __future__ import annotations

import pytest
import torch

from replayinfer.integrations.sglang.norms import replace_norms
from replayinfer.testing import assert_bitwise_equal

from ..kernels.test_gated_norm import check
from .stand_ins import LAYERS, SPECS, Server, model

MARK = 7.0  # what SGLang's norms answer here
DIM = SPECS["gdn"].dim
HEADS = SPECS["gdn"].heads
EPS = 1e-3  # large enough to count
SLOTS = torch.tensor([5, 0, 2], dtype=torch.int32)
NO_SLOTS = torch.empty(0, dtype=torch.int32)

FUSED = "sglang.kernels.ops.attention.fla.fused_norm_gate"
PLAIN = "sglang.kernels.ops.attention.fla.layernorm_gated"


class _Norm(torch.nn.Module):
    """What SGLang's norms share. A call is kept as it came, and answered by marks."""

    def __init__(self, dim: int = DIM, *, activation: str = "swish", eps: float = EPS) -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = torch.nn.Parameter(torch.randn(dim))
        self.register_parameter("bias", None)
        self.calls: list[tuple] = []

    def answer(self, x, *given):
        self.calls.append((x, *given))
        return torch.full_like(x, MARK)


class FusedRMSNormGated(_Norm):
    __module__ = FUSED

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        return self.answer(x, g, residual, prenorm, residual_in_fp32)


class RMSNorm(_Norm):
    __module__ = PLAIN

    def __init__(self, *args, group_size=None, norm_before_gate=True, **options) -> None:
        super().__init__(*args, **options)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate

    def forward(self, x, z=None):
        return self.answer(x, z)


class LayerNorm(RMSNorm):
    __module__ = PLAIN

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(DIM))


class GroupNorm(RMSNorm):
    """A subclass, as a model has one that norms by groups."""

    __module__ = "sglang.srt.models.bailing_moe_linear"


def without(norm, name):
    setattr(norm, name, None)
    return norm


def biased(norm):
    norm.bias = torch.nn.Parameter(torch.zeros(DIM))
    return norm


def elsewhere(kind):
    """The same class in another module."""
    return type(kind.__name__, (kind,), {"__module__": "sglang.srt.layers.layernorm"})


def serve(*norms, rng, family="gdn", **options):
    """A server whose recurrent layers have a norm each beside them, replaced."""
    server = Server(family, rng, capacity=4, **options)
    for layer, norm in zip(LAYERS, norms, strict=False):
        server.whole.model["layers"][layer]["norm"] = norm
    server.clear(2, 5)
    return server


def one(norm, rng, **options):
    """A server in a decode step, and its norm, replaced."""
    server = serve(norm, rng=rng, **options)
    assert replace_norms(server.whole, server.replay) == 1
    server.replay.begin(SLOTS)
    return server, norm


def rows(rng, count=6, dtype=torch.float32, dim=DIM):
    return tuple(torch.randn(count, dim, generator=rng).to(dtype) for _ in range(2))


def is_ours(norm, rng) -> bool:
    """Whether a call is ours, by its values; then SGLang's norm saw nothing, else all of it."""
    x, z = rows(rng)
    given, calls = x.clone(), len(norm.calls)
    got = norm(given, z)
    if len(norm.calls) == calls:
        check(got, x, z, norm.weight.detach(), EPS, "silu")
        return True
    assert norm.calls[-1][0] is given
    assert norm.calls[-1][1] is z
    assert_bitwise_equal(given, x)
    assert (got == MARK).all()
    return False


# Which -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_norms_beside_replayed_layers_are_replaced(family, activation, rng):
    norms = [kind(activation=activation) for kind in (FusedRMSNormGated, RMSNorm)]
    server = serve(*norms, rng=rng, family=family)
    assert replace_norms(server.whole, server.replay) == 2
    server.replay.begin(SLOTS)
    for norm in norms:
        x, z = rows(rng)
        got = norm(x.clone(), z)
        check(got, x, z, norm.weight.detach(), EPS, activation.replace("swish", "silu"))
        assert not norm.calls


REFUSED = {
    "a LayerNorm": LayerNorm,
    "groups": lambda: RMSNorm(group_size=DIM // 2),
    "after its gate": lambda: RMSNorm(norm_before_gate=False),
    "another activation": lambda: FusedRMSNormGated(activation="gelu"),
    "another activation, plain": lambda: RMSNorm(activation="tanh"),
    "no weight": lambda: without(FusedRMSNormGated(), "weight"),
    "a bias": lambda: biased(RMSNorm()),
    "a bias, fused": lambda: biased(FusedRMSNormGated()),
    "a subclass": GroupNorm,
    "of another module": elsewhere(FusedRMSNormGated),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_other_norms_are_left(make, rng):
    other, ours = make(), RMSNorm()
    server = serve(other, ours, rng=rng)
    assert replace_norms(server.whole, server.replay) == 1
    server.replay.begin(SLOTS)
    x, z = rows(rng)
    assert (other(x, z) == MARK).all()
    assert "forward" not in vars(other)
    assert is_ours(ours, rng)


def test_norms_elsewhere_are_left(rng):
    """In a layer that is not recurrent, above or below a recurrent one, and in a draft."""
    own, beside, above, below, drafts = (RMSNorm() for _ in range(5))
    server = serve(own, rng=rng)
    layers = server.whole.model["layers"]
    layers[0] = torch.nn.ModuleDict({"norm": beside})
    server.whole.model["norm"] = above
    layers[LAYERS[1]]["out"] = torch.nn.ModuleDict({"norm": below})
    draft, _ = model(server.spec, rng)  # its layers are not the server's
    draft.model["layers"][LAYERS[0]]["norm"] = drafts
    assert replace_norms(server.whole, server.replay) == 1
    assert replace_norms(draft, server.replay) == 0
    server.replay.begin(SLOTS)
    assert is_ours(own, rng)
    for norm in (beside, above, below, drafts):
        assert not is_ours(norm, rng)


def test_several_norms_of_a_layer(rng):
    server = serve(RMSNorm(), rng=rng)
    more = server.whole.model["layers"][LAYERS[0]]["second"] = FusedRMSNormGated()
    assert replace_norms(server.whole, server.replay) == 2
    server.replay.begin(SLOTS)
    assert is_ours(more, rng)


def test_mamba2_has_none(rng):
    """Its mixer norms inside, over groups."""
    server = Server("mamba2", rng, capacity=4)
    server.whole.model["layers"][LAYERS[0]]["mixer"].norm = norm = RMSNorm()
    assert replace_norms(server.whole, server.replay) == 0
    server.clear(2, 5)
    server.replay.begin(SLOTS)
    assert not is_ours(norm, rng)


# When --------------------------------------------------------------------------------------------


def test_from_a_decode_to_the_next_extend(rng):
    server = serve(norm := FusedRMSNormGated(), rng=rng)
    replace_norms(server.whole, server.replay)
    replay = server.replay
    assert not is_ours(norm, rng)  # nothing was planned
    replay.before_extend(torch.tensor([2, 5], dtype=torch.int32))
    assert not is_ours(norm, rng)
    replay.after_extend(torch.tensor([2, 5], dtype=torch.int32))
    assert not is_ours(norm, rng)
    replay.begin(SLOTS)
    assert is_ours(norm, rng)
    replay.finish()
    assert is_ours(norm, rng)  # the last layer's comes after it
    server.decode([5, 0, 2])
    assert is_ours(norm, rng)
    replay.before_extend(NO_SLOTS)  # of a rank without requests
    assert not is_ours(norm, rng)
    replay.after_extend(NO_SLOTS)
    assert not is_ours(norm, rng)
    server.decode([2])
    assert is_ours(norm, rng)


def test_from_a_verify_to_the_next_extend(rng):
    server = serve(norm := RMSNorm(), rng=rng, window=3)
    replace_norms(server.whole, server.replay)
    server.extend([2, 5], 3)
    assert not is_ours(norm, rng)
    server.replay.begin(torch.tensor([5, 2], dtype=torch.int32), verify=True)
    assert is_ours(norm, rng)
    server.replay.pause()
    assert is_ours(norm, rng)
    server.verify([5, 2], [1, 3])  # to the tokens that are accepted
    assert is_ours(norm, rng)
    server.extend([5], 2)
    assert not is_ours(norm, rng)


def test_an_abandoned_step_ends_with_the_next_extend(rng):
    server, norm = one(RMSNorm(), rng)
    server.replay.before_extend(torch.tensor([5], dtype=torch.int32))
    assert not is_ours(norm, rng)


# What --------------------------------------------------------------------------------------------


def flat(x, z):
    """Qwen3-Next and Qwen3.5: of all heads of all tokens."""
    return x.reshape(-1, x.shape[-1]), z.reshape(-1, z.shape[-1])


def with_an_axis(x, z):
    """Kimi: ``[1, tokens, heads, dim]`` and a gate ``[tokens, heads, dim]`` out of wider rows."""
    wide = torch.full((z.shape[0], z.shape[1] + 1, z.shape[2] + 8), torch.nan, dtype=z.dtype)
    wide[:, 1:, 8:] = z
    return x[None], wide[:, 1:, 8:]


def padded(x, z):
    """What ranks without tokens have; rows out of wider ones."""
    wide = torch.full((2, *x.shape), torch.nan, dtype=x.dtype)
    wide[1] = x
    return wide.transpose(0, 1)[:, 1], z


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [flat, with_an_axis, padded])
@pytest.mark.parametrize(
    ("kind", "activation"), [(FusedRMSNormGated, "sigmoid"), (RMSNorm, "silu")]
)
def test_values(kind, activation, form, dtype, rng):
    _, norm = one(kind(activation=activation), rng)
    x, z = (torch.randn(5, HEADS, DIM, generator=rng).to(dtype) for _ in range(2))
    x[0] *= 1e-2  # eps counts
    x[1] = 0  # a row that was padded
    given, gate = form(x.clone(), z)
    before = gate.clone()
    with torch.inference_mode():
        got = norm(given, gate)
    assert not norm.calls
    assert got.shape == given.shape
    assert got.data_ptr() == given.data_ptr()
    check(got.reshape(x.shape), x, z, norm.weight.detach(), EPS, activation)
    assert_bitwise_equal(gate, before)


def test_no_rows(rng):
    _, norm = one(RMSNorm(), rng)
    assert norm(*rows(rng, 0)).shape == (0, DIM)
    assert not norm.calls


def test_behind_a_readout(rng):
    """Of all layers of two steps, in SGLang's order: the last norm after the step was committed."""
    norms = [FusedRMSNormGated(), RMSNorm()]
    server = serve(*norms, rng=rng)
    replace_norms(server.whole, server.replay)
    server.extend([2, 5], 3)
    slots = [5, 2]
    for _ in range(2):
        server.replay.begin(torch.tensor(slots, dtype=torch.int32))
        for index, (layer, norm) in enumerate(zip(LAYERS, norms, strict=True)):
            each = [server.inputs(1) for _ in slots]
            y = server.replay.readout(
                layer, **{n: torch.cat([e[n] for e in each]) for n in each[0]}
            )
            if index == len(LAYERS) - 1:
                server.replay.finish()
            for i, slot in enumerate(slots):
                want = server.advance(slot, index, each[i])[0]
                assert (y[i].double() - want).abs().max() < 2e-5 * want.abs().max()
            z = torch.randn(y.shape, generator=rng)
            before = y.clone()
            got = norm(*flat(y, z))
            check(got.view(y.shape), before, z, norm.weight.detach(), EPS, "silu")
    assert not any(norm.calls for norm in norms)


def test_weights_are_those_of_the_call(rng):
    """Updated in place, or put in another parameter, or computed with for one call."""
    _, norm = one(RMSNorm(), rng)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(DIM, generator=rng))
    assert is_ours(norm, rng)
    norm.weight = torch.nn.Parameter(torch.randn(DIM, generator=rng))
    assert is_ours(norm, rng)
    x, z = rows(rng)
    lent = torch.randn(DIM, generator=rng)
    got = torch.func.functional_call(norm, {"weight": lent}, (x.clone(), z))
    check(got, x, z, lent, EPS, "silu")


# What goes on to SGLang's ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [
        ((), {"residual": "r"}, ("r", False, False)),
        ((), {"prenorm": True}, (None, True, False)),
        (("r",), {}, ("r", False, False)),
        (("r", True), {"residual_in_fp32": True}, ("r", True, True)),
    ],
)
def test_more_arguments(args, kwargs, seen, rng):
    _, norm = one(FusedRMSNormGated(), rng)
    x, z = rows(rng)
    before = x.clone()
    assert (norm(x, z, *args, **kwargs) == MARK).all()
    assert norm.calls[0][0] is x
    assert norm.calls[0][1] is z
    assert norm.calls[0][2:] == seen
    assert_bitwise_equal(x, before)


@pytest.mark.parametrize("step", [False, True])
def test_a_gate_by_its_name(step, rng):
    server, norm = one(FusedRMSNormGated(), rng)
    if not step:
        server.replay.before_extend(NO_SLOTS)
    x, z = rows(rng)
    got = norm(x.clone(), g=z)
    if norm.calls:
        assert norm.calls[0][1] is z
    else:
        assert step
        check(got, x, z, norm.weight.detach(), EPS, "silu")


UNLIKE = {
    "no gate": ((6, DIM), None),
    "tokens and heads": ((6, DIM), (2, 3, DIM)),  # a prefill's, strided
    "fewer gates": ((6, DIM), (5, DIM)),
    "one gate for all": ((6, DIM), (1, DIM)),
    "one head's gate for all": ((1, 2, 3, DIM), (2, 1, DIM)),
    "two batches": ((2, 2, 3, DIM), (2, 2, 3, DIM)),
    "one axis": ((DIM,), (DIM,)),
}


@pytest.mark.parametrize(("x", "z"), UNLIKE.values(), ids=UNLIKE)
def test_other_shapes(x, z, rng):
    _, norm = one(RMSNorm(), rng)
    x = torch.randn(x, generator=rng)
    z = None if z is None else torch.randn(z, generator=rng)
    before = x.clone()
    assert (norm(x, z) == MARK).all()
    assert norm.calls[0][0] is x
    assert norm.calls[0][1] is z
    assert_bitwise_equal(x, before)


@pytest.mark.parametrize("which", ["x", "z"])
@pytest.mark.parametrize("how", ["dtype", "channels apart"])
def test_other_layouts(how, which, rng):
    _, norm = one(RMSNorm(), rng)
    given = dict(zip("xz", rows(rng), strict=True))
    if how == "dtype":
        given[which] = given[which].bfloat16()
    else:
        given[which] = given[which].T.contiguous().T
    before = given["x"].clone()
    assert (norm(given["x"], given["z"]) == MARK).all()
    assert norm.calls[0][0] is given["x"]
    assert norm.calls[0][1] is given["z"]
    assert_bitwise_equal(given["x"], before)


class _Layer(torch.nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, z):
        return self.norm(x, z) * 2


def test_a_compiled_model(rng):
    """As ``--enable-torch-compile`` has it: in and out of steps, whoever norms in them."""
    server, norm = one(RMSNorm(), rng)
    compiled = torch.compile(_Layer(norm), backend="eager")
    for step, count in ((True, 6), (False, 6), (True, 9), (False, 9)):
        if step:
            server.replay.begin(SLOTS)
        else:
            server.replay.before_extend(NO_SLOTS)
        x, z = rows(rng, count)
        calls = len(norm.calls)
        with torch.inference_mode():
            got = compiled(x.clone(), z)
        if len(norm.calls) > calls:
            assert (got == 2 * MARK).all()
        else:
            assert step
            check(got / 2, x, z, norm.weight.detach(), EPS, "silu")
