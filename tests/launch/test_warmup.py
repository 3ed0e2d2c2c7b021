"""After a warmup no step launches a variant that was not launched before, and nothing changed."""

from __future__ import annotations

import dataclasses
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer import GDNSpec, InputError, Mamba2Spec, PlanError, ops
from replayinfer.backends.triton.variants import variants
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import assert_bitwise_equal, poison_

from ..wrapper.rig import SPECS, Rig
from .recorder import difference, recording, specialization
from .walks import SHAPES, draw, make, packed, walk

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
FUSED = {"fused": LaunchConfig(num_warps=4, rows=16), "readout": None}


@pytest.fixture
def numpy_rng(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("kernels", ["by the rule", *FUSED])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["fp32_split", "fp16"])
def test_later_steps_launch_nothing_new(shape, format, kernels, monkeypatch, numpy_rng):
    choice = {} if kernels == "by the rule" else {"fused": FUSED[kernels]}
    wrapper = make(SHAPES[shape], format=format)
    with recording(monkeypatch) as launches, forced(**choice):
        wrapper.warmup()
        warm = set(launches)
        launches.clear()
        walk(wrapper, numpy_rng)
    assert set(launches) <= warm, difference(warm, set(launches))
    assert {launch.kernel for launch in launches} >= {"_fold_kernel"}


@pytest.mark.parametrize("shape", ["odd", "round", "one head"])
def test_windows_of_several_tokens(shape, monkeypatch, numpy_rng):
    wrapper = make(SHAPES[shape], max_window=3, capacity=5)
    with recording(monkeypatch) as launches:
        wrapper.warmup()
        warm = set(launches)
        launches.clear()
        walk(wrapper, numpy_rng)
    assert set(launches) <= warm, difference(warm, set(launches))
    names = {"_verify_kernel", "_verify_prepass_kernel", "_compact_kernel"}
    assert {launch.kernel for launch in launches} >= names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_activations(dtype, monkeypatch, numpy_rng):
    wrapper = make(SHAPES["odd"], dtype=dtype, format="fp32")
    with recording(monkeypatch) as launches:
        wrapper.warmup()
        warm = set(launches)
        walk(wrapper, numpy_rng)
    assert set(launches) <= warm, difference(warm, set(launches))


@pytest.mark.parametrize("direct", ["always", 5])
def test_direct_steps(direct, monkeypatch, numpy_rng):
    wrapper = make(SHAPES["odd"], direct=direct)
    with recording(monkeypatch) as launches:
        wrapper.warmup()
        warm = set(launches)
        launches.clear()
        walk(wrapper, numpy_rng)
    assert set(launches) <= warm, difference(warm, set(launches))
    assert "_direct_kernel" in {launch.kernel for launch in launches}
    assert wrapper.counters.direct_steps


@pytest.mark.parametrize("bucket", [3, 8])  # of the examples: any will do
def test_examples_stand_for_the_layout_of_later_inputs(bucket, monkeypatch, numpy_rng):
    wrapper = make(SHAPES["odd"])
    like = SimpleNamespace(bucket=bucket, window=1)
    examples = []
    for z in (False, True):
        tokens, out = packed(wrapper.pool, like, None, z)
        examples.append({**tokens, "out": out})
    with recording(monkeypatch) as launches:
        wrapper.warmup(inputs=examples, conv=False)
        warm = set(launches)
        walk(wrapper, numpy_rng, draw=packed, conv=False)
        assert set(launches) <= warm, difference(warm, set(launches))
        launches.clear()
        make(SHAPES["odd"]).warmup()
        assert not warm & {n for n in launches if n.kernel == "_fused_kernel"}, "no difference"


def test_an_example_of_a_convolution(monkeypatch):
    wrapper = make(SHAPES["round"])
    pool, channels = wrapper.pool, SHAPES["round"].conv_channels

    def projected(bucket):
        return torch.zeros(bucket, 1, channels + 9, dtype=pool.dtype)[..., 9:]

    with recording(monkeypatch) as launches:
        wrapper.warmup(conv=[{"x": projected(2)}], inputs=[])
        warm = set(launches)
        assert {n.kernel for n in warm} == {"_conv_update_kernel", "_fold_kernel"}
        launches.clear()
        seqs = pool.alloc(3)
        wrapper.plan(seqs)
        wrapper.fold()
        wrapper.conv(0, projected(5))
        assert set(launches) <= warm, difference(warm, set(launches))
        wrapper.conv(0, projected(5).contiguous())
        assert not set(launches) <= warm, "the example makes no difference"


