"""FlashInfer's Gated DeltaNet calls against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError, UnsupportedError
from replayinfer.integrations.flashinfer import (
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from replayinfer.testing import gdn_recurrence

from .dropin_kit import FP32, KERNELS, STORED, Draw, close, padded_pool

SLOTS, HEADS, KEY_HEADS, DIM, STATE = 7, 4, 2, 24, 16
NAN = float("nan")


class World:
    def __init__(self, rng, batch, window, *, dtype=torch.float32, dim=DIM, size=STATE):
        draw = Draw(rng)
        self.batch, self.window = batch, window
        self.before = draw(SLOTS, HEADS, dim, size).to(dtype)
        self.pool = padded_pool(self.before)
        self.q, self.k = (draw(batch, window, KEY_HEADS, size) for _ in range(2))
        self.v = draw(batch, window, HEADS, dim)
        self.a, self.b = (draw(batch, window, HEADS) for _ in range(2))
        self.A_log, self.bias = draw(HEADS), draw(HEADS)

    @property
    def gates(self):
        return {"A_log": self.A_log, "a": self.a, "dt_bias": self.bias, "b": self.b}

    def decode(self, kernels, indices=None, **options):
        where = {"state": self.pool[: self.batch]}
        if indices is not None:
            where = {"state": None, "initial_state": self.pool, "initial_state_indices": indices}
        return gated_delta_rule_decode_pretranspose(
            self.q, self.k, self.v, **where, **self.gates, kernels=kernels, **options
        )

    def mtp(self, kernels, indices, **options):
        return gated_delta_rule_mtp(
            self.q, self.k, self.v, initial_state=self.pool, initial_state_indices=indices,
            **self.gates, kernels=kernels, **options,
        )  # fmt: skip

    def exact(self, i, slot, **options):
        states = []
        y, _ = gdn_recurrence(
            self.before[slot], self.q[i], self.k[i], self.v[i], a=self.a[i], b=self.b[i],
            A_log=self.A_log, dt_bias=self.bias, trace=states, **options,
        )  # fmt: skip
        return y, states

    def assert_only(self, *slots):
        """Every other slot, and the gaps between slots, are as they were."""
        kept = [s for s in range(SLOTS) if s not in slots]
        assert torch.equal(self.pool[kept], self.before[kept])
        row, step = self.before[0].numel(), self.pool.stride(0)
        assert self.pool.as_strided((SLOTS, step - row), (step, 1), row).isnan().all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", STORED)
def test_one_token_in_a_pool(kernels, dtype, rng):
    w = World(rng, 3, 1, dtype=dtype)
    output = torch.full((3, 1, HEADS, DIM), NAN)
    y, pool = w.decode(kernels, torch.tensor([5, -1, 2]).int(), output=output)
    assert y is output
    assert pool is w.pool
    for i, slot in ((0, 5), (2, 2)):
        exact, (after,) = w.exact(i, slot)
        close(y[i], exact)
        close(w.pool[slot], after, STORED[dtype])
    assert (y[1] == 0).all()
    w.assert_only(5, 2)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("norm", [True, False])
def test_one_token_in_states_of_its_own(kernels, norm, rng):
    w = World(rng, 2, 1)
    w.k = torch.nn.functional.normalize(w.k, dim=-1)  # else the state would grow without bound
    y, state = w.decode(kernels, use_qk_l2norm=norm, scale=0.3)
    assert state.data_ptr() == w.pool.data_ptr()
    for i in range(2):
        exact, (after,) = w.exact(i, i, norm="l2" if norm else "none", scale=0.3)
        close(y[i], exact)
        close(w.pool[i], after)
    w.assert_only(0, 1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize(("dim", "size", "window"), [(24, 16, 3), (80, 24, 2), (8, 16, 17)])
def test_a_window_with_a_state_for_every_token(kernels, update, dim, size, window, rng):
    w = World(rng, 2, window, dim=dim, size=size)
    cache = torch.full((3, window + 2, HEADS, dim, size), NAN)
    kept = torch.full(w.v.shape, 42.0) if update else None  # outputs of pads
    y, _ = w.mtp(
        kernels, torch.tensor([6, -3]), disable_state_update=not update, output=kept,
        intermediate_states_buffer=cache[:, :window], output_state_indices=torch.tensor([1, 2]),
    )  # fmt: skip
    exact, states = w.exact(0, 6)
    close(y[0], exact)
    assert (y[1] == (42.0 if update else 0.0)).all()
    for t, state in enumerate(states):
        close(cache[0, t], state)
    assert cache[0, window:].isnan().all()
    assert cache[1:].isnan().all()
    if update:
        close(w.pool[1], states[-1])
    w.assert_only(*((1,) if update else ()))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("last", [None, (6, 1), (-1, 2)])
def test_a_slot_for_every_token(kernels, last, rng):
    w = World(rng, 2, 2)
    slots = torch.tensor([[3, 4], [5, -1]]).int()
    y, _ = w.mtp(
        kernels, torch.tensor([0, 2]), ssm_state_indices=slots, disable_state_update=False,
        output_state_indices=None if last is None else torch.tensor(last),
    )  # fmt: skip
    for i, source in enumerate((0, 2)):
        exact, states = w.exact(i, source)
        close(y[i], exact)
        for t, slot in enumerate(slots[i].tolist()):
            if slot >= 0:
                close(w.pool[slot], states[t])
        if last is not None and last[i] >= 0:
            close(w.pool[last[i]], states[-1])
    w.assert_only(3, 4, 5, *(s for s in last or () if s >= 0))


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_index_outside_the_pool_is_a_pad(kernels, rng):
    w = World(rng, 3, 1)
    y, _ = w.decode(
        kernels, torch.tensor([SLOTS, 1, 2]), output_state_indices=torch.tensor([0, SLOTS + 9, -2])
    )
    assert (y[0] == 0).all()
    close(y[1], w.exact(1, 1)[0])
    w.assert_only()


@pytest.mark.parametrize("kernels", KERNELS)
def test_sixteen_bits(kernels, rng):
    w = World(rng, 2, 3, dtype=torch.bfloat16)
    for name in ("q", "k", "v", "a", "b", "bias"):
        setattr(w, name, getattr(w, name).bfloat16())
    y, _ = w.decode(kernels, torch.tensor([4, 1]))
    assert y.dtype is torch.bfloat16
    for i, slot in enumerate((4, 1)):
        exact, states = w.exact(i, slot)
        close(y[i], exact, STORED[torch.bfloat16])
        close(w.pool[slot], states[-1], STORED[torch.bfloat16])


def test_the_default_of_updates_is_theirs_and_says_so(rng):
    w = World(rng, 2, 2)
    with pytest.warns(FutureWarning, match="disable_state_update is not given"):
        w.mtp("torch", torch.tensor([0, 1]))
    w.assert_only()


INDICES = torch.tensor([0, 1])
REFUSED = {
    "replay": ("mtp", {"cache_replayssm": True}, UnsupportedError, "cache_replayssm"),
    "window": ("mtp", {"replayssm_g": torch.ones(1)}, UnsupportedError, "cache_replayssm"),
    "scatter": (
        "mtp",
        {"ssm_state_indices": torch.zeros(2, 2).int(), "disable_state_update": True},
        InputError,
        "allowed with updates",
    ),
    "columns": (
        "mtp",
        {"ssm_state_indices": torch.zeros(2, 1).int(), "disable_state_update": False},
        InputError,
        r"ssm_state_indices: got \[2, 1\]; allowed \[2, 2\]",
    ),
    "backend": ("decode", {"backend": "rubin"}, UnsupportedError, "backend: got 'rubin'"),
    "buffer": (
        "decode",
        {"intermediate_states_buffer": torch.zeros(1, 2, HEADS, DIM, STATE)},
        InputError,
        "each: got 1 entries for a batch of 2",
    ),
    "type": (
        "decode",
        {"intermediate_states_buffer": torch.zeros(2, 2, HEADS, DIM, STATE).half()},
        InputError,
        "each: got float16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, rng):
    call, options, error, message = REFUSED[case]
    w = World(rng, 2, 2)
    if call == "mtp":
        options = {"disable_state_update": False} | options
    with pytest.raises(error, match=message):
        getattr(w, call)("torch", INDICES, **options)
    w.assert_only()


def test_one_token_has_no_states_between(rng):
    w = World(rng, 2, 1)
    for options in ({"disable_state_update": True}, {"intermediate_states_buffer": w.pool}):
        with pytest.raises(InputError, match="for one token; allowed for windows"):
            w.decode("torch", INDICES, **options)


def test_heads_that_do_not_divide_are_refused(rng):
    w = World(rng, 2, 1)
    w.q, w.k = (torch.cat([t, t[:, :, :1]], dim=2) for t in (w.q, w.k))
    with pytest.raises(InputError, match="k: got 3 key heads beside 3 query heads and 4 value"):
        w.decode("torch", INDICES)


def test_outputs_are_exact_in_float32(rng):
    """The reference itself, so that the bounds above are not loose."""
    w = World(rng, 2, 2)
    y, _ = w.decode("torch", INDICES)
    close(y[0], w.exact(0, 0)[0], FP32 / 3)
