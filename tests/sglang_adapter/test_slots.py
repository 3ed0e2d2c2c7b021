"""Whatever SGLang does to a slot, the next token comes from the right state."""

from __future__ import annotations

import random

import pytest
import torch

from replayinfer import InputError, PlanError, StatePool, UnsupportedError, ops
from replayinfer.integrations.sglang.options import Options
from replayinfer.integrations.sglang.slots import row_bytes_per_slot
from replayinfer.testing import peak_error

from .stand_ins import LAYERS, SLOTS, SPECS, Server

FORMATS = ("fp32", "fp32_split")
# A readout in fp32 differs from float64 by its sums; one that sees a state rounded to bf16 by
# 2^-9 of it. The states themselves are fp32 in both formats.
OUTPUT = {"fp32": 2e-5, "fp32_split": 2e-2}
STATE = 2e-5


def check(pairs, fmt: str) -> None:
    for got, want in pairs:
        assert peak_error(got, want) < OUTPUT[fmt]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SPECS)
def test_a_walk_through_all_that_happens_to_slots(name, fmt, seed, rng):
    choose = random.Random(seed)
    server = Server(name, rng, capacity=4, format=fmt)
    live, cached = [1, 2], []
    server.clear(*live)
    server.extend(live, 5)
    for _ in range(24):
        free = [slot for slot in range(1, SLOTS) if slot not in server.truth]
        action = choose.choice(["decode"] * 6 + ["extend", "copy", "move", "new", "end"])
        if action == "decode":
            track = {choose.choice(live): free[0]} if free and choose.random() < 0.3 else None
            check(server.decode([*live, 0], track), fmt)
            cached += list(track.values()) if track else []
        elif action == "extend":
            server.extend([*live, 0, 0], choose.randint(1, 3))
        elif action == "copy" and free and cached:  # a prefix hit: copied, then extended
            server.copy(choose.choice(cached), free[0])
            server.extend([free[0]], 2)
            live.append(free[0])
        elif action == "move" and free:
            slot = live.pop(choose.randrange(len(live)))
            server.move(slot, free[0])
            live.append(free[0])
        elif action == "new" and free:
            server.clear(free[0])
            server.extend([free[0]], 3)
            live.append(free[0])
        elif action == "end" and len(live) > 1:  # its slot goes to the tree, pending rows and all
            cached.append(live.pop())
    for slot in server.truth:
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_kernels_do_the_same(name, rng):
    pytest.importorskip("triton")
    server = Server(name, rng, capacity=4, format="fp32_split", backend="triton")
    server.clear(1, 3)
    server.extend([1, 3], 3)
    for step in range(6):
        check(server.decode([3, 0, 1, -1], {3: 5} if step == 4 else None), "fp32_split")
    server.copy(5, 6)
    server.extend([6, 1], 2)
    for slot in (1, 3, 5, 6):
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_slot_comes_back_clean(fmt, rng):
    server = Server("gdn", rng, capacity=8, format=fmt)
    server.clear(1)
    server.extend([1], 2)
    for _ in range(3):
        server.decode([1])
    server.clear(1)  # three rows were pending
    check(server.decode([1]), fmt)
    assert peak_error(server.state(1), server.truth[1]) < STATE


def test_what_a_prefill_writes_for_the_tree_has_no_rows(rng):
    server = Server("gdn", rng, capacity=8, format="fp32_split")
    server.clear(1, 2)
    server.extend([1, 2], 2)
    for _ in range(3):
        server.decode([1, 2])
    # Slot 2 ends, and is a target of the prefill of slot 1 with its rows still pending.
    targets, mask = torch.tensor([2]), torch.tensor([True])
    slots = torch.tensor([1], dtype=torch.int32)
    server.replay.before_extend(slots)
    server.replay.written(targets, mask, plain=True)
    server.states[:, 2] = server.states[:, 1]
    server.truth[2] = server.truth[1].clone()
    server.replay.after_extend(slots)
    server.copy(2, 3)
    server.extend([3], 1)
    check(server.decode([3, 1]), "fp32_split")
    for slot in (1, 3):
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