def convolved_call(wrapper, bucket, gap, *, slots=torch.int64):
    """A convolution of `bucket` rows that lie `gap` elements apart, and its gates."""
    channels, dtype = wrapper.pool.spec.conv_channels, wrapper.pool.dtype
    conv = ops.ShiftedConvolution(
        x=torch.zeros(bucket, channels + gap, dtype=dtype)[:, gap:],
        states=torch.full((4, channels, 3), float("nan"), dtype=dtype),
        slots=torch.zeros(bucket, dtype=slots),
        weight=torch.zeros(channels, 4, dtype=dtype),
    )
    heads = wrapper.pool.spec.heads
    projected = torch.zeros(bucket, 2 * heads + 1, dtype=dtype)[:, None]
    return conv, {"a": projected[..., 1 : heads + 1], "b": projected[..., heads + 1 :]}


@pytest.mark.parametrize("gap", [0, 4, 7])
def test_an_example_of_a_convolved_readout(gap, monkeypatch):
    wrapper = make(dataclasses.replace(SHAPES["gdn"], conv_width=0))
    pool, planner = wrapper.pool, wrapper.planner
    example = convolved_call(wrapper, 3, gap)
    seqs = pool.alloc(2)

    def step(bucket, conv, gates):
        plan = planner.plan(seqs[:bucket], bucket=bucket)
        ops.fold(planner, plan, backend="triton")
        for layer in pool.layers:
            ops.convolved_readout(pool, plan, layer, conv, backend="triton", **gates)
        planner.commit(plan)

    with recording(monkeypatch) as launches, forced(fused=None):
        for bucket in (1, 2, 5):
            ops.warmup(planner, bucket, inputs=[], convolved=[example], backend="triton")
        warm = set(launches)
        launches.clear()
        for bucket in (5, 1, 2, 1):
            step(bucket, *convolved_call(wrapper, bucket, gap))
        names = {launch.kernel for launch in launches}
        assert names == {"_fold_kernel", "_prepass_kernel", "_readout_kernel"}
        assert set(launches) <= warm, difference(warm, set(launches))
        step(2, *convolved_call(wrapper, 2, gap, slots=torch.int32))
        step(2, *convolved_call(wrapper, 2, 4 if gap != 4 else 7))
        new = difference(warm, set(launches))
        assert "slot_ptr" in new
        assert "x_ptr" in new or "PACKED" in new


def test_no_window_moves_in_a_warmup():
    spec = GDNSpec(heads=2, dim=4, state=8, key_heads=1, conv_width=0)
    wrapper = make(spec, max_window=2)
    call = convolved_call(wrapper, 2, 4)
    conv, gates = call
    conv.states[1:].fill_(1.0)
    before = conv.states.clone()

    def warm(fused=None, call=call, **options):
        planner = wrapper.planner
        with forced(fused=fused) as asked:
            ops.warmup(planner, 2, inputs=[], convolved=[call], backend="triton", **options)
        return "conv_prepass" in asked

    assert warm()
    assert_bitwise_equal(conv.states, before)
    assert not warm(FUSED["fused"]), "no such step"
    assert not warm(window=2), "no such step"
    assert not warm(direct=True), "no such step"
    wrong = dataclasses.replace(conv, states=conv.states[:, 2:])
    with pytest.raises(InputError, match="states: got"):
        warm(call=(wrong, gates))
    with pytest.raises(InputError, match="b: got NoneType"):
        warm(call=(conv, {"a": gates["a"]}))


def test_what_was_not_warmed_is_new(monkeypatch, numpy_rng):
    """The recorder finds a gap: in `z`, in a bucket that another kernel serves."""
    wrapper = make(SHAPES["round"])
    pool, plan = wrapper.pool, SimpleNamespace(bucket=1, window=1)
    tokens, _ = draw(pool, plan, numpy_rng, False)
    with recording(monkeypatch) as launches:
        wrapper.warmup([1], inputs=[tokens])
        warm = set(launches)
        for z, bucket, gap in (
            (False, 1, None),
            (True, 1, "HAS_Z"),
            (False, 16, "_readout_kernel"),
        ):
            launches.clear()
            plan = wrapper.plan(pool.alloc(1), bucket=bucket)
            wrapper.fold()
            dt = torch.zeros(bucket, 1, 16, dtype=tokens["dt"].dtype)
            wrapper.run(0, **draw(pool, plan, numpy_rng, z)[0] | {"dt": dt})
            wrapper.abort()
            missing = difference(warm, set(launches))
            assert gap in missing if gap else not missing


