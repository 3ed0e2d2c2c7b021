"""Mamba-2's kernels for windows of several tokens, in Triton's interpreter."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer import Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import (
    assert_bitwise_equal,
    initial_states,
    layer_inputs,
    layer_weights,
    relative_error,
)

from ..gpu.layouts import WideSlices
from ..trees.forest import leaves, path_to, random_tree
from .mamba2_windows import WindowPair, Windows
from .pair import EPSILON, READ_EPSILON
from .vary import vary

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
BASE = Windows()


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        *vary(
            [BASE],
            window=[2, 3, 5],
            format=["fp32", "bf16", "fp16"],
            dtype=[torch.float32, torch.float16],
            out=[torch.float32],
            z=[True],
            softplus=[False],
            dim=[20],
            state=[24],
            groups=[2],
            layers=[2],
            page_rows=[1, 16],
            conv_width=[0, 2, 3],
        ),
        BASE.but(window=8, capacity=17, page_rows=4, tree=True),
        BASE.but(window=16, capacity=33, page_rows=8),
        BASE.but(window=16, capacity=16, page_rows=8, steps=2, tree=True, heads=3, groups=3),
    ],
    ids=str,
)
def test_windows(case, rng):
    WindowPair(case, rng).decode().check()


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_trees(window, format, rng):
    case = BASE.but(window=window, format=format, tree=True, z=True, groups=2, steps=4)
    WindowPair(case, rng).decode().check()


def test_folds_between_windows(rng):
    pair = WindowPair(BASE.but(steps=9, batch=3, conv_width=0), rng).decode()
    pair.check()
    assert pair.worlds[1][2].counters.folds


@pytest.mark.parametrize("dim", [64, 80])
def test_real_head_sizes(dim, rng):
    case = BASE.but(dim=dim, state=128, heads=2, groups=2, batch=1, pads=0, steps=2)
    WindowPair(case, rng).decode().check()


def test_many_heads_of_a_group(rng):
    """More than the prepass has in one program, and no whole number of those."""
    WindowPair(BASE.but(heads=17, dim=4, batch=1, pads=0, steps=2), rng).decode().check()


@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
@pytest.mark.parametrize(
    ("warps", "rows", "part"), [(1, 16, 16), (1, 64, 32), (2, 64, 16), (2, 32, 16)]
)
def test_launch_choices(warps, rows, part, format, rng):
    """The order of places in a tile follows from them."""
    verify = LaunchConfig(num_warps=warps, rows=rows)
    with forced(verify=verify, verify_prepass=LaunchConfig(num_warps=1, rows=part)):
        case = BASE.but(dim=80, state=72, format=format, capacity=20, heads=1, batch=1, steps=2)
        WindowPair(case, rng).decode().check()


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_wide_ids_and_slices_of_a_projection(tree, rng):
    pair = WindowPair(BASE.but(z=True, tree=tree), rng)
    pair.worlds[1][2].backend = WideSlices()
    pair.decode().check()


def test_one_token_in_a_pool_of_windows(rng, monkeypatch):
    """It takes the kernels of one token, between steps that take those of several."""
    pair = WindowPair(BASE.but(conv_width=0), rng)
    pair.step()
    (_, _, reference), (_, _, wrapper) = pair.worlds
    monkeypatch.setattr(
        "replayinfer.backends.triton.mamba2.verify", lambda *_: pytest.fail("called")
    )
    inputs = layer_inputs(pair.spec, 1, pair.bucket, torch.bfloat16, rng)
    got = []
    for (_, sequences, _), w in zip(pair.worlds, (reference, wrapper), strict=True):
        w.plan(sequences, bucket=pair.bucket)
        w.fold()
        got.append(w.run(2, **inputs))
        w.commit()
    assert relative_error(got[1], got[0]) <= EPSILON[torch.bfloat16]
    monkeypatch.undo()
    pair.step()
    pair.check()


def test_every_node_is_the_end_of_its_chain(rng):
    """A tree's outputs beside those of its root-to-leaf chains, each decoded alone."""
    spec = Mamba2Spec(heads=2, dim=16, state=16, conv_width=0)
    pool = StatePool(
        spec, [0], 12, capacity=9, max_window=6, page_rows=2, input_pages=60,
        format="fp32_split", dtype=torch.bfloat16,
    )  # fmt: skip
    pool.bind(0, **layer_weights(spec, rng))
    wrapper = ReplayDecodeWrapper(pool, backend="triton")
    (root,) = pool.alloc()
    pool.seed(root, {0: initial_states(spec, 1, rng)[0]}, tokens=1)
    wrapper.plan([root], 3)
    wrapper.fold()
    wrapper.run(0, **layer_inputs(spec, 3, 1, torch.bfloat16, rng))
    wrapper.commit()
    parents = random_tree(6, rng)
    inputs = layer_inputs(spec, 6, 1, torch.bfloat16, rng)
    wrapper.plan([root], 6, parents=[parents])
    wrapper.fold()
    tree = wrapper.run(0, **inputs)[0]
    wrapper.abort()
    for leaf in leaves(parents):
        (child,) = pool.fork(root)
        path = path_to(parents, leaf)
        wrapper.plan([child], len(path), window=max(2, len(path)))
        wrapper.fold()
        part = {n: torch.zeros(1, max(2, len(path)), *v.shape[2:], dtype=v.dtype)
                for n, v in inputs.items()}  # fmt: skip
        for name, value in part.items():
            value[0, : len(path)] = inputs[name][0, path]
        chain = wrapper.run(0, **part)[0, : len(path)]
        assert relative_error(tree[path], chain) <= READ_EPSILON["fp32_split"]
        wrapper.abort()


CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 0, 2)  # node 1 is a dead end beside 2 and 3


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("field", "value"), [("x", math.nan), ("x", math.inf), ("B", math.nan), (None, math.nan)]
)
@pytest.mark.parametrize(
    ("parents", "bad", "good"), [(CHAIN, 2, (0, 1)), (TREE, 1, (0, 2, 3))], ids=["chain", "tree"]
)
def test_a_draft_that_is_not_finite_stays_by_itself(parents, bad, good, field, value, rng):
    """Though a matrix product would multiply it by the zeros of the tokens that do not read it."""
    spec = Mamba2Spec(heads=2, dim=20, state=16, groups=2, conv_width=0)
    pool = StatePool(spec, [0], 2, capacity=9, max_window=4, page_rows=2)
    pool.bind(0, **layer_weights(spec, rng))
    wrapper = ReplayDecodeWrapper(pool, backend="triton")
    inputs = layer_inputs(spec, 4, 1, torch.float32, rng)
    start = initial_states(spec, 1, rng)[0]
    poisoned = {name: v.clone() for name, v in inputs.items()}
    for name, v in poisoned.items():
        if field in (name, None):
            v[:, bad] = value
    outputs, states = [], []
    for given in (inputs, poisoned):
        (seq,) = pool.alloc()
        pool.seed(seq, {0: start}, tokens=1)
        wrapper.plan([seq], 4, parents=[parents])
        wrapper.fold()
        outputs.append(wrapper.run(0, **given)[0])
        wrapper.commit(paths=[list(good)])
        states.append(wrapper.materialize(seq))
    clean, dirty = outputs
    # In another order of additions.
    assert relative_error(dirty[list(good)], clean[list(good)]) <= 1e-6
    assert_bitwise_equal(states[1], states[0], "state")
    assert not dirty[bad].isfinite().all()


def test_strong_decays_inside_of_a_window(rng):
    """A gate of -1280 between two small ones: sums are of segments, never differences."""
    spec = Mamba2Spec(heads=1, dim=16, state=16, conv_width=0, dt_softplus=False)
    pool = StatePool(spec, [0], 1, capacity=8, max_window=4, page_rows=2)
    pool.bind(0, A=torch.tensor([-1.0]), D=torch.tensor([0.5]))
    twin = StatePool(spec, [0], 1, capacity=8, max_window=4, page_rows=2)
    twin.bind(0, A=torch.tensor([-1.0]), D=torch.tensor([0.5]))
    wrappers = [ReplayDecodeWrapper(p, backend=b) for p, b in ((twin, "torch"), (pool, "triton"))]
    seqs = [w.pool.alloc()[0] for w in wrappers]
    for dt in ([1e-3, 1280.0, 3e-4, 2e-4], [2e-3, 1e-4, 1280.0, 5e-4]):
        inputs = layer_inputs(spec, 4, 1, torch.float32, rng)
        inputs["dt"] = torch.tensor(dt).view(1, 4, 1)
        for name in ("B", "C"):  # a score near 0 would be its rounding
            inputs[name].abs_()
        got = []
        for wrapper, seq in zip(wrappers, seqs, strict=True):
            wrapper.plan([seq], 4)
            wrapper.fold()
            got.append(wrapper.run(0, **inputs))
            wrapper.commit()
        for t in range(4):
            assert relative_error(got[1][:, t], got[0][:, t]) <= 2e-6


def test_says_which_windows_it_serves():
    spec = Mamba2Spec(heads=2, dim=4, state=4)
    longest = StatePool(spec, [0], 1, capacity=32, max_window=16)
    assert TritonBackend().supports(longest) is None
    beyond = StatePool(spec, [0], 1, capacity=32, max_window=17)
    assert "max_window=17" in (TritonBackend().supports(beyond) or "")


def test_masks_of_ancestors():
    from replayinfer.planner.trees import ancestor_masks, ancestors, mask_columns

    numbers = np.random.default_rng()
    parents = np.array([[int(numbers.integers(-1, t)) if t else -1 for t in range(7)]] * 5)
    masks = ancestor_masks(parents.astype(np.int32), 9)
    bits = (masks[:, :, None] >> np.arange(9)) & 1
    assert np.array_equal(bits[:, :7, :7].astype(bool), ancestors(parents.astype(np.int32)))
    assert np.array_equal(masks[:, 7:], np.broadcast_to(1 << np.arange(7, 9), (5, 2)))
    assert ancestor_masks(None, 4).tolist() == [1, 3, 7, 15]
    assert [mask_columns(n) for n in (1, 2, 16, 31, 32)] == [0, 2, 16, 31, 0]
