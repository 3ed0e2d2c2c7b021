"""`RingPool` against the float64 recurrence, with our kernels and with stand-ins for theirs."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, InputError, Mamba2Spec, PlanError, UnsupportedError
from replayinfer.integrations.flashinfer import RingPool, checkpointing_ssu, ring_kernels
from replayinfer.testing import mamba2_recurrence, mamba2_weights

from .dropin_kit import FP32, KERNELS, Draw, close

SPEC = Mamba2Spec(heads=4, dim=8, state=16, groups=2, conv_width=0)
LAYERS = [3, 5]


class TheirModule(types.ModuleType):
    """``flashinfer.mamba``: what its calls take, and what its kernels make of the addresses."""

    def __init__(self):
        super().__init__("flashinfer.mamba")
        self.calls, self.pool = [], None

    def allocate_checkpointing_ssu_scratch(
        self, batch_size, num_heads, num_predicted_tokens, max_window, dtype, device
    ):
        assert 0 < num_predicted_tokens <= max_window <= 16
        return tuple(torch.empty(batch_size, num_heads, dtype=dtype, device=device) for _ in "123")

    def checkpointing_ssu(self, state, x_cache, B_cache, dt_cache, ring_start,
                          prev_num_accepted_tokens, x, dt, A, B, C, out, D=None, z=None,
                          dt_bias=None, dt_softplus=False, state_batch_indices=None,
                          pad_slot_id=-1, cb_scaled=None, cumAdt_vec=None,
                          cb_old=None):  # fmt: skip
        self.calls.append("step")
        assert cb_scaled.shape[0] == x.shape[0]
        assert x_cache.stride()[2:] == (x_cache.shape[3], 1)
        assert A.stride() == (1, 0, 0)
        assert dt.stride()[2:] == (1, 0)
        assert D.dtype == dt_bias.dtype
        return checkpointing_ssu(
            state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B,
            C, out, D, z, dt_bias, dt_softplus, state_batch_indices, pad_slot_id, kernels="torch",
        )  # fmt: skip

    def replayssm_materialize(
        self, state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs,
        B_cache_slot_strides, dt_cache_ptrs, dt_cache_slot_strides, A_ptrs, state_scale_ptrs,
        state_scale_slot_strides, src_slots, dst_slots, ring_start, replay_prefix_len,
        active_request_indices, *, state_dtype, input_dtype, matrixA_dtype, dim, dstate, num_heads,
        heads_per_group, max_window, ring_buffer_len, pad_slot_id=-1,
    ):  # fmt: skip
        self.calls.append("materialize")
        memory = self.pool.memory
        for name, pointers, strides in (
            ("state", state_ptrs, state_slot_strides), ("x", x_cache_ptrs, x_cache_slot_strides),
            ("B", B_cache_ptrs, B_cache_slot_strides), ("dt", dt_cache_ptrs, dt_cache_slot_strides),
        ):  # fmt: skip
            tensor = getattr(memory, name)
            assert pointers.tolist() == [layer.data_ptr() for layer in tensor]
            assert strides.tolist() == [tensor.stride(1)] * len(LAYERS)
            assert pointers.dtype is strides.dtype is torch.int64
        assert A_ptrs.tolist() == [layer.data_ptr() for layer in memory.A]
        assert not state_scale_ptrs.any()
        assert not state_scale_slot_strides.any()
        assert src_slots.shape == dst_slots.shape == (len(LAYERS), 1)
        assert src_slots.dtype is dst_slots.dtype is ring_start.dtype is torch.int32
        assert active_request_indices.tolist() == [0]
        assert (dim, dstate, num_heads) == (SPEC.dim, SPEC.state, SPEC.heads)
        assert heads_per_group == SPEC.heads // SPEC.groups
        assert (max_window, ring_buffer_len) == (memory.capacity, memory.x.shape[3])
        assert (state_dtype, input_dtype) == (memory.state.dtype, memory.x.dtype)
        assert matrixA_dtype is torch.float32
        ring_kernels.Ours("torch").materialize(
            memory, int(src_slots[0]), int(dst_slots[0]), int(ring_start), int(replay_prefix_len)
        )


@pytest.fixture
def theirs(monkeypatch):
    module = TheirModule()
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", module)
    monkeypatch.setattr(ring_kernels, "refuses", lambda memory: None)
    return module


class Run:
    """A pool, and every live slot's accepted tokens."""

    def __init__(self, rng, backend, *, window=3, capacity=5, dtype=torch.float32):
        self.draw, self.rng, self.window = Draw(rng), rng, window
        self.pool = RingPool(
            SPEC, LAYERS, slots=5, window=window, capacity=capacity, dtype=dtype, device="cpu",
            backend=backend,
        )  # fmt: skip
        self.weights = [mamba2_weights(SPEC, rng) for _ in LAYERS]
        for layer, weights in zip(LAYERS, self.weights, strict=True):
            self.pool.bind(layer, **weights)
        self.past = {}

    def alloc(self, count):
        slots = self.pool.alloc(count)
        self.past |= {slot: [] for slot in slots}
        return slots

    def step(self, slots, accepted, bucket=None):
        size = len(slots) if bucket is None else bucket
        self.pool.plan(slots, bucket=bucket)
        steps = []
        for layer in LAYERS:
            lead = (size, self.window)
            tokens = {
                "x": self.draw(*lead, SPEC.heads, SPEC.dim), "dt": self.draw(*lead, SPEC.heads),
                "B": self.draw(*lead, SPEC.groups, SPEC.state),
                "C": self.draw(*lead, SPEC.groups, SPEC.state),
                "z": self.draw(*lead, SPEC.heads, SPEC.dim),
            }  # fmt: skip
            steps.append(tokens)
            y = self.pool.run(layer, **tokens)
            for i, slot in enumerate(slots):
                own = {name: value[i] for name, value in tokens.items()}
                exact, _ = self.exact(LAYERS.index(layer), self.past[slot], own)
                close(y[i], exact[-self.window :], FP32)
        self.pool.commit(accepted)
        for i, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
            self.past[slot].append([{n: v[i, :count] for n, v in s.items()} for s in steps])
            assert self.pool.tokens(slot) == sum(len(s[0]["x"]) for s in self.past[slot])

    def exact(self, index, past, own=None):
        parts = [step[index] for step in past] + ([own] if own else [])
        start = torch.zeros(SPEC.state_shape)
        if not parts:
            return None, start
        tokens = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        weights = self.weights[index]
        return mamba2_recurrence(
            start, tokens["x"], tokens["dt"], weights["A"], tokens["B"], tokens["C"],
            weights["D"], tokens["z"], weights["dt_bias"], True,
        )  # fmt: skip

    def check_state(self, slot):
        """The full state, which a fork without rows of its own has in its memory."""
        child = self.pool.fork(slot)
        for index in range(len(LAYERS)):
            close(self.pool.memory.state[index, child], self.exact(index, self.past[slot])[1])
        assert self.pool.tokens(child) == self.pool.tokens(slot)
        self.pool.free([child])


