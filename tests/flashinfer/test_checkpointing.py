"""`checkpointing_ssu` against the float64 recurrence, as a host that owns the cursors calls it."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError, UnsupportedError
from replayinfer.integrations.flashinfer import checkpointing_ssu
from replayinfer.testing import mamba2_recurrence

from .dropin_kit import FP32, KERNELS, STORED, Draw, close, padded_pool

SLOTS, HEADS, GROUPS = 5, 4, 2
NAN = float("nan")


class Host:
    """Slots with rings of rows, and what their states are in float64.

    Rows outside the live ones are NaN before every call, as those that others left may be.
    """

    def __init__(
        self, rng, window, capacity, *, dim=16, size=16, dtype=torch.float32, row=torch.float32
    ):
        draw = self.draw = Draw(rng)
        self.window, self.capacity, self.length = window, capacity, capacity + window
        self.dim, self.size, self.row = dim, size, row
        self.state = padded_pool(draw(SLOTS, HEADS, dim, size).to(dtype))
        self.x = torch.full((SLOTS, HEADS, self.length, dim), NAN, dtype=row)
        self.B = torch.full((SLOTS, GROUPS, self.length, size), NAN, dtype=row)
        self.dt = torch.full((SLOTS, HEADS, self.length), NAN)
        fields = torch.zeros(SLOTS, 6, dtype=torch.int32)  # cursors inside a larger page
        self.start, self.history = fields[:, 1], fields[:, 4]
        self.start.copy_(torch.randint(self.length, (SLOTS,), generator=rng))
        self.A, self.D, self.bias = -draw.uniform(HEADS) - 0.1, draw(HEADS), draw(HEADS)
        self.checkpoint = self.state.double()  # exact from the last fold on
        self.rows = [[] for _ in range(SLOTS)]  # accepted (x, raw dt, B) after it

    def snapshot(self):
        return [t.clone() for t in (self.state, self.x, self.B, self.dt, self.start, self.history)]

    def tokens(self, count):
        x, z = (self.draw(count, HEADS, self.dim, dtype=self.row) for _ in range(2))
        B, C = (self.draw(count, GROUPS, self.size, dtype=self.row) for _ in range(2))
        return {"x": x, "dt": self.draw(count, HEADS), "B": B, "C": C, "z": z}

    def call(self, kernels, tokens, out, **options):
        tokens = dict(tokens)
        dt = tokens.pop("dt")
        return checkpointing_ssu(
            self.state, self.x, self.B, self.dt, self.start, self.history, out=out,
            dt=dt[..., None].expand(*dt.shape, self.dim),
            A=self.A[:, None, None].expand(HEADS, self.dim, self.size),
            D=self.D[:, None].expand(HEADS, self.dim),
            dt_bias=self.bias[:, None].expand(HEADS, self.dim), dt_softplus=True, kernels=kernels,
            **tokens, **options,
        )  # fmt: skip

    def exact(self, slot, tokens):
        """Outputs of tokens that follow the slot's accepted rows."""
        past = self.rows[slot]
        start = self.checkpoint[slot]
        if past:
            start = self.advance(start, past)
        y, _ = mamba2_recurrence(
            start, tokens["x"], tokens["dt"], self.A, tokens["B"], tokens["C"], self.D,
            tokens["z"], self.bias, True,
        )  # fmt: skip
        return y

    def advance(self, start, rows):
        x, dt, B = (torch.stack(field) for field in zip(*rows, strict=True))
        _, state = mamba2_recurrence(start, x, dt, self.A, B, B, dt_bias=self.bias)
        return state

    def accept(self, slot, tokens, count):
        """What the host does after a call: folds that the rule asked for, then the cursor."""
        taken = len(tokens["x"])
        if len(self.rows[slot]) + taken > self.capacity:
            if self.rows[slot]:
                self.checkpoint[slot] = self.advance(self.checkpoint[slot], self.rows[slot])
            self.start[slot] = (self.start[slot] + self.history[slot]) % self.length
            self.history[slot] = 0
            self.rows[slot] = []
            folded = True
        else:
            folded = False
        self.rows[slot] += [(tokens["x"][t], tokens["dt"][t], tokens["B"][t]) for t in range(count)]
        self.history[slot] += count
        live = (self.start[slot] + torch.arange(int(self.history[slot]))) % self.length
        dead = torch.ones(self.length, dtype=torch.bool)
        dead[live.long()] = False
        for rows in (self.x, self.B, self.dt):
            rows[slot][:, dead] = NAN
        return folded


