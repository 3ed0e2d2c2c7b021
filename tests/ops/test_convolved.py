"""What `convolved_readout` refuses, and that nothing has changed then."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayinfer import (
    GDNSpec,
    HostPlanner,
    InputError,
    KDASpec,
    Mamba2Spec,
    PlanError,
    StatePool,
    UnsupportedError,
    ops,
)
from replayinfer.operands import check_convolved
from replayinfer.testing import assert_untouched, initial_states, layer_weights, snapshot

SPEC = GDNSpec(heads=4, dim=8, state=16, key_heads=2, conv_width=0)
BUCKET, SLOTS, WIDTH = 3, 5, 4
CHANNELS = SPEC.conv_channels
MESSAGE = r": got .*; allowed .*; "
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)


class Step:
    """A step of two sequences and a pad, folded unless told otherwise, and what it would get."""

    def __init__(self, rng, spec=SPEC, *, fold=True, window=1, direct=False, backend="torch"):
        self.backend = backend
        self.pool = pool = StatePool(spec, [2], 3, capacity=3, max_window=2)
        pool.bind(2, **layer_weights(spec, rng))
        sequences = pool.alloc(2)
        for seq, state in zip(sequences, initial_states(spec, 2, rng), strict=True):
            pool.seed(seq, {2: state}, tokens=3)
        self.planner = HostPlanner(pool)
        self.plan = self.planner.plan(sequences, window, bucket=BUCKET, direct=direct)
        if fold:
            ops.fold(self.planner, self.plan, backend=backend)
        channels = spec.conv_channels
        self.conv = ops.ShiftedConvolution(
            x=torch.randn(BUCKET, channels, generator=rng),
            states=torch.randn(SLOTS, channels, WIDTH - 1, generator=rng),
            slots=torch.tensor([4, 1, -1]),
            weight=torch.randn(channels, WIDTH, generator=rng),
            bias=torch.randn(channels, generator=rng),
        )
        self.gates = {name: torch.randn(BUCKET, 1, 4, generator=rng) for name in ("a", "b")}

    def run(self, *, without=(), out=None, gates=(), **changes):
        """With other attributes of the convolution, and other gates."""
        conv = dataclasses.replace(self.conv, **changes)
        gates = {**self.gates, **dict(gates)}
        gates = {name: value for name, value in gates.items() if name not in without}
        return ops.convolved_readout(
            self.pool, self.plan, 2, conv, out=out, backend=self.backend, **gates
        )

    def refuses(self, error, match, **changes):
        states = changes.get("states", self.conv.states)
        tensors = {"states": states, "checkpoints": self.pool.checkpoints.storage}
        tensors |= self.pool.inputs.fields
        before, ran = snapshot(tensors), set(self.plan.layers_run)
        with pytest.raises(error, match=match):
            self.run(**changes)
        assert_untouched(before, tensors)
        assert self.plan.layers_run == ran


def windows(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


WRONG = {
    "x one row short": ("x", torch.zeros(BUCKET - 1, CHANNELS)),
    "x of a window": ("x", torch.zeros(BUCKET, 1, CHANNELS)),
    "x of another type": ("x", torch.zeros(BUCKET, CHANNELS, dtype=torch.bfloat16)),
    "x with its channels apart": ("x", torch.zeros(CHANNELS, BUCKET).T),
    "slots one short": ("slots", torch.zeros(BUCKET - 1, dtype=torch.int32)),
    "slots of another type": ("slots", torch.zeros(BUCKET, dtype=torch.int16)),
    "weights of other channels": ("weight", torch.zeros(CHANNELS - 2, WIDTH)),
    "weights of a convolution": ("weight", torch.zeros(CHANNELS, 1, WIDTH)),
    "weights of another type": ("weight", torch.zeros(CHANNELS, WIDTH, dtype=torch.float64)),
    "no weights": ("weight", None),
    "bias of other channels": ("bias", torch.zeros(CHANNELS - 2)),
    "bias of another type": ("bias", torch.zeros(CHANNELS, dtype=torch.float64)),
    "windows one longer": ("states", windows(SLOTS, CHANNELS, WIDTH)),
    "windows of other channels": ("states", windows(SLOTS, CHANNELS + 2, WIDTH - 1)),
    "windows of another type": ("states", windows(SLOTS, CHANNELS, WIDTH - 1, dtype=torch.half)),
    "windows that lie across": ("states", windows(SLOTS, WIDTH - 1, CHANNELS).mT),
    "windows of one memory": ("states", windows(1, CHANNELS, WIDTH - 1).expand(SLOTS, -1, -1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors(name, rng):
    field, value = WRONG[name]
    Step(rng).refuses(InputError, f"^{field}{MESSAGE}", **{field: value})


@pytest.mark.parametrize("field", ["weight", "states"])
def test_channels_with_gaps_between_them(field, rng):
    step = Step(rng)
    value = getattr(step.conv, field)
    room = torch.nn.functional.pad(value, (0, 2))[..., : value.shape[-1]]
    step.refuses(InputError, rf"^conv{MESSAGE}", **{field: room})


def test_wrong_activations_gates_and_outputs(rng):
    step = Step(rng)
    step.refuses(
        InputError, "^activation: got 'gelu'; allowed 'silu' and None; ", activation="gelu"
    )
    step.refuses(InputError, "^inputs: got g; allowed a, b for gdn; ", gates={"g": step.gates["a"]})
    q = torch.zeros(BUCKET, 1, 2, 16)
    step.refuses(InputError, "^inputs: got q; allowed a, b for gdn; ", gates={"q": q})
    step.refuses(InputError, "^b: got NoneType", without="b")
    step.refuses(InputError, f"^a{MESSAGE}", gates={"a": step.gates["a"][:2]})
    step.refuses(InputError, f"^out{MESSAGE}", out=torch.zeros(BUCKET, 1, 4, 6))
    step.refuses(InputError, f"^out{MESSAGE}", out=torch.zeros(1, 1, 4, 8).expand(BUCKET, 1, 4, 8))
    assert step.run().shape == (BUCKET, 1, 4, 8)  # after all of that


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"window": 2}, "got a window of 2; "),
        ({"direct": True}, "got a direct step; "),
        ({"spec": Mamba2Spec(heads=4, dim=8, state=16, conv_width=0)}, "got family 'mamba2'; "),
        ({"spec": KDASpec(heads=4, dim=8, state=16, conv_width=0)}, "got family 'kda'; "),
        ({"spec": dataclasses.replace(SPEC, dim=7)}, "got dim=7; "),
    ],
    ids=str,
)
def test_unsupported_steps(options, match, rng):
    step = Step(rng, **options)
    step.refuses(UnsupportedError, f"^convolved_readout: {match}.*; convolve first")
    assert ops.convolves(step.pool, BUCKET, backend="torch") == ("spec" not in options)


@interpreted
def test_a_bucket_that_one_kernel_serves(rng):
    pytest.importorskip("triton")
    from replayinfer.kernels.launch.config import LaunchConfig
    from replayinfer.kernels.launch.lookup import forced

    step = Step(rng, backend="triton")
    with forced(fused=LaunchConfig(num_warps=4, rows=32)):
        assert not ops.convolves(step.pool, BUCKET, backend="triton")
        assert ops.convolves(step.pool, BUCKET, backend="torch")
        step.refuses(UnsupportedError, "^convolved_readout: got a bucket of 3, whose step is one")
    with forced(fused=None):
        assert ops.convolves(step.pool, BUCKET, backend="triton")
        step.refuses(InputError, f"^x{MESSAGE}", x=step.conv.x[:2])
    small, large = (ops.convolves(step.pool, n, backend="triton") for n in (1, 10_000))
    assert not small, "the rule has one kernel for it"
    assert large


def test_wrong_orders(rng):
    step = Step(rng, fold=False)
    step.refuses(PlanError, "^convolved_readout: got a plan")
    ops.fold(step.planner, step.plan, backend="torch")
    step.run()
    ops.commit(step.planner, step.plan)
    step.refuses(PlanError, "^convolved_readout: got a plan")


def test_it_counts_as_the_run_of_its_layer(rng):
    step = Step(rng)
    before = step.conv.states.clone()
    y = step.run()
    assert step.plan.layers_run == {2}
    assert not y[2].any()
    assert not torch.equal(step.conv.states[[4, 1]], before[[4, 1]])
    assert torch.equal(step.conv.states[[0, 2, 3]], before[[0, 2, 3]])
    assert (ops.commit(step.planner, step.plan) == [1, 1]).all()


def test_gates_by_key_head_are_checked_where_they_lie(rng):
    """A copy would be a kernel, in every layer of every captured step."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            assert name not in ("clone", "copy_", "_to_copy", "cat"), name
            return function(*args, **(kwargs or {}))

    step = Step(rng)
    key_heads, values = SPEC.key_heads, SPEC.heads // SPEC.key_heads * SPEC.dim
    whole = torch.randn(BUCKET, key_heads, 2 * SPEC.state + 2 * values, generator=rng)
    x, z = whole.split([whole.shape[2] - values, values], dim=2)
    gates = torch.randn(BUCKET, key_heads, 4, generator=rng).split(2, dim=2)
    named = dict(zip("ba", gates, strict=True))
    z_out = torch.empty(BUCKET, SPEC.heads, SPEC.dim)
    conv = dataclasses.replace(step.conv, x=x, z=z, z_out=z_out)
    with Copies():
        ready = check_convolved(step.pool, BUCKET, conv, named, "")
    assert all(ready[name] is named[name] for name in named)
    with pytest.raises(InputError, match=r"b: got .*ratio"):
        check_convolved(step.pool, BUCKET, conv, {"a": named["a"], "b": named["b"][:, 0]}, "")
    with pytest.raises(InputError, match="inputs: got dt"):
        check_convolved(step.pool, BUCKET, conv, {**named, "dt": named["a"]}, "")