@pytest.fixture(params=[*KERNELS, "flashinfer"])
def run(request, rng):
    if request.param == "flashinfer":
        module = request.getfixturevalue("theirs")
        run = Run(rng, "flashinfer")
        module.pool = run.pool
        assert run.pool.backend == "flashinfer"
        module.calls.clear()
        yield run
        assert set(module.calls) == {"step", "materialize"}
    else:
        yield Run(rng, request.param)


def test_steps_folds_rejected_drafts_and_forks(run):
    a, b, c = run.alloc(3)
    run.step([a, c], [3, 1])
    run.step([c, a, b], [2, 3, 0], bucket=4)
    run.step([a, b], [1, 2])
    for slot in (a, b, c):
        run.check_state(slot)
    run.pool.free([b])
    child = run.pool.fork(a)
    run.past[child] = list(run.past[a])
    run.step([child, a], [3, 2])
    run.step([a, child], [0, 1])
    run.check_state(child)
    run.check_state(a)


def test_a_freed_slot_comes_back_at_zero(run):
    (a,) = run.alloc(1)
    run.step([a], [3])
    run.step([a], [3])
    run.check_state(a)
    run.pool.free([a])
    (again,) = run.alloc(1)
    assert again == a
    run.step([again], [2])
    run.check_state(again)


def test_a_fork_of_some_rows(rng):
    run = Run(rng, "torch", window=2, capacity=6)
    (a,) = run.alloc(1)
    run.step([a], [2])
    run.step([a], [2])
    child = run.pool.fork(a, 3)
    assert run.pool.tokens(child) == 3
    first, second = run.past[a]
    kept = [first, [{n: v[:1] for n, v in step.items()} for step in second]]
    for index in range(len(LAYERS)):
        close(run.pool.memory.state[index, child], run.exact(index, kept)[1])


