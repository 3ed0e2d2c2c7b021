"""FlashInfer's calls with our kernels on a GPU, against torch on the same tensors."""

from __future__ import annotations

import pytest
import torch

from replayinfer import Mamba2Spec, UnsupportedError
from replayinfer.integrations.flashinfer import (
    RingPool,
    checkpointing_ssu,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
    selective_state_update,
)
from replayinfer.testing import relative_error

pytestmark = pytest.mark.gpu

SLOTS, HEADS, GROUPS = 9, 8, 2
# A 16-bit output or state is rounded once on either side.
STORED = {torch.float32: 5e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.int16: 2**-7}


@pytest.fixture
def draw(rng):
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=rng).to("cuda", dtype)


def both(call):
    """What a call writes, by our kernels and by torch: each gets its own copies."""
    return [call(kernels) for kernels in ("triton", "torch")]


def close(got, exact, dtype):
    error = (got.double() - exact.double()).abs() / exact.double().abs().clamp_min(1)
    assert got.isfinite().all()
    assert float(error.max()) <= STORED[dtype]


def per_head(values, *inner):
    return values[(..., *(None,) * len(inner))].expand(*values.shape, *inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
@pytest.mark.parametrize(("window", "dim", "size"), [(1, 64, 128), (5, 80, 96)])
def test_states_moved_token_by_token(dtype, window, dim, size, draw):
    lead = (3, window)
    states = draw(SLOTS, HEADS, dim, size)
    scale = states.abs().amax(-1) / 32767 if dtype is torch.int16 else None
    if scale is not None:
        states = (states / scale[..., None]).round()
    x, z = (draw(*lead, HEADS, dim, dtype=torch.bfloat16) for _ in range(2))
    B, C = (draw(*lead, GROUPS, size, dtype=torch.bfloat16) for _ in range(2))
    dt, D, bias, rate = draw(*lead, HEADS), draw(HEADS), draw(HEADS), -draw(HEADS).abs()
    slots = torch.tensor([4, -1, 7], device="cuda")

    def call(kernels):
        state = states.to(dtype, copy=True)
        scales = None if scale is None else scale.clone()
        each = torch.zeros(SLOTS, window, HEADS, dim, size, device="cuda").to(dtype)
        each_scales = None if scale is None else torch.zeros(each.shape[:-1], device="cuda")
        y = selective_state_update(
            state, x, per_head(dt, dim), per_head(rate, dim, size), B, C, per_head(D, dim), z=z,
            dt_bias=per_head(bias, dim), dt_softplus=True, state_batch_indices=slots,
            state_scale=scales, intermediate_states_buffer=each, cache_steps=window,
            intermediate_state_scales=each_scales, kernels=kernels,
        )  # fmt: skip
        if scale is None:
            return y, state, each
        return y, state * scales[..., None], each * each_scales[..., None]

    (y, state, each), (exact_y, exact_state, exact_each) = both(call)
    close(y, exact_y, torch.bfloat16)
    close(state, exact_state, dtype)
    close(each, exact_each, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "capacity", "dim", "row"),
    [
        (1, 16, 64, torch.bfloat16),
        (6, 16, 80, torch.bfloat16),
        (4, 9, 64, torch.float16),
        (20, 40, 64, torch.bfloat16),
    ],
)
def test_windows_by_replay(dtype, window, capacity, dim, row, draw, rng):
    size, length = 128, window + capacity
    states, rows_x = draw(SLOTS, HEADS, dim, size), draw(SLOTS, HEADS, length, dim, dtype=row)
    rows_b, rows_dt = draw(SLOTS, GROUPS, length, size, dtype=row), draw(SLOTS, HEADS, length).abs()
    start = torch.randint(length, (SLOTS,), generator=rng).int().cuda()
    history = torch.arange(SLOTS).mul(5).remainder(capacity + 1).int().cuda()
    history[[1, 2]] = torch.tensor([capacity, 0]).int().cuda()  # one that folds, one that does not
    slots = torch.tensor([1, -1, 2, 8, 5], device="cuda")
    lead = (len(slots), window)
    x, z = (draw(*lead, HEADS, dim, dtype=row) for _ in range(2))
    B, C = (draw(*lead, GROUPS, size, dtype=row) for _ in range(2))
    dt, D, bias, rate = draw(*lead, HEADS), draw(HEADS), draw(HEADS), -draw(HEADS).abs()

    def call(kernels):
        written = [t.clone() for t in (states.to(dtype), rows_x, rows_b, rows_dt)]
        out = torch.full_like(x, float("nan"))
        checkpointing_ssu(
            *written, start, history, x, per_head(dt, dim), per_head(rate, dim, size), B, C, out,
            D=per_head(D, dim), z=z, dt_bias=per_head(bias, dim), dt_softplus=True,
            state_batch_indices=slots, kernels=kernels,
        )  # fmt: skip
        return out, *written

    (y, *got), (exact_y, *exact) = both(call)
    close(y, exact_y, row)
    close(got[0], exact[0], dtype)
    assert torch.equal(got[1], exact[1])
    assert torch.equal(got[2], exact[2])
    close(got[3], exact[3], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "dim", "size"), [(1, 128, 128), (4, 80, 96)])