SHAPES = [
    {"window": 3, "capacity": 5},
    {"window": 1, "capacity": 2, "dim": 80},
    {"window": 2, "capacity": 4, "size": 96, "row": torch.bfloat16},
    {"window": 2, "capacity": 3, "row": torch.float16},
    {"window": 18, "capacity": 20, "dim": 8},
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_run_of_windows(kernels, shape, rng):
    host = Host(rng, **shape)
    slots = torch.tensor([3, -1, 0])
    folds = 0
    for call in range(3 if shape["window"] > 16 or "dim" in shape else 4):
        before = host.snapshot()
        tokens = [host.tokens(host.window) for _ in slots]
        batch = {name: torch.stack([t[name] for t in tokens]) for name in tokens[0]}
        out = torch.full(batch["x"].shape, NAN, dtype=host.row)
        assert host.call(kernels, batch, out, state_batch_indices=slots) is out
        bound = FP32 if host.row is torch.float32 else STORED[host.row]
        for i, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert (out[i] == 0).all()
                continue
            close(out[i], host.exact(slot, tokens[i]), bound)
            appended = (host.start[slot] + host.history[slot] + torch.arange(host.window)).long()
            appended %= host.length
            assert torch.equal(host.x[slot][:, appended].transpose(0, 1), tokens[i]["x"])
            assert torch.equal(host.B[slot][:, appended].transpose(0, 1), tokens[i]["B"])
            kept = [r for r in range(host.length) if r not in appended]
            for rows, old in zip((host.x, host.B, host.dt), before[1:4], strict=True):
                assert_same(rows[slot][:, kept], old[slot][:, kept])
            count = int(torch.randint(host.window + 1, (), generator=rng))
            count = host.window if call < 2 else count  # so that the third call folds, at latest
            if host.accept(slot, tokens[i], count):
                folds += 1
                close(host.state[slot], host.checkpoint[slot])
            else:
                assert torch.equal(host.state[slot], before[0][slot])
        others = [1, 2, 4]
        for now, old in zip((host.state, host.x, host.B, host.dt), before, strict=False):
            assert_same(now[others], old[others])
    assert folds >= 2


def assert_same(got, expected):
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("history", [5, 3, 0])
def test_packed_windows_fold_by_their_own_length(kernels, dtype, history, rng):
    host = Host(rng, window=3, capacity=5, dtype=dtype)
    lengths, slots = [3, 0, 1, 2], [2, 4, 1, -7]
    for slot in (1, 2, 4):
        tokens = host.tokens(history)
        for j in range(history):
            r = (int(host.start[slot]) + j) % host.length
            host.x[slot][:, r], host.B[slot][:, r] = tokens["x"][j], tokens["B"][j]
            step = torch.nn.functional.softplus(tokens["dt"][j] + host.bias)
            host.dt[slot][:, r] = step
            host.rows[slot].append((tokens["x"][j], tokens["dt"][j], tokens["B"][j]))
        host.history[slot] = history
    before = host.snapshot()
    tokens = host.tokens(sum(lengths))
    out = torch.full((1, sum(lengths), HEADS, host.dim), NAN)
    host.call(
        kernels, {name: t[None] for name, t in tokens.items()}, out,
        state_batch_indices=torch.tensor(slots).int(), pad_slot_id=-7, max_seqlen=3,
        cu_seqlens=torch.tensor([0, 3, 3, 4, 6]).int(),
    )  # fmt: skip
    for slot, part in ((2, slice(0, 3)), (1, slice(3, 4))):
        own = {name: t[part] for name, t in tokens.items()}
        close(out[0, part], host.exact(slot, own))
        if host.accept(slot, own, 0):
            assert history + len(own["x"]) > host.capacity
            close(host.state[slot], host.checkpoint[slot], STORED[dtype])
        else:
            assert torch.equal(host.state[slot], before[0][slot])
    assert (out[0, 4:] == 0).all()  # of the pad
    for now, old in zip((host.state, host.x, host.B, host.dt), before, strict=False):
        assert_same(now[[0, 3, 4]], old[[0, 3, 4]])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_integers_with_a_scale_for_each_row(kernels, dtype, rng):
    """A fold sets scales anew; a step that does not fold leaves integers and scales alone."""
    host = Host(rng, window=2, capacity=4)
    largest = torch.iinfo(dtype).max
    scale = host.state.abs().amax(-1) / largest
    host.state = (host.state / scale[..., None]).round().to(dtype)
    host.checkpoint = host.state * scale[..., None].double()
    slots = torch.tensor([1, 4])
    for step in range(3):
        tokens = [host.tokens(2) for _ in slots]
        batch = {name: torch.stack([t[name] for t in tokens]) for name in tokens[0]}
        out = torch.empty_like(batch["x"])
        before = [host.state.clone(), scale.clone()]
        host.call(kernels, batch, out, state_batch_indices=slots, state_scale=scale)
        for i, slot in enumerate(slots.tolist()):
            close(out[i], host.exact(slot, tokens[i]))
            if not host.accept(slot, tokens[i], 2):
                assert torch.equal(host.state[slot], before[0][slot])
                assert torch.equal(scale[slot], before[1][slot])
                continue
            got = host.state[slot] * scale[slot][..., None].double()
            exact = host.checkpoint[slot]
            half = exact.abs().amax(-1, keepdim=True) / (2 * largest)
            assert ((got - exact).abs() <= half + FP32).all()
            host.checkpoint[slot] = got
            assert step == 2
        assert torch.equal(host.state[[0, 2, 3]], before[0][[0, 2, 3]])
    assert not torch.equal(host.state[1], before[0][1])


def test_eight_bit_floats_are_refused(rng):
    host = Host(rng, window=2, capacity=4)
    host.state = host.state.to(torch.float8_e4m3fn)
    tokens = {name: t[None] for name, t in host.tokens(2).items()}
    with pytest.raises(UnsupportedError, match=r"state: got torch\.float8_e4m3fn"):
        host.call("torch", tokens, torch.empty_like(tokens["x"]))


def test_scratch_and_tuning_change_nothing(rng):
    host = Host(rng, window=2, capacity=4)
    tokens = {name: t[None] for name, t in host.tokens(2).items()}
    before, outs = host.snapshot(), []
    scratch = dict.fromkeys(("cb_scaled", "cumAdt_vec", "cb_old"), torch.empty(0))
    for options in ({}, scratch | {"algorithm": "two-kernel", "d_split": 2, "enable_pdl": True}):
        for now, old in zip((host.state, host.x, host.B, host.dt), before, strict=False):
            now.copy_(old)
        out = torch.empty_like(tokens["x"])
        outs.append(host.call("torch", tokens, out, **options))
    assert torch.equal(*outs)


REFUSED = {
    "scale": ({"state_scale": torch.ones(SLOTS, HEADS, 16)}, InputError, "state: got float32"),
    "seed": ({"rand_seed": torch.tensor(1)}, UnsupportedError, "rand_seed: got a seed"),
    "scratch": ({"cb_old": torch.ones(1)}, InputError, "cb_scaled: got cb_old"),
    "two": ({"algorithm": "two-kernel"}, InputError, "cb_scaled: got no scratch"),
    "other": ({"algorithm": "three"}, UnsupportedError, "algorithm: got 'three'"),
    "lengths": ({"max_seqlen": 2}, InputError, "max_seqlen: got 2 without cu_seqlens"),
    "packed": (
        {"max_seqlen": 2, "cu_seqlens": torch.tensor([0, 2]).int()},
        InputError,
        r"\[1, tokens, \.\.\.\] with cu_seqlens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, rng):
    options, error, message = REFUSED[case]
    host = Host(rng, window=2, capacity=4)
    before = host.snapshot()
    tokens = {name: torch.stack([t, t]) for name, t in host.tokens(2).items()}
    with pytest.raises(error, match=message):
        host.call("torch", tokens, torch.empty_like(tokens["x"]), **options)
    for now, old in zip(host.snapshot(), before, strict=True):
        assert_same(now, old)


def test_a_ring_too_short_for_its_windows_is_refused(rng):
    host = Host(rng, window=3, capacity=2)
    tokens = {name: t[None] for name, t in host.tokens(3).items()}
    with pytest.raises(InputError, match="rings of 5 rows for windows of 3; allowed 6 or more"):
        host.call("torch", tokens, torch.empty_like(tokens["x"]))


def test_rows_of_another_type_are_refused(rng):
    host = Host(rng, window=2, capacity=4)
    host.B = host.B.bfloat16()
    tokens = {name: t[None] for name, t in host.tokens(2).items()}
    with pytest.raises(InputError, match=r"B_cache: got torch\.bfloat16; allowed that of x"):
        host.call("torch", tokens, torch.empty_like(tokens["x"]))