def test_an_abort_keeps_the_tokens_and_a_fold_that_ran(rng):
    run = Run(rng, "torch")
    (a,) = run.alloc(1)
    run.step([a], [3])
    pool, lead = run.pool, (1, run.window)
    tokens = {
        "x": run.draw(*lead, 4, 8), "dt": run.draw(*lead, 4), "B": run.draw(*lead, 2, 16),
        "C": run.draw(*lead, 2, 16),
    }  # fmt: skip
    pool.plan([a])
    pool.abort()
    pool.plan([a])
    pool.run(LAYERS[0], **tokens)
    with pytest.raises(PlanError, match=r"layers \[3\] ran; allowed before the first or after"):
        pool.abort()
    with pytest.raises(PlanError, match="run: got layer 3 a second time"):
        pool.run(LAYERS[0], **tokens)
    pool.run(LAYERS[1], **tokens)
    pool.abort()
    assert pool.tokens(a) == 3
    run.check_state(a)
    run.step([a], [2])
    run.check_state(a)


def test_auto_takes_the_faster_and_says_why(theirs, rng, monkeypatch):
    memory = Run(rng, "torch").pool.memory
    for times, expected in (({"flashinfer": 3.0, "triton": 2.0}, "triton"),
                            ({"flashinfer": 1.0, "triton": 2.0}, "flashinfer")):  # fmt: skip
        monkeypatch.setattr(ring_kernels, "_time", lambda k, m, s, t=times: t[k.name])
        fake = types.SimpleNamespace(**{**vars(memory), "capacity": memory.capacity})
        fake.x = types.SimpleNamespace(device=torch.device("cuda"), zero_=memory.x.zero_)
        kernels, timings, skipped = ring_kernels.choose("auto", fake, True)
        assert kernels.name == expected
        assert timings == times
        assert not skipped


def test_what_cannot_run_is_named(rng):
    with pytest.raises(UnsupportedError, match=r"refused: flashinfer \(device cpu; its kernels"):
        Run(rng, "flashinfer")
    with pytest.raises(UnsupportedError, match="backend: got 'cuda'"):
        Run(rng, "cuda")
    limited = Mamba2Spec(heads=4, dim=8, state=16, groups=2, dt_limit=(0.1, 1.0))
    with pytest.raises(UnsupportedError, match="without dt_limit"):
        RingPool(limited, [0], 1, device="cpu")
    with pytest.raises(InputError, match="capacity: got 2 for 1 layers, 1 slots, windows of 3"):
        RingPool(SPEC, [0], 1, window=3, capacity=2, device="cpu")


def test_order_and_arguments(rng):
    pool = Run(rng, "torch").pool
    slots = pool.alloc(3)
    with pytest.raises(CapacityError, match="slots: got a need of 3; allowed 2"):
        pool.alloc(3)
    for call in (pool.commit, pool.abort):
        with pytest.raises(PlanError, match="got no plan"):
            call()
    with pytest.raises(InputError, match="allowed live ones, each once"):
        pool.plan([slots[0], slots[0]])
    with pytest.raises(InputError, match="bucket: got 1 for 2 slots"):
        pool.plan(slots[:2], bucket=1)
    pool.plan(slots[:1])
    with pytest.raises(PlanError, match="got a second plan"):
        pool.plan(slots[:1])
    with pytest.raises(PlanError, match=r"commit: got no run of layers \[3, 5\]"):
        pool.commit()
    with pytest.raises(PlanError, match="fork: got slot"):
        pool.fork(slots[0])
    with pytest.raises(PlanError, match=r"free: got .* in a step"):
        pool.free(slots[:1])
    pool.replayed()  # as after a CUDA graph that has the runs of every layer
    pool.commit([0])
    pool.plan(slots[:1])
    pool.abort()
    pool.free(slots[:1])
    with pytest.raises(InputError, match="free: got slots"):
        pool.free(slots[:1])
    with pytest.raises(InputError, match="rows: got 1; allowed 0 to 0"):
        pool.fork(slots[1], 1)
    assert not np.any(pool.memory.history.numpy())