@pytest.mark.parametrize("kernel", ["_fold_kernel", "_fused_kernel"])
def test_layers_at_odd_addresses_share_one_kernel(kernel, monkeypatch):
    """Three heads: every layer's parameters and gate rows lie at another alignment.

    One kernel serves them all, and the fold of one layer as well as that of all.
    """
    spec = Mamba2Spec(heads=3, dim=16, state=16)
    wrapper = make(spec, format="fp32", page_rows=1, input_pages=49)
    plan = SimpleNamespace(bucket=2, window=1)
    tokens, _ = draw(wrapper.pool, plan, np.random.default_rng(0), True)
    with recording(monkeypatch) as launches, forced(fused=FUSED["fused"]):
        wrapper.warmup([2], inputs=[tokens])
    addresses = {wrapper.pool.weights["A"][i].data_ptr() % 16 for i in range(3)}
    assert len(addresses) == 3
    assert len({wrapper.pool.inputs.fields["dt"][i].data_ptr() % 16 for i in range(3)}) == 3
    assert len({launch for launch in launches if launch.kernel == kernel}) == 1


@pytest.mark.parametrize("kernels", FUSED)
@pytest.mark.parametrize("bucket", [1, 16])
@pytest.mark.parametrize(
    ("shape", "format"), [("odd", "fp32_split"), ("gdn", "bf16"), ("kda", "fp32")]
)
def test_variants_are_what_is_launched(shape, format, bucket, kernels, monkeypatch):
    """By a pool of three layers that is in use, with another plan and in another order."""
    wrapper = make(SHAPES[shape], format=format, capacity=18, page_rows=4, direct="never")
    pool, rng = wrapper.pool, np.random.default_rng(0)
    ops = {}
    with recording(monkeypatch) as launches, forced(fused=FUSED[kernels]):
        listed = variants(SHAPES[shape], format, 18, 4, bucket)
        assert not launches, "listing them launched them"
        seqs = pool.alloc(bucket)
        for direct in (False, True):
            plan = wrapper.plan(seqs, bucket=bucket, direct=direct)
            wrapper.fold()
            ops["fold"] = list(launches)
            for z in (False, True):
                tokens, _ = draw(pool, plan, rng, z)
                launches.clear()
                op = "direct" if direct else "readout"
                getattr(wrapper.backend, op)(pool, plan, 1, tokens, torch.empty(
                    bucket, 1, pool.spec.heads, pool.spec.dim))  # fmt: skip
                ops[op] = ops.get(op, []) + launches
            launches.clear()
            wrapper.conv(2, torch.zeros(bucket, 1, pool.spec.conv_channels, dtype=pool.dtype))
            ops["conv"] = list(launches)
            launches.clear()
            wrapper.abort()
        wrapper.materialize(seqs[0])
        ops["materialize"] = list(launches)
    got = {(op, n.kernel, n.constants, n.options) for op, found in ops.items() for n in found}
    want = set()
    for variant in listed:
        launch = variant.launch
        constants = tuple(launch.constants.items())
        options = tuple(sorted(launch.options.items()))
        want.add((variant.op, launch.kernel, constants, options))
    assert {(o, k, frozenset(c), p) for o, k, c, p in got} == {
        (o, k, frozenset(c), p) for o, k, c, p in want
    }


@pytest.mark.parametrize("window", [2, 9])
def test_variants_of_windows(window):
    spec = SHAPES["odd"]
    listed = variants(spec, "fp32_split", 18, 4, 2, window=window)
    by_op = {}
    for variant in listed:
        by_op.setdefault(variant.op, []).append(variant.launch)
    assert set(by_op) == {"fold", "conv", "readout", "materialize", "compact"}
    assert {n.kernel for n in by_op["readout"]} == {"_verify_kernel", "_verify_prepass_kernel"}
    assert {n.constants["BLOCK_T"] for n in by_op["readout"]} == {8 if window <= 8 else 16}
    assert {n.constants["WINDOW"] for n in by_op["conv"]} == {window}
    assert len(by_op["compact"]) == 4  # a field each, and the rings