def test_a_step_that_broke_off_leaves_no_trace(rng):
    server = Server("mamba2", rng, capacity=4)
    server.clear(1)
    server.extend([1], 2)
    server.replay.begin(torch.tensor([1], dtype=torch.int32))
    server.replay.readout(LAYERS[0], **server.inputs(1))
    check(server.decode([1]), "fp32")  # a new one
    assert peak_error(server.state(1), server.truth[1]) < STATE
    with pytest.raises(PlanError, match=r"decode: got layer 1 in a step that was not planned"):
        server.replay.readout(LAYERS[0], **server.inputs(1))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("capacity", [1, 3, 16])
@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_what_is_charged_is_what_is_held(name, capacity, fmt, rng):
    replay = Server(name, rng, capacity=capacity, format=fmt).replay
    charged = row_bytes_per_slot(
        SPECS[name], len(LAYERS), torch.float32, torch.float32, replay.options
    )
    assert replay.nbytes == charged * SLOTS


def test_counters(rng):
    server = Server("gdn", rng, capacity=4, policy="full")
    server.clear(1, 2)
    server.extend([1, 2], 1)
    for _ in range(9):
        server.decode([1, 2, 0])
    server.decode([1, 2], {2: 4})
    server.extend([1], 1)
    counts = server.replay.counters()
    assert counts.pop("bytes saved") != 0
    assert counts == {
        "decode rows": 20,
        "folds": 4,
        "folds for extend": 1,
        "folds for tracking": 1,
    }


def test_weights_are_taken_again(rng):
    server = Server("gdn", rng, capacity=4)
    replay = server.replay
    before = replay.pool.weights["A_log"].clone()
    with torch.no_grad():
        for layer in LAYERS:
            server.whole.model["layers"][layer]["mixer"].A_log.add_(0.5)
    assert torch.equal(replay.pool.weights["A_log"], before)
    replay.bind()
    torch.testing.assert_close(replay.pool.weights["A_log"], before + 0.5)


def test_pending_rows_are_folded_with_the_weights_that_made_them(rng):
    server = Server("mamba2", rng, capacity=8)
    server.clear(1)
    server.extend([1], 3)
    server.decode([1])
    server.decode([1])
    with torch.no_grad():
        for layer in LAYERS:
            mixer = server.whole.model["layers"][layer]["mixer"]
            mixer.A.sub_(0.5)
            mixer.dt_bias.add_(0.7)
    assert server.replay._history[1] == 2
    server.replay.bind()
    assert server.replay._history[1] == 0
    torch.testing.assert_close(server.states[:, 1].double(), server.truth[1], rtol=1e-4, atol=1e-5)


def test_one_slot_without_an_axis_goes_to_the_host_and_back(rng):
    """As SGLang names the slot of a request."""
    server = Server("gdn", rng, capacity=8)
    server.clear(1, 2)
    server.extend([1], 2)
    server.decode([1])
    kept = server.replay.get_cpu_slots(torch.tensor(1))
    server.replay.load_cpu_slots(kept, torch.tensor(2))
    assert server.replay._history[2] == server.replay._history[1] == 1


# What the core lends itself for -----------------------------------------------------------------


def lent(fmt: str = "fp32", **options):
    spec = SPECS["gdn"]
    pages = options.pop("pages", torch.zeros(2, 5, *spec.state_shape))
    return StatePool(spec, [0, 1], 4, format=fmt, checkpoints=pages, **options), pages


