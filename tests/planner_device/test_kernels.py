"""The kernels in Triton's interpreter: everything they write is what the torch operators write."""

import os

import numpy as np
import pytest
import torch

from replayinfer import GDNSpec, Mamba2Spec, ReplayDecodeWrapper
from replayinfer.backends.torch import TorchBackend
from replayinfer.planner.trees import parents_of
from replayinfer.testing import layer_inputs, layer_weights, relative_error

from ..trees.forest import path_to
from .kit import NAMES, check_books, small_pool

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)


SPECS = {
    "mamba2": Mamba2Spec(heads=2, dim=8, state=16, groups=1),
    "gdn": GDNSpec(heads=2, dim=8, state=16, key_heads=1),
}


def random_records(pool, generator):
    """Any cursors: live and free slots, histories up to the capacity, pages of their own or not."""
    records, slots = pool.on_device.records, pool.cursors.slots
    draw = lambda low, high, *shape: torch.from_numpy(  # noqa: E731
        generator.integers(low, high, size=shape or (slots,))
    )
    live = draw(0, 4) > 0
    prefix = (5 << 32) + 2 * draw(0, 1000) + 1
    records.handle.copy_(torch.where(live, (prefix << 20) | torch.arange(slots), -1))
    records.base.copy_(draw(0, 1 << 40))
    records.history.copy_(draw(0, pool.capacity + 1))
    records.undo.copy_(draw(0, 4))
    records.checkpoint.copy_(draw(0, 1000))
    records.own_checkpoint.copy_(draw(0, 1000))
    records.table.copy_(draw(0, 1000, *records.table.shape))
    records.own_table.copy_(draw(0, 1000, *records.table.shape))


def batch(pool, generator, entries, dtype):
    """Slots, handles and pads of every kind; each slot at most once."""
    slots = pool.cursors.slots
    order = torch.from_numpy(generator.permutation(max(slots, entries))[:entries])
    handle = pool.on_device.records.handle[order.clamp_max(slots - 1)]
    given = torch.where(order < slots, order, slots + 3 + order)  # beyond the slots
    if dtype == torch.int64:
        kind = torch.from_numpy(generator.integers(0, 4, size=entries))
        named = (kind > 0) & (order < slots) & (handle >= 0)
        given = torch.where(named, handle, given)
        given = torch.where(named & (kind == 3), handle ^ (1 << 24), given)  # stale
    pad = torch.from_numpy(generator.random(entries) < 0.2)
    return torch.where(pad, -torch.arange(1, entries + 1), given).to(dtype)


def same(step, other):
    for name in NAMES:
        a, b = getattr(step.arrays, name), getattr(other.arrays, name)
        assert torch.equal(a, b), name
    assert torch.equal(step.handle, other.handle)


CASES = [
    # capacity, max_window, page rows, slots, entries, bucket, policy (or direct steps), sequences,
    # windows, force; a policy with a budget is deadline's; "trees" is full
    (6, 3, 2, 12, 12, 15, "full", torch.int64, torch.int32, False),
    (6, 3, 2, 40, 33, 33, "spread", torch.int64, torch.int64, True),
    (16, 1, 8, 90, 90, 100, "spread", torch.int32, None, False),
    (5, 2, 8, 3, 3, 3, "spread", torch.int64, 2, True),
    (40, 4, 4, 20, 1, 1, "full", torch.int32, None, True),
    (33, 5, 4, 2300, 2200, 2290, "spread", torch.int64, torch.int32, True),  # three tiles
    (4, 1, 2, 4, 0, 2, "spread", torch.int64, None, False),
    (6, 1, 2, 60, 50, 55, "direct", torch.int64, torch.int32, True),
    (9, 1, 4, 1400, 1300, 1350, "direct", torch.int32, torch.int64, False),  # two tiles
    (5, 1, 8, 7, 7, 7, "direct", torch.int64, None, False),
    (16, 2, 8, 300, 290, 300, 170, torch.int64, torch.int32, False),
    (5, 2, 8, 9, 9, 9, 1, torch.int64, 2, False),
    (12, 9, 4, 70, 66, 70, "trees", torch.int64, torch.int32, True),
    (31, 31, 8, 40, 33, 40, "trees", torch.int32, 31, False),  # the widest
    (6, 1, 2, 40, 40, 40, "trees", torch.int64, torch.int64, False),  # no masks
]


