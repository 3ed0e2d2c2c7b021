"""Plans on a GPU: the kernels, steps that nothing waits for, and a whole step in one CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer import Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.backends.torch import TorchBackend
from replayinfer.backends.triton import TritonBackend
from replayinfer.planner import DevicePlanner
from replayinfer.planner.device import StepRequest
from replayinfer.testing import conv_inputs, layer_weights, mamba2_inputs

from ..planner_device.kit import check_books, host_plan, read, small_pool
from ..trees.forest import matrix, path_to

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SPEC = Mamba2Spec(heads=4, dim=32, state=64, groups=2)
LAYERS = (1, 4)
BUCKET = 6


@pytest.mark.parametrize(
    ("sequences", "policy", "capacity", "most", "dtype"),
    [
        (40, "full", 6, 3, torch.int64),
        (1024, "spread", 16, 1, torch.int32),
        (1500, "deadline:250", 33, 4, torch.int64),  # two tiles; the fair share is 188
    ],
)
def test_the_plan_is_the_hosts(sequences, policy, capacity, most, dtype, seed):
    generator = np.random.default_rng(seed)
    pool = small_pool(sequences, capacity=capacity, max_window=most, page_rows=4, device=DEVICE)
    seqs = np.array(pool.alloc(sequences))
    planner = DevicePlanner(pool, TritonBackend(), policy=policy)
    folds = 0
    for step in range(6):
        order = generator.permutation(seqs)
        windows = generator.integers(0, most + 1, size=sequences)
        force = generator.random(sequences) < 0.1 if step == 3 else None
        pool.refresh()
        want = host_plan(pool, order, windows, policy=policy, force=force, bucket=sequences + 5)
        named = order if dtype == torch.int64 else order & 0xFFFFF
        plan = planner.plan(
            torch.tensor(named, device=DEVICE, dtype=dtype),
            torch.tensor(windows, device=DEVICE),
            bucket=sequences + 5,
            force_fold=None if force is None else torch.tensor(force, device=DEVICE),
        )
        for name, array in read(plan).items():
            assert torch.equal(array, want[name]), name
        folds += int(want["fold_count"])
        planner.folded(plan)
        accepted = torch.tensor(generator.integers(-1, most + 2, size=sequences), device=DEVICE)
        counts = planner.commit(plan, accepted)
        clamped = accepted.cpu().numpy().clip(0, windows)
        assert np.array_equal(counts[:sequences].cpu(), clamped)
    assert folds > 0
    total = sum(pool.tokens(int(s)) for s in seqs[:50])
    assert total > 0


def test_moves_are_those_of_the_torch_operators(seed):
    """Cursors after fold, commit and abort, where some sequences are gone since the plan."""
    generator = np.random.default_rng(seed)
    pool = small_pool(300, capacity=6, max_window=3, page_rows=2, device=DEVICE)
    seqs = torch.tensor(pool.alloc(300), device=DEVICE)
    records = pool.on_device.records
    records.history.copy_(torch.tensor(generator.integers(0, 7, size=300)))
    records.own_checkpoint.copy_(torch.tensor(generator.integers(0, 300, size=300)))
    kernels, reference = TritonBackend(), TorchBackend()
    step = DevicePlanner(pool, kernels)._step(310)
    windows = torch.tensor(generator.integers(0, 4, size=300), device=DEVICE)
    kernels.plan_step(pool, step, StepRequest(seqs, windows, None, 1, 3, False))
    records.handle[7] = -1
    before = records.words.clone()
    moves = [
        lambda b: b.fold_step(pool, step),
        lambda b: b.commit_step(pool, step, windows - 1),
        lambda b: b.abort_step(pool, step),
    ]
    for move in moves:
        after = []
        for backend in (reference, kernels):
            records.words.copy_(before)
            move(backend)
            after.append(records.words.clone())
        assert torch.equal(*after)
        assert not torch.equal(after[0], before)
        before = after[0]


class Twin:
    """A device-planned pool and a host-planned one, with the same weights and tokens."""

    def __init__(self, rng, *, window=1, conv=False, policy="full", **options):
        self.rng, self.conv = rng, conv
        options = {"capacity": 4, "page_rows": 2, "max_window": window} | options
        weights = [layer_weights(SPEC, rng) for _ in LAYERS]
        self.pools = []
        for planner in ("device", "host"):
            pool = StatePool(
                SPEC, LAYERS, BUCKET + 3, format="fp32_split", dtype=torch.bfloat16,
                checkpoint_pages=40, input_pages=80, planner=planner, device=DEVICE, **options,
            )  # fmt: skip
            for layer, values in zip(LAYERS, weights, strict=True):
                pool.bind(layer, **{name: v.to(DEVICE) for name, v in values.items()})
            self.pools.append(pool)
        self.wrappers = [
            ReplayDecodeWrapper(p, backend="triton", policy=policy, direct="never")
            for p in self.pools
        ]
        shape = (window, BUCKET, torch.bfloat16, rng)
        tokens = [mamba2_inputs(SPEC, *shape) for _ in LAYERS]
        if conv:
            for named in tokens:
                named["rows"] = conv_inputs(SPEC, *shape)
        self.inputs = [{n: v.to(DEVICE) for n, v in t.items()} for t in tokens]

    def draw(self):
        for layer in self.inputs:
            for value in layer.values():
                value.copy_(torch.randn(value.shape, generator=self.rng))

    def run(self, wrapper, bucket=BUCKET):
        outputs = []
        for layer, inputs in zip(LAYERS, self.inputs, strict=True):
            tokens = {n: v[:bucket] for n, v in inputs.items() if n != "rows"}
            if self.conv:
                outputs.append(wrapper.conv(layer, inputs["rows"][:bucket]))
            outputs.append(wrapper.run(layer, **tokens))
        return outputs

    def host_step(self, seqs, accepted, bucket=BUCKET, trees=None):
        """`seqs` by row of the bucket, None for pads; outputs by row.

        With `trees` by row, `accepted` are paths.
        """
        rows = [i for i, s in enumerate(seqs) if s is not None]
        wrapper = self.wrappers[1]
        windows, options = None, {}
        if trees is not None:
            windows = [len(trees[i]) for i in rows]
            width = self.pools[1].max_window
            options = {"parents": matrix([trees[i] for i in rows], width), "window": width}
        wrapper.plan([seqs[i] for i in rows], windows, bucket=bucket, **options)
        wrapper.fold()
        whole = self.inputs
        order = torch.tensor(rows + [i for i in range(bucket) if i not in rows], device=DEVICE)
        self.inputs = [{n: v[order] for n, v in layer.items()} for layer in whole]
        outputs = self.run(wrapper, bucket)
        self.inputs = whole
        accepted = [accepted[i] for i in rows]
        wrapper.commit(**{"accepted" if trees is None else "paths": accepted})
        result = [torch.zeros_like(y) for y in outputs]
        for want, y in zip(result, outputs, strict=True):
            want[rows] = y[: len(rows)]
        return result

    def compare(self, ours, theirs):
        for a, b in zip(ours, theirs, strict=True):
            assert self.pools[0].tokens(a) == self.pools[1].tokens(b)
            states = [w.materialize(s) for w, s in zip(self.wrappers, (a, b), strict=True)]
            assert torch.equal(*states)


def test_a_whole_step_is_one_graph(rng, seed):
    """Replayed with other sequences, pads and counts, with forks and frees between replays."""
    generator = np.random.default_rng(seed)
    twin = Twin(rng)
    wrapper, pool = twin.wrappers[0], twin.pools[0]
    named = torch.full((BUCKET,), -1, dtype=torch.int64, device=DEVICE)
    accepted = torch.ones(BUCKET, dtype=torch.int64, device=DEVICE)
    wrapper.warmup([BUCKET])

    def step():
        wrapper.plan(named)
        wrapper.fold()
        outputs = twin.run(wrapper)
        wrapper.commit(accepted)
        return outputs

    step()  # on pads: whatever is not warm yet
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    ours, theirs = ([*p.alloc(3)] for p in twin.pools)
    for i in range(30):
        if i in (5, 11, 17):
            at = int(generator.integers(len(ours)))
            ours += pool.fork(ours[at])
            theirs += twin.pools[1].fork(theirs[at])
        if i in (14, 23):
            pool.free(ours.pop(0))
            twin.pools[1].free(theirs.pop(0))
        rows = generator.permutation(BUCKET)[: len(ours)]
        by_row = [-1] * BUCKET
        other = [None] * BUCKET
        for row, a, b in zip(rows, ours, theirs, strict=True):
            by_row[row] = a if i % 2 else pool.slot(a)
            other[row] = b
        counts = generator.integers(0, 2, size=BUCKET) | (i % 3 > 0)
        named.copy_(torch.tensor(by_row))
        accepted.copy_(torch.tensor(counts))
        twin.draw()
        graph.replay()
        for have, want in zip(outputs, twin.host_step(other, counts), strict=True):
            assert torch.equal(have, want)
    twin.compare(ours, theirs)
    check_on_host(pool)


def test_a_step_of_trees_is_one_graph(rng, seed):
    """From plan to commit, replayed with other trees and paths, pads and empty windows."""
    generator = np.random.default_rng(seed)
    width = 5
    twin = Twin(rng, window=width, conv=True, policy="deadline:2", capacity=8, page_rows=4)
    wrapper, pool = twin.wrappers[0], twin.pools[0]
    named = torch.full((BUCKET,), -1, dtype=torch.int64, device=DEVICE)
    windows = torch.zeros(BUCKET, dtype=torch.int32, device=DEVICE)
    parents = torch.full((BUCKET, width), -1, dtype=torch.int32, device=DEVICE)
    paths = torch.full((BUCKET, width), -1, dtype=torch.int64, device=DEVICE)
    tokens = {n: v for n, v in twin.inputs[0].items() if n != "rows"}
    for each in twin.wrappers:
        each.warmup(
            [BUCKET], windows=[width], inputs=[tokens], conv=[{"x": twin.inputs[0]["rows"]}]
        )

    def step():
        wrapper.plan(named, windows, parents=parents)
        wrapper.fold()
        outputs = twin.run(wrapper)
        return *outputs, wrapper.commit(paths=paths)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *outputs, counts = step()
    ours, theirs = ([*p.alloc(4)] for p in twin.pools)
    moved = 0
    for i in range(24):
        if i in (5, 11):
            at = int(generator.integers(len(ours)))
            ours += pool.fork(ours[at])
            theirs += twin.pools[1].fork(theirs[at])
        if i == 15:
            pool.free(ours.pop(0))
            twin.pools[1].free(theirs.pop(0))
        by_row, other = [-1] * BUCKET, [None] * BUCKET
        for row, a, b in zip(generator.permutation(BUCKET), ours, theirs, strict=False):
            by_row[row], other[row] = a if i % 2 else pool.slot(a), b
        trees = [
            [int(generator.integers(-1, t)) for t in range(n)]
            for n in generator.integers(0, width + 1, size=BUCKET)
        ]
        ways = [path_to(tree, int(generator.integers(-1, len(tree)))) for tree in trees]
        moved += sum(path != [*range(len(path))] for path in ways)
        named.copy_(torch.tensor(by_row))
        windows.copy_(torch.tensor([len(tree) for tree in trees]))
        parents.copy_(torch.from_numpy(matrix(trees, width)))  # anything beyond a window
        paths.copy_(torch.tensor([path + [-1] * (width - len(path)) for path in ways]))
        twin.draw()
        graph.replay()
        want = twin.host_step(other, ways, trees=trees)
        for have, wanted in zip(outputs, want, strict=True):
            assert torch.equal(have, wanted)
        live = [b is not None for b in other]
        assert counts.tolist() == [len(path) * on for path, on in zip(ways, live, strict=True)]
    assert moved > 10
    twin.compare(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(pool.conv_tail(a), twin.pools[1].conv_tail(b))
    check_on_host(pool)


def test_direct_and_replayed_graphs_take_turns(rng, seed):
    """A graph of a small bucket moves states in place, one of a larger bucket replays them.

    The same sequences go through either, in any order, with forks and frees in between.
    """
    generator = np.random.default_rng(seed)
    twin, small = Twin(rng), 4
    twin.wrappers = [ReplayDecodeWrapper(p, backend="triton", direct=small) for p in twin.pools]
    wrapper, pool = twin.wrappers[0], twin.pools[0]
    accepted = torch.ones(BUCKET, dtype=torch.int64, device=DEVICE)
    wrapper.warmup([small, BUCKET])
    graphs = {}
    for bucket in (small, BUCKET):
        named = torch.full((bucket,), -1, dtype=torch.int64, device=DEVICE)

        def step(bucket=bucket, named=named):
            plan = wrapper.plan(named)
            assert plan.direct == (bucket == small)
            wrapper.fold()
            outputs = twin.run(wrapper, bucket)
            wrapper.commit(accepted[:bucket])
            return outputs

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        graphs[bucket] = graph, named, outputs
    ours, theirs = ([*p.alloc(3)] for p in twin.pools)
    for i in range(40):
        if i in (5, 9, 12, 17, 30):  # of sequences with rows, and of such without
            at = int(generator.integers(len(ours)))
            ours += pool.fork(ours[at])
            theirs += twin.pools[1].fork(theirs[at])
        if i in (14, 23, 33):
            pool.free(ours.pop(0))
            twin.pools[1].free(theirs.pop(0))
        bucket = small if i in (8, 10, 11) or generator.random() < 0.5 else BUCKET
        graph, named, outputs = graphs[bucket]
        some = generator.permutation(len(ours))[: min(bucket, len(ours))]
        rows = generator.permutation(bucket)[: len(some)]
        by_row, other = [-1] * bucket, [None] * bucket
        for row, at in zip(rows, some, strict=True):
            by_row[row] = ours[at] if i % 2 else pool.slot(ours[at])
            other[row] = theirs[at]
        counts = generator.integers(0, 2, size=BUCKET) | (bucket == small) | (i % 3 > 0)
        named.copy_(torch.tensor(by_row))
        accepted.copy_(torch.tensor(counts))
        twin.draw()
        graph.replay()
        for have, want in zip(outputs, twin.host_step(other, counts, bucket), strict=True):
            assert torch.equal(have, want)
    twin.compare(ours, theirs)
    check_on_host(pool)


def check_on_host(pool):
    """The books, with a copy of the records where numpy can read them."""
    records = pool.on_device.records
    pool.refresh()
    pool.on_device.ahead = False
    words = records.words.cpu()
    pool.on_device.records = type(records).make(words.shape[0], pool.on_device.pages, None, words)
    check_books(pool)
    pool.on_device.records, pool.on_device.ahead = records, True


def test_nothing_waits(rng):
    """Alloc, free, and steps that are enqueued ahead: torch finds no synchronizing call."""
    twin = Twin(rng)
    wrapper, pool = twin.wrappers[0], twin.pools[0]
    seqs = pool.alloc(4)
    wrapper.warmup([BUCKET])
    accepted = torch.ones(BUCKET, dtype=torch.int32, device=DEVICE)
    named = torch.tensor([*seqs, -1, -1], device=DEVICE)

    def work():
        for _ in range(6):
            wrapper.plan(named)
            wrapper.fold()
            twin.run(wrapper)
            wrapper.commit(accepted)
        more = pool.alloc(2)
        pool.free(more.pop())
        wrapper.plan([*seqs, *more], bucket=BUCKET)
        wrapper.fold()
        twin.run(wrapper)
        wrapper.commit(np.ones(5, dtype=np.int64))
        return more

    # Once before, so that pinned memory and kernels are there: their first time may wait.
    pool.free(work())
    torch.cuda._sleep(20_000_000)
    pool.free(work())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)  # the device is far behind from here on
        behind = torch.cuda.Event()
        behind.record()
        (more,) = work()
        assert not behind.query(), "the host waited, or was slower than the sleep"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [pool.tokens(s) for s in (*seqs, more)] == [21, 21, 21, 21, 1]


def test_two_half_batches_on_two_streams(rng):
    twin = Twin(rng)
    pool = twin.pools[0]
    halves = [twin.wrappers[0], ReplayDecodeWrapper(pool, backend="triton", direct="never")]
    (a, b), (d, e) = (p.alloc(2) for p in twin.pools)
    for half in halves:
        half.warmup([BUCKET])
    for _ in range(3):
        twin.draw()
        halves[0].plan([a, b], bucket=BUCKET)
        halves[0].fold()
        twin.run(halves[0])
        halves[0].commit()
        twin.host_step([d, e, None, None, None, None], [1] * BUCKET)
    (c,), (f,) = pool.fork(a), twin.pools[1].fork(d)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    named = [torch.tensor(s + [-1] * 4, device=DEVICE) for s in ([a, b], [c, -1])]
    for _ in range(7):
        twin.draw()
        torch.cuda.synchronize()
        for half, stream, seqs in zip(halves, streams, named, strict=True):
            with torch.cuda.stream(stream):
                half.plan(seqs)
                half.fold()
        for half, stream in zip(halves, streams, strict=True):
            with torch.cuda.stream(stream):
                twin.run(half)
                half.commit()
        torch.cuda.synchronize()
        twin.host_step([d, e, None, None, None, None], [1] * BUCKET)
        twin.host_step([f, None, None, None, None, None], [1] * BUCKET)
    twin.compare([a, b, c], [d, e, f])