@pytest.mark.parametrize("fmt", FORMATS)
def test_lent_pages_are_the_callers_memory(fmt, rng):
    pool, pages = lent(fmt)
    assert pool.sizes.checkpoint_pages == 5
    (seq,) = pool.alloc()
    state = torch.randn(SPECS["gdn"].state_shape, generator=rng)
    pool.seed(seq, {0: state, 1: 2 * state}, tokens=3)
    page = torch.tensor([int(pool.cursors.checkpoint[pool.slot(seq)])])
    if fmt == "fp32_split":
        ops.join_pages(pool, page, torch.tensor([True]))
    assert torch.equal(pages[0, page[0]], state)
    assert torch.equal(pages[1, page[0]], 2 * state)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (torch.zeros(2, 5, 4, 8, 15), "checkpoints: got float32"),
        (torch.zeros(1, 5, 4, 8, 16), "checkpoints: got float32"),
        (torch.zeros(2, 5, 4, 8, 16, dtype=torch.bfloat16), "checkpoints: got bfloat16"),
        (torch.zeros(2, 5, 8, 4, 16).transpose(2, 3), "contiguous in themselves"),
    ],
)
def test_memory_that_cannot_be_pages_is_refused(bad, what):
    with pytest.raises(InputError, match=what):
        lent(pages=bad)


def test_a_pool_on_lent_pages_stays_as_it_is():
    pool, _ = lent()
    for call in (pool.sleep, lambda: pool.resize(max_sequences=8)):
        with pytest.raises(UnsupportedError, match="lent by the caller"):
            call()
    with pytest.raises(InputError, match="checkpoint_pages: got 4; allowed 5"):
        lent(checkpoint_pages=4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_pages_are_split_and_joined_bit_for_bit(name, backend, rng):
    spec = SPECS[name]
    plain = torch.randn(2, 5, *spec.state_shape, generator=rng)
    plain.view(-1)[::7] = 0
    plain.view(torch.int32).view(-1)[3] = 0x7F7FFFFF  # FLT_MAX
    pool, pages = lent("fp32_split", pages=plain.clone()) if name == "gdn" else (None, None)
    if pool is None:
        pages = plain.clone()
        pool = StatePool(spec, [0, 1], 4, format="fp32_split", checkpoints=pages)
    which = torch.tensor([3, -1, 0, 1], dtype=torch.int32)
    chosen = torch.tensor([True, True, True, False])
    ops.split_pages(pool, which, chosen, backend=backend)
    for page in (1, 2, 4):
        assert torch.equal(pages[:, page], plain[:, page])
    for page in (3, 0):
        assert torch.equal(
            pool.checkpoints.load(slice(None), torch.tensor([page]))[:, 0], plain[:, page]
        )
        assert not torch.equal(pages[:, page], plain[:, page])
    ops.join_pages(pool, which, chosen, backend=backend)
    assert torch.equal(pages, plain)
    with pytest.raises(UnsupportedError, match="allowed fp32_split"):
        ops.split_pages(lent()[0], which, chosen)


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"REPLAYINFER_SGLANG_CAPACITY": "0"}, "CAPACITY: got 0; allowed 1 to 32, at least the"),
        ({"REPLAYINFER_SGLANG_CAPACITY": "many"}, "CAPACITY: got 'many'"),
        ({"REPLAYINFER_SGLANG_FORMAT": "fp8"}, "FORMAT: got 'fp8'"),
        ({"REPLAYINFER_SGLANG_POLICY": "never"}, "POLICY: got 'never'"),
    ],
)
def test_bad_options(environment, what):
    with pytest.raises((InputError, UnsupportedError), match=what):
        Options.read(environment)


def test_options():
    assert Options.read({}) == Options(16, "auto", "spread")
    read = Options.read(
        {
            "REPLAYINFER_SGLANG_CAPACITY": "8",
            "REPLAYINFER_SGLANG_FORMAT": "fp32",
            "REPLAYINFER_SGLANG_POLICY": "full",
        }
    )
    assert read == Options(8, "fp32", "full")
    assert Options().format_for(torch.float32, torch.bfloat16) == "fp32_split"
    assert Options().format_for(torch.float32, torch.float32) == "fp32"
    assert read.format_for(torch.float32, torch.bfloat16) == "fp32"
    assert Options().format_for(torch.bfloat16, torch.bfloat16) == "bf16"
    with pytest.raises(UnsupportedError, match="--mamba-ssm-dtype"):
        Options().format_for(torch.float64, torch.bfloat16)