def test_listing_is_of_one_thread_and_ends_with_it(monkeypatch):
    from replayinfer.kernels.launch.dry import dry_launches

    wrapper = make(SHAPES["round"])
    plan = wrapper.planner.plan([], bucket=1, window=1)

    def fold():
        wrapper.backend.fold(wrapper.pool, plan)

    with recording(monkeypatch) as launches:
        with dry_launches() as seen:
            thread = threading.Thread(target=fold)
            thread.start()
            thread.join()
            assert (len(launches), len(seen)) == (1, 0)
            fold()
            assert (len(launches), len(seen)) == (1, 1)
        fold()
        with pytest.raises(ZeroDivisionError), dry_launches():
            raise ZeroDivisionError
        fold()
        assert (len(launches), len(seen)) == (3, 1)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("direct", [None, True])
def test_nothing_of_the_pool_changes(checks, direct, rng, monkeypatch):
    """In the middle of decoding, with every dead byte poisoned, kernels running, guards around."""
    monkeypatch.setenv("REPLAYINFER_CHECK", checks)
    rig = Rig(
        SPECS[0], rng, layers=[3], format="fp32_split", max_window=1, capacity=2,
        wrapper={"backend": "triton", "buckets": [4]},
    )  # fmt: skip
    for field in rig.pool.inputs.fields.values():
        poison_(field)
    for _ in range(3):
        rig.step()
    rig.pool.fork(rig.sequences[0])
    poison_(rig.pool.checkpoints.storage[:, rig.pool.checkpoint_ids.refs == 0])
    before = rig.everything()
    rig.wrapper.warmup(direct=direct)
    for name, tensor in rig.everything().items():
        assert_bitwise_equal(tensor, before[name], name)
    assert all(guarded.damaged() is None for guarded in rig.pool.guarded())
    rig.step()


def test_torch_compiles_nothing_and_calls_nothing(rng, monkeypatch):
    rig = Rig(SPECS[1], rng, wrapper={"backend": "torch", "buckets": [4]})
    with recording(monkeypatch) as launches:
        rig.wrapper.warmup()
    assert not launches


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_refused_between_plan_and_commit(backend, rng):
    rig = Rig(SPECS[0], rng, max_window=1, wrapper={"backend": backend, "buckets": [4]})
    rig.wrapper.plan(rig.sequences)
    for _ in range(2):
        before = rig.everything()
        with pytest.raises(PlanError, match="warmup: got a plan that is"):
            rig.wrapper.warmup()
        with pytest.raises(PlanError, match="bucket 4 before the first was committed"):
            ops.warmup(rig.wrapper.planner, 4, backend=backend)
        for name, tensor in rig.everything().items():
            assert_bitwise_equal(tensor, before[name], name)
        if rig.wrapper._plan.state == "planned":
            rig.wrapper.fold()
    rig.wrapper.abort()
    rig.wrapper.warmup()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "buckets: got none"),
        ({"buckets": []}, "buckets: got none"),
        ({"buckets": [0]}, "bucket"),
        ({"buckets": [1], "windows": [2]}, "window"),
        ({"buckets": [1], "inputs": [{"x": torch.zeros(1, 1, 4, 8)}]}, "dt: got NoneType"),
        ({"buckets": [1], "inputs": [{"y": torch.zeros(1, 1, 4, 8)}]}, "inputs: got y"),
        ({"buckets": [1], "conv": [{"x": torch.zeros(1, 1, 3)}]}, "x: got float32"),
        ({"buckets": [1], "conv": [{"y": torch.zeros(1, 1, 3)}]}, "conv: got y"),
    ],
)
def test_refusals(arguments, message, rng):
    rig = Rig(SPECS[0], rng, max_window=1)
    with pytest.raises(InputError, match=message):
        rig.wrapper.warmup(**arguments)


def test_refused_while_the_pool_sleeps(rng):
    rig = Rig(SPECS[0], rng, max_window=1)
    rig.pool.sleep()
    with pytest.raises(PlanError, match="sleeps"):
        rig.wrapper.warmup([1])


@pytest.mark.parametrize("value", [1, 2, 16, 17, 2**31, True, 1.0, None, "tensor", "odd tensor"])
@pytest.mark.parametrize("known", [(True, True), (True, False), (False, False)], ids=str)
def test_the_recorder_knows_what_triton_specializes_on(value, known):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    if isinstance(value, str):
        value = torch.zeros(8, dtype=torch.bfloat16)[0 if value == "tensor" else 1 :]
    want = native(compiler.CUDABackend(target), value, False, *known)
    assert specialization(value, *known) == tuple(want)
