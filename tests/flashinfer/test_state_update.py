"""`selective_state_update` against the float64 recurrence: slots, pads, windows, every output."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError, UnsupportedError
from replayinfer.integrations.flashinfer import selective_state_update
from replayinfer.testing import mamba2_recurrence

from .dropin_kit import FP32, KERNELS, STORED, Draw, close, padded_pool

SLOTS, HEADS, DIM, STATE, GROUPS = 8, 4, 24, 16, 2


class World:
    """States in padded slots, and tokens as a caller passes them: one scalar a head, expanded."""

    def __init__(self, rng, lead, *, dim=DIM, size=STATE, dtype=torch.float32, softplus=True):
        draw = Draw(rng)
        self.lead, self.softplus = lead, softplus
        self.before = draw(SLOTS, HEADS, dim, size).to(dtype)
        self.state = padded_pool(self.before)
        self.x, self.z = (draw(*lead, HEADS, dim) for _ in range(2))
        self.B, self.C = (draw(*lead, GROUPS, size) for _ in range(2))
        self.dt, self.bias, self.D = draw(*lead, HEADS), draw(HEADS), draw(HEADS)
        if not softplus:
            self.dt, self.bias = self.dt.abs(), self.bias.abs()
        self.A = -draw.uniform(HEADS) - 0.1
        self.dim, self.size = dim, size

    def run(self, kernels, **options):
        options = {"dt_bias": self.bias[:, None].expand(HEADS, self.dim)} | options
        return selective_state_update(
            self.state, self.x, self.dt[..., None].expand(*self.lead, HEADS, self.dim),
            self.A[:, None, None].expand(HEADS, self.dim, self.size), self.B, self.C,
            self.D[:, None].expand(HEADS, self.dim), dt_softplus=self.softplus, kernels=kernels,
            **options,
        )  # fmt: skip

    def exact(self, start, tokens=slice(None), z=None):
        """Outputs and the state after each token, of tokens that begin at a state."""
        states = []
        y, _ = mamba2_recurrence(
            start, self.x[tokens], self.dt[tokens], self.A, self.B[tokens], self.C[tokens],
            self.D, None if z is None else z[tokens], self.bias, self.softplus, trace=states,
        )  # fmt: skip
        return y, states

    def assert_only(self, *slots):
        """Every other slot, and the gaps between slots, are as they were."""
        kept = [s for s in range(SLOTS) if s not in slots]
        assert torch.equal(self.state[kept], self.before[kept])
        row, step = self.before[0].numel(), self.state.stride(0)
        gaps = self.state.as_strided((SLOTS, step - row), (step, 1), row)
        assert gaps.isnan().all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", STORED)
def test_one_token(kernels, dtype, rng):
    w = World(rng, (3,), dtype=dtype)
    out = torch.empty_like(w.x)
    slots = torch.tensor([5, -1, 2])
    y = w.run(kernels, state_batch_indices=slots, z=w.z, out=out)
    assert y is out
    for i, slot in enumerate(slots.tolist()):
        start = w.before[slot] if slot >= 0 else torch.zeros_like(w.before[0])
        exact, (after,) = w.exact(start, slice(i, i + 1), w.z)
        close(y[i], exact[0])
        if slot >= 0:
            close(w.state[slot], after, STORED[dtype])
    w.assert_only(5, 2)


@pytest.mark.parametrize("kernels", KERNELS)
def test_slots_are_the_batch_without_indices(kernels, rng):
    w = World(rng, (3,), softplus=False)
    y = w.run(kernels)
    assert y.shape == (3, HEADS, DIM)
    for i in range(3):
        exact, (after,) = w.exact(w.before[i], slice(i, i + 1))
        close(y[i], exact[0])
        close(w.state[i], after)
    w.assert_only(0, 1, 2)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("dim", "size", "window"), [(80, 16, 3), (24, 16, 18), (8, 96, 2)], ids=str
)
def test_a_window(kernels, dim, size, window, rng):
    w = World(rng, (2, window), dim=dim, size=size)
    pad = 6
    y = w.run(kernels, state_batch_indices=torch.tensor([[3], [pad]]), pad_slot_id=pad)
    exact, states = w.exact(w.before[3], (0,))
    close(y[0], exact)
    close(w.state[3], states[-1])
    exact, _ = w.exact(torch.zeros_like(w.before[0]), (1,))  # a pad: outputs from nothing
    close(y[1], exact)
    w.assert_only(3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_states_of_every_token(kernels, update, named, rng):
    w = World(rng, (3, 3), dtype=torch.bfloat16)
    slots, entries = torch.tensor([4, -1, 1]), torch.tensor([2, 0, 1])
    buffer = torch.full((6, 4, HEADS, DIM, STATE), float("nan"), dtype=torch.bfloat16)
    y = w.run(
        kernels, state_batch_indices=slots, disable_state_update=not update, cache_steps=4,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=entries if named else None,
    )  # fmt: skip
    written = set()
    for i in (0, 2):
        exact, states = w.exact(w.before[slots[i]].float(), (i,))
        close(y[i], exact)
        entry = int((entries if named else slots)[i])
        written |= {entry}
        for t, state in enumerate(states):
            close(buffer[entry, t], state, STORED[torch.bfloat16])
        assert buffer[entry, 3].isnan().all()
        if update:
            close(w.state[slots[i]], states[-1], STORED[torch.bfloat16])
    assert buffer[[e for e in range(6) if e not in written]].isnan().all()
    w.assert_only(*(slots[[0, 2]].tolist() if update else ()))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("window", [1, 2])
def test_written_elsewhere(kernels, window, rng):
    """The last state of the window goes to another slot, or to none where that is a pad."""
    w = World(rng, (2, window) if window > 1 else (2,))
    source, target = torch.tensor([0, 7]).int(), torch.tensor([3, -1]).int()
    w.run(kernels, state_batch_indices=source, dst_state_batch_indices=target)
    tokens = (0,) if window > 1 else slice(0, 1)
    _, states = w.exact(w.before[0], tokens)
    close(w.state[3], states[-1])
    w.assert_only(3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_windows_that_begin_where_some_drafts_were_accepted(kernels, index, rng):
    starts = torch.tensor([0, 3, 3, 4, 6], dtype=index)
    w = World(rng, (6,))
    columns = 4
    source = torch.arange(16, dtype=index).view(4, columns) % 5
    target = torch.full((4, columns), -1, dtype=index)
    target[0, :3], target[3, 1] = torch.tensor([5, 6, 7]), 4
    source[2] = -1
    accepted = torch.tensor([2, 1, 3, 0], dtype=torch.int32)
    source[0, 1], source[3, 0] = 2, 1
    y = w.run(
        kernels, state_batch_indices=source, dst_state_batch_indices=target, cu_seqlens=starts,
        num_accepted_tokens=accepted, cache_steps=columns,
    )  # fmt: skip
    assert y.shape == (6, HEADS, DIM)
    exact, states = w.exact(w.before[2], slice(0, 3))
    close(y[:3], exact)
    for slot, state in zip((5, 6, 7), states, strict=True):
        close(w.state[slot], state)
    exact, _ = w.exact(torch.zeros_like(w.before[0]), slice(3, 4))
    close(y[3:4], exact)
    exact, states = w.exact(w.before[1], slice(4, 6))
    close(y[4:], exact)
    close(w.state[4], states[1])
    w.assert_only(4, 5, 6, 7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_integers_with_a_scale_for_each_row(kernels, rng):
    w = World(rng, (2, 2))
    scale = Draw(rng).uniform(SLOTS, HEADS, DIM) / 2**13 + 1e-5
    w.state = (w.before / scale[..., None]).round().clamp(-32767, 32767).short()
    starts = w.state * scale[..., None].double()
    before, entries = w.state.clone(), torch.zeros(2, 2, HEADS, DIM, STATE, dtype=torch.int16)
    entry_scales = torch.zeros(2, 2, HEADS, DIM)
    y = w.run(
        kernels, state_batch_indices=torch.tensor([6, 1]), state_scale=scale[..., None],
        intermediate_states_buffer=entries, intermediate_state_scales=entry_scales,
        intermediate_state_indices=torch.tensor([1, 0]), cache_steps=2,
    )  # fmt: skip
    for i, slot in enumerate((6, 1)):
        exact, states = w.exact(starts[slot], (i,))
        close(y[i], exact)
        for t, state in enumerate(states):
            largest = state.abs().amax(-1, keepdim=True)  # half a step of 32767 to the largest
            got = entries[1 - i, t] * entry_scales[1 - i, t][..., None].double()
            assert ((got - state).abs() <= largest / 65534 + FP32).all()
        got = w.state[slot] * scale[slot][..., None].double()
        assert ((got - states[-1]).abs() <= largest / 65534 + FP32).all()
    kept = [0, 2, 3, 4, 5, 7]
    assert torch.equal(w.state[kept], before[kept])


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_index_outside_the_states_is_a_pad(kernels, rng):
    w = World(rng, (3,))
    w.run(
        kernels, state_batch_indices=torch.tensor([SLOTS, -5, 2]),
        dst_state_batch_indices=torch.tensor([0, 1, SLOTS + 3]),
    )  # fmt: skip
    w.assert_only()


REFUSED = {
    "rand_seed": ({"rand_seed": torch.tensor(1)}, UnsupportedError, "rand_seed: got a seed"),
    "algorithm": ({"algorithm": "fast"}, UnsupportedError, "algorithm: got 'fast'"),
    "backend": ({"backend": "cake"}, UnsupportedError, "backend: got 'cake'"),
    "both": (
        {
            "intermediate_states_buffer": torch.zeros(3, 1, HEADS, DIM, STATE),
            "dst_state_batch_indices": torch.tensor([0, 1, 2]),
        },
        InputError,
        "one of the two",
    ),
    "untied": (
        {"dt_bias": torch.zeros(HEADS, DIM)},
        UnsupportedError,
        r"dt_bias: got strides \[24, 1\]; allowed one value a head",
    ),
    "types": (
        {"dt_bias": torch.zeros(HEADS, 1, dtype=torch.bfloat16).expand(HEADS, DIM)},
        InputError,
        "dt_bias: got torch.bfloat16; allowed that of dt",
    ),
    "indices": (
        {
            "state_batch_indices": torch.zeros(3, dtype=torch.int32),
            "dst_state_batch_indices": torch.zeros(3, dtype=torch.int64),
        },
        InputError,
        "allowed that of state_batch_indices",
    ),
    "short": (
        {"intermediate_states_buffer": torch.zeros(3, 0, HEADS, DIM, STATE)},
        UnsupportedError,
        "room for 0 tokens",
    ),
    "accepted": (
        {"num_accepted_tokens": torch.ones(3, dtype=torch.int64)},
        InputError,
        "accepted: got no source",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, rng):
    options, error, message = REFUSED[case]
    w = World(rng, (3,))
    with pytest.raises(error, match=message):
        w.run("torch", **options)
    w.assert_only()


def test_states_that_are_not_dense_are_refused(rng):
    w = World(rng, (3,))
    w.state = w.before.transpose(2, 3)
    with pytest.raises(InputError, match="innermost stride of 1"):
        w.run("torch")