def test_delta_rule(dtype, window, dim, size, draw):
    lead = (3, window)
    states = draw(SLOTS, HEADS, dim, size)
    q, k = (draw(*lead, GROUPS, size, dtype=torch.bfloat16) for _ in range(2))
    v = draw(*lead, HEADS, dim, dtype=torch.bfloat16)
    a, b = (draw(*lead, HEADS, dtype=torch.bfloat16) for _ in range(2))
    gates = {"A_log": draw(HEADS), "a": a, "dt_bias": draw(HEADS), "b": b}
    slots = torch.tensor([4, -1, 7], device="cuda").int()

    def call(kernels):
        pool = states.to(dtype, copy=True)
        if window == 1:
            y, _ = gated_delta_rule_decode_pretranspose(
                q, k, v, None, **gates, initial_state=pool, initial_state_indices=slots,
                output_state_indices=slots - 1, kernels=kernels,
            )  # fmt: skip
            return y, pool
        each = torch.zeros(3, window, HEADS, dim, size, device="cuda", dtype=dtype)
        y, _ = gated_delta_rule_mtp(
            q, k, v, pool, slots, **gates, disable_state_update=False,
            intermediate_states_buffer=each, kernels=kernels,
        )  # fmt: skip
        return y, pool, each

    got, exact = both(call)
    close(got[0], exact[0], torch.bfloat16)
    for written, expected in zip(got[1:], exact[1:], strict=True):
        close(written, expected, dtype)


def test_a_step_in_a_graph(draw):
    """Replayed with other indices and values at the same addresses."""
    states = draw(SLOTS, HEADS, 64, 128)
    x = draw(4, HEADS, 64, dtype=torch.bfloat16)
    B, C = (draw(4, GROUPS, 128, dtype=torch.bfloat16) for _ in range(2))
    dt, D, rate = draw(4, HEADS), draw(HEADS), -draw(HEADS).abs()
    slots = torch.tensor([-1, -1, -1, -1], device="cuda")
    out = torch.empty_like(x)

    def step(state, kernels):
        selective_state_update(
            state, x, per_head(dt, 64), per_head(rate, 64, 128), B, C, per_head(D, 64),
            dt_softplus=True, state_batch_indices=slots, out=out, kernels=kernels,
        )  # fmt: skip

    moved = states.clone()
    step(moved, "triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(moved, "triton")
    assert torch.equal(moved, states)
    slots.copy_(torch.tensor([3, -1, 0, 5], device="cuda"))
    x.copy_(draw(4, HEADS, 64, dtype=torch.bfloat16))
    graph.replay()
    got = out.clone()
    exact = states.clone()
    step(exact, "torch")
    close(got, out, torch.bfloat16)
    close(moved, exact, torch.float32)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_a_ring_pool(backend, draw):
    """The sizes of Nemotron's layers; FlashInfer's kernels and ours step the same memory."""
    spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8, conv_width=0)
    weights = {"A": -draw(128).abs(), "D": draw(128), "dt_bias": draw(128)}
    pools = []
    for name in (backend, "torch"):
        try:
            pools.append(RingPool(spec, [0], slots=6, window=4, capacity=12, backend=name))
        except UnsupportedError as error:
            pytest.skip(str(error))
        pools[-1].bind(0, **weights)
        pools[-1].slots = pools[-1].alloc(3)
    assert pools[0].backend == backend
    for accepted in ([4, 2, 0], [1, 4, 3], [4, 4, 4], [4, 3, 4], [0, 4, 1]):
        tokens = {
            "x": draw(4, 4, 128, 64, dtype=torch.bfloat16), "dt": draw(4, 4, 128),
            "B": draw(4, 4, 8, 128, dtype=torch.bfloat16),
            "C": draw(4, 4, 8, 128, dtype=torch.bfloat16),
        }  # fmt: skip
        ys = []
        for pool in pools:
            pool.plan(pool.slots, bucket=4)
            ys.append(pool.run(0, **tokens)[:3])
            pool.commit(accepted)
        # FlashInfer multiplies weights and states in 16 bits; ours keep float32.
        loose = 2**-6 if backend == "flashinfer" else 2**-8
        assert relative_error(*ys) <= loose
        assert relative_error(pools[0].memory.state, pools[1].memory.state) <= loose or not (
            pools[1].memory.state.any()
        )
    children = [pool.fork(pool.slots[1], 2) for pool in pools]
    got, exact = (p.memory.state[:, c] for p, c in zip(pools, children, strict=True))
    assert relative_error(got, exact) <= loose


def test_auto_measures_and_says_what_it_took():
    spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8, conv_width=0)
    pool = RingPool(spec, [0], slots=64, window=4, capacity=12)
    print(pool.backend, pool.timings, pool.skipped)
    assert pool.backend == min(pool.timings, key=pool.timings.get)
    assert set(pool.timings) | set(pool.skipped) == {"flashinfer", "triton"}
    assert not pool.memory.state.any()
    assert not pool.memory.history.any()