def scribbled(generator, shape, share=0.1):
    """Which entries are replaced, by numbers that are no node, or any."""
    return torch.from_numpy(generator.random(shape) < share), torch.from_numpy(
        generator.choice([-(1 << 30), -2, -1, 0, 1, 2, 5, 40, 1 << 30], size=shape)
    )


def any_parents(generator, entries, width, dtype):
    """Mostly trees."""
    drawn = torch.from_numpy(generator.integers(-1, np.arange(width), size=(entries, width)))
    where, values = scribbled(generator, drawn.shape)
    return torch.where(where, values, drawn).to(dtype)


def any_paths(generator, step, entries, width, dtype):
    """Mostly paths of the planned trees."""
    masks = step.arrays.ancestors[:entries]
    paths = torch.full((entries, width), -1, dtype=torch.long)
    if masks.shape[1]:
        parents = parents_of(masks.numpy(), width)
        for i, window in enumerate(step.arrays.window[:entries].tolist()):
            path = path_to(parents[i].tolist(), int(generator.integers(-1, window)))
            paths[i, : len(path)] = torch.tensor(path)
    else:
        paths = torch.from_numpy(generator.integers(-1, 2, size=(entries, width)))
    where, values = scribbled(generator, paths.shape, 0.05)
    return torch.where(where, values, paths).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_fold_and_commit(case, seed):
    from replayinfer.backends.triton import TritonBackend
    from replayinfer.planner import DevicePlanner
    from replayinfer.planner.device import StepRequest

    capacity, most, rows, slots, entries, bucket, policy, dtype, kind, force = case
    generator = np.random.default_rng(seed)
    pool = small_pool(slots, capacity=capacity, max_window=most, page_rows=rows)
    kernels, reference = TritonBackend(), TorchBackend()
    steps = [DevicePlanner(pool, kernels)._step(bucket) for _ in range(2)]
    direct, trees, folds, accepted_nodes = policy == "direct", policy == "trees", 0, set()
    budget = policy if isinstance(policy, int) else 0
    for counts in (None, torch.int32, torch.int64):
        random_records(pool, generator)
        if counts == torch.int32:  # as if all had started together: one deadline, cut somewhere
            pool.on_device.records.history.fill_(capacity - 3)
        if direct:  # some without rows, on pages of their own or not
            records = pool.on_device.records
            keep = torch.from_numpy(generator.random(slots) < 0.5)
            records.history.copy_(torch.where(keep, records.history, 0))
            keep = torch.from_numpy(generator.random(slots) < 0.5)
            records.checkpoint.copy_(torch.where(keep, records.checkpoint, records.own_checkpoint))
        before = pool.on_device.records.words.clone()
        windows = None
        if isinstance(kind, torch.dtype):  # some beyond what is allowed, which are clamped
            windows = torch.from_numpy(generator.integers(-2, most + 3, size=entries)).to(kind)
            if counts == torch.int32:
                windows.fill_(1)
        forced = torch.from_numpy(generator.random(entries) < 0.3) if force else None
        uniform = kind if isinstance(kind, int) else 1
        wide = counts or torch.int32
        request = StepRequest(
            batch(pool, generator, entries, dtype), windows, forced, uniform, most,
            policy == "spread" or budget > 0, direct, budget,
            any_parents(generator, entries, most, wide) if trees else None,
        )  # fmt: skip
        for step, backend in zip(steps, (kernels, reference), strict=True):
            for array in (*vars(step.arrays).values(), step.handle, step.counts, step.nodes):
                array.fill_(987654)
            backend.plan_step(pool, step, request)
        same(*steps)
        assert torch.equal(pool.on_device.records.words, before), "a plan moved a cursor"
        folds += int(steps[0].arrays.fold_count)

        # One sequence is freed, one slot is another's, before the cursors move.
        planned = steps[0].arrays.slot[steps[0].arrays.slot >= 0]
        if planned.numel() > 2:
            pool.on_device.records.handle[planned[0]] = -1
            pool.on_device.records.handle[planned[1]] += 2 << 20
        before = pool.on_device.records.words.clone()
        accepted = None
        if counts is not None:
            accepted = torch.from_numpy(generator.integers(-2, most + 3, size=entries)).to(counts)
        if trees:
            paths = any_paths(generator, steps[1], entries, most, wide)
            for step, backend in zip(steps, (kernels, reference), strict=True):
                backend.accept_paths(pool, step, paths)
            assert torch.equal(pool.on_device.records.words, before), "a path moved a cursor"
            assert torch.equal(steps[0].nodes, steps[1].nodes)
            assert torch.equal(steps[0].counts, steps[1].counts)
            accepted_nodes |= set(steps[0].counts.tolist())
            live = pool.on_device.records.handle[steps[0].arrays.slot.long().clamp_min(0)]
            gone = (steps[0].arrays.slot < 0) | (live != steps[0].handle)
            assert (steps[0].nodes[gone] == -1).all()
            assert not steps[0].counts[gone].any()
        moves = [
            lambda b, s: b.fold_step(pool, s),
            lambda b, s, a=accepted: b.commit_step(pool, s, a, direct=direct),
            lambda b, s: b.abort_step(pool, s),
        ]
        for move in moves:
            after = []
            for step, backend in zip(steps, (kernels, reference), strict=True):
                pool.on_device.records.words.copy_(before)
                move(backend, step)
                after.append(pool.on_device.records.words.clone())
            assert torch.equal(*after)
            before = after[0]
        assert torch.equal(steps[0].counts, steps[1].counts)
    assert folds > 0 or entries <= 20
    if trees:
        assert len(accepted_nodes) > min(most, 3), "no longer paths"


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_whole_steps(family, rng):
    """The kernels of a layer read plans that the kernel made, with pads anywhere in the batch."""
    spec = SPECS[family]
    weights = layer_weights(spec, rng)
    tokens = [layer_inputs(spec, 1, 4, torch.float32, rng) for _ in range(4)]
    results = []
    for backend in ("torch", "triton"):
        pool = small_pool(5, spec=spec, capacity=3, max_window=1)
        pool.bind(0, **weights)
        wrapper = ReplayDecodeWrapper(pool, backend=backend)
        assert isinstance(wrapper.planner.kernels, type(wrapper.backend))
        a, b, c = pool.alloc(3)
        outputs = []
        for i, inputs in enumerate(tokens):
            named = [[a, -1, b, c], [-1, c, a, -1], [b, a, c, -1], [c, b, -1, a]][i]
            wrapper.plan(torch.tensor(named))
            wrapper.fold()
            outputs.append(wrapper.run(0, **inputs))
            assert not outputs[-1][named.index(-1)].any()
            wrapper.commit(torch.tensor([1, 1, 1, i % 2]))
            if i == 1:
                b, _ = pool.fork(a)[0], pool.free(b)
        states = [wrapper.materialize(s) for s in (a, b, c)]
        results.append(torch.cat([torch.stack(outputs).flatten(), torch.stack(states).flatten()]))
        check_books(pool)
    assert relative_error(results[1], results[0]) < 1e-5  # a few roundings of fp32


def test_records_have_one_layout():
    from replayinfer.kernels.planner import record
    from replayinfer.pools import device_cursors

    for name in ("BASE", "HISTORY", "UNDO", "CHECKPOINT", "OWN_CHECKPOINT", "TABLE"):
        assert getattr(record, name).value == getattr(device_cursors, f"_{name}")
