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
from replayinfer.backends import select
from replayinfer.operands import check_convolved
from replayinfer.planner import DevicePlanner
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

    def __init__(
        self, rng, spec=SPEC, *, fold=True, window=1, direct=False, backend="torch",
        planner="host",
    ):  # fmt: skip
        self.backend = backend
        self.pool = pool = StatePool(spec, [2], 3, capacity=3, max_window=2, planner=planner)
        pool.bind(2, **layer_weights(spec, rng))
        self.sequences = sequences = pool.alloc(2)
        for seq, state in zip(sequences, initial_states(spec, 2, rng), strict=True):
            taps = torch.randn(spec.conv_channels, max(spec.conv_width - 1, 0), generator=rng)
            conv = {2: taps} if spec.conv_width else None
            pool.seed(seq, {2: state}, conv=conv, tokens=3)
        on_host = planner == "host"
        self.planner = HostPlanner(pool) if on_host else DevicePlanner(pool, select(backend, pool))
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

    def again(self):
        """The next step of the same sequences, folded."""
        self.plan = self.planner.plan(self.sequences, bucket=BUCKET)
        ops.fold(self.planner, self.plan, backend=self.backend)

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
    "weights of one tap": ("weight", torch.zeros(CHANNELS, 1)),
    "weights of no tap": ("weight", torch.zeros(CHANNELS, 0)),
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


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_a_pool_that_keeps_rings(backend, rng):
    """The token would be missing in them."""
    step = Step(rng, dataclasses.replace(SPEC, conv_width=WIDTH), backend=backend)
    rings = step.pool.conv.rows.clone()
    match = r"^convolved_readout: got .*conv_width=4.*; allowed conv_width=0, .*; call conv_update "
    step.refuses(UnsupportedError, match)
    assert torch.equal(step.pool.conv.rows, rings)
    for bucket in (BUCKET, 10_000):
        assert not ops.convolves(step.pool, bucket, backend=backend)
    assert ops.convolves(Step(rng, backend=backend).pool, 10_000, backend=backend)


@pytest.mark.parametrize(
    "spec",
    [
        Mamba2Spec(heads=4, dim=8, state=16, conv_width=0),
        KDASpec(heads=4, dim=8, state=16, conv_width=0),
        dataclasses.replace(SPEC, dim=7),
        dataclasses.replace(SPEC, conv_width=WIDTH),
    ],
    ids=lambda spec: f"{spec.family} dim={spec.dim} conv_width={spec.conv_width}",
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_a_warmup_skips_pools_that_are_not_served(backend, spec, rng):
    """Whatever the examples, which are those of a served pool: an engine gives them to each."""
    example = Step(rng)
    pool = StatePool(spec, [2], 3, capacity=3, max_window=2)
    pool.bind(2, **layer_weights(spec, rng))
    before = example.conv.states.clone()
    for conv in (example.conv, dataclasses.replace(example.conv, weight=None)):
        ops.warmup(
            HostPlanner(pool), BUCKET, inputs=[], convolved=[(conv, example.gates)],
            backend=backend,
        )  # fmt: skip
    assert torch.equal(example.conv.states, before)


def test_a_warmup_refuses_wrong_examples_of_served_pools(rng):
    """Where a step is skipped as well: which are depends on the bucket."""
    step = Step(rng)
    planner = HostPlanner(step.pool)

    def warm(gates=step.gates, options=None, **changes):
        example = dataclasses.replace(step.conv, **changes), gates
        ops.warmup(planner, BUCKET, convolved=[example], backend="torch", **(options or {}))

    for options in ({}, {"window": 2}, {"direct": True}):
        for name in ("weights of one tap", "no weights", "x of another type", "slots one short"):
            field, value = WRONG[name]
            with pytest.raises(InputError, match=f"^{field}{MESSAGE}"):
                warm(options=options, **{field: value})
        with pytest.raises(InputError, match=r"^b: got NoneType"):
            warm({"a": step.gates["a"]}, options)
        warm(options=options)


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


@interpreted
@pytest.mark.parametrize("planner", ["host", "device"])
def test_memory_that_the_kernels_keep(planner, rng):
    """Of each bucket once, weights and scales of rows and the line; another planner has its own."""
    pytest.importorskip("triton")
    from replayinfer.kernels.launch.lookup import forced

    def size(bucket):
        return 4 * bucket * (SPEC.heads * (2 * 16 + 4) + CHANNELS)

    step = Step(rng, backend="triton", planner=planner)
    held = step.pool.nbytes
    assert ops.scratch_bytes(step.planner) == 0
    with forced(fused=None):
        for _ in range(2):
            step.run()
            assert ops.scratch_bytes(step.planner) == size(BUCKET)
            ops.commit(step.planner, step.plan, backend="triton")
            step.again()
        example = step.conv, step.gates
        ops.warmup(step.planner, 5, inputs=[], convolved=[example], backend="triton")
    assert ops.scratch_bytes(step.planner) == size(BUCKET) + size(5)
    assert step.pool.nbytes == held
    assert ops.scratch_bytes(Step(rng).planner) == 0


def test_wrong_orders(rng):
    step = Step(rng, fold=False)
    step.refuses(PlanError, "^convolved_readout: got a plan")
    ops.fold(step.planner, step.plan, backend="torch")
    step.run()
    ops.commit(step.planner, step.plan)
    step.refuses(PlanError, "^convolved_readout: got a plan")


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("planner", ["host", "device"])
def test_a_second_time_in_a_step(planner, end, rng):
    """The windows would move twice; a plain readout may come again, before or after."""
    step = Step(rng, planner=planner)
    dims = {"q": (2, 16), "k": (2, 16), "v": (4, 8)}
    tokens = {n: torch.randn(BUCKET, 1, *dims[n], generator=rng) for n in dims}

    def plain():
        for _ in range(2):
            ops.readout(step.pool, step.plan, 2, backend="torch", **tokens, **step.gates)

    plain()
    step.refuses(InputError, f"^x{MESSAGE}", x=step.conv.x[:2])  # which is no call
    before = step.conv.states.clone()
    step.run()
    moved = step.conv.states.clone()
    assert not torch.equal(moved, before)
    match = "^convolved_readout: got layer 2 a second time .*; allowed once, .*; keep its output"
    for _ in range(2):
        step.refuses(PlanError, match)
    plain()
    step.refuses(PlanError, match)
    ops.warmup(step.planner, 2, convolved=[(step.conv, step.gates)], backend="torch")
    assert torch.equal(step.conv.states, moved)
    if end == "commit":
        ops.commit(step.planner, step.plan)
    else:
        step.planner.abort(step.plan)
    step.again()
    step.run()
    assert not torch.equal(step.conv.states, moved)


def test_a_capture_after_a_run(rng, monkeypatch):
    """It moves no window before the graph is replayed, which calls nothing of this."""
    step = Step(rng)
    captures = [False, True, False, True]
    monkeypatch.setattr(ops, "capturing", lambda device: captures.pop(0))
    for _ in range(2):
        step.run()
    for _ in range(2):
        step.refuses(PlanError, "^convolved_readout: got layer 2 a second time")
    assert not captures


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
