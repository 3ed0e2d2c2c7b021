"""Draft trees that the device plans and commits, against the host's, and what is refused."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from replayinfer import InputError, Mamba2Spec, PlanError, ReplayDecodeWrapper
from replayinfer.testing import assert_bitwise_equal, assert_untouched, snapshot

from ..pools.kit import memory
from ..speculation.toy import VOCABULARY, Guesser, Toy
from ..transfer.rig import SPECS, Rig, assert_equal_outputs, assert_same
from ..trees.forest import matrix, path_to, random_tree
from .kit import check_books, device_planner, small_pool, wrapped
from .test_order import no_reads_in
from .test_reserve import everything

L, T = 9, 7


def random_int(rng, low, high):
    return int(torch.randint(low, high + 1, (), generator=rng))


def padded_paths(paths, width, rows=None, entries=None):
    full = np.full((entries or len(paths), width), -1)
    for row, path in zip(rows if rows is not None else range(len(paths)), paths, strict=True):
        full[row, : len(path)] = path
    return full


def assert_rows_are_equal(rig, seq, other, twin):
    """The committed rows of two sequences, and the rings behind their tails."""
    held = []
    for r, s in ((rig, seq), (other, twin)):
        r.pool.refresh()
        slot, row = r.pool.slot(s), np.arange(r.pool.history(s))
        page = r.pool.cursors.table[slot, row // r.pool.sizes.page_rows]
        offset = row % r.pool.sizes.page_rows
        held.append({n: f[:, page, offset] for n, f in r.pool.inputs.fields.items()})
    for name, rows in held[0].items():
        assert_bitwise_equal(rows, held[1][name], name)


class Tensors:
    """A step of a rig as an engine without a host view gives it: all of it in tensors."""

    def __init__(self, rig, rng, dtype):
        self.rig, self.rng, self.dtype = rig, rng, dtype

    def step(self, parts, trees, paths):
        rig, sequences = self.rig, list(parts)
        wrapper, n = rig.wrapper, len(parts) + 1  # and a pad at the end
        named = torch.tensor([rig.pool.slot(s) for s in sequences] + [-1])
        windows = torch.tensor([len(p) for p in parts.values()] + [5], dtype=self.dtype)
        lines = torch.from_numpy(np.vstack([matrix(trees, T), np.full((1, T), 99)])).to(self.dtype)
        plan_of, commit_of = wrapper.plan, wrapper.commit

        def plan(_, __, *, bucket, window, parents):
            assert (bucket, window) == (n, None)
            return plan_of(named, windows, parents=lines)

        def commit(*, paths):
            full = padded_paths(paths, T, entries=n)
            full[-1] = range(T)
            return commit_of(paths=torch.from_numpy(full).to(self.dtype))

        wrapper.plan, wrapper.commit = plan, commit
        try:
            return rig.step(parts, parents=lines, paths=dict(zip(sequences, paths, strict=True)))
        finally:
            del wrapper.plan, wrapper.commit


@pytest.mark.parametrize(
    ("family", "check"), [("mamba2", "0"), ("gdn", "1"), ("kda", "0")], ids=str
)
def test_trees_go_the_hosts_way(family, check, rng, monkeypatch):
    """Outputs, states, rows, cursors and rings after mixed trees and chains; forks in between."""
    monkeypatch.setenv("REPLAYINFER_CHECK", check)
    options = {"capacity": L, "max_window": T, "sequences": 6, "policy": "deadline:1"}
    rig = Rig(SPECS[family], rng, planner="device", **options)
    twin = Rig(SPECS[family], rng, like=rig, **options)
    tensors = [Tensors(rig, rng, dtype) for dtype in (torch.int32, torch.int64)]
    ours, theirs = rig.pool.alloc(3), twin.pool.alloc(3)
    for turn in range(8):
        if turn in (3, 6):
            ours += rig.pool.fork(ours[turn % 2])
            theirs += twin.pool.fork(theirs[turn % 2])
        trees = [random_tree(random_int(rng, 0, T), rng) for _ in ours]
        paths = [path_to(p, random_int(rng, -1, len(p) - 1)) for p in trees]
        parts = [rig.draw(len(p)) for p in trees]
        mine, others = (dict(zip(s, parts, strict=True)) for s in (ours, theirs))
        if turn % 4 == 3:  # a chain after trees
            counts = [random_int(rng, 0, len(p)) for p in trees]
            got, want = (
                r.step(p, accepted=dict(zip(p, counts, strict=True)))
                for r, p in ((rig, mine), (twin, others))
            )
        else:
            lines = matrix(trees)
            if turn % 2:
                got = tensors[turn // 2 % 2].step(mine, trees, paths)
            else:
                got = rig.step(mine, parents=lines, paths=dict(zip(ours, paths, strict=True)))
            want = twin.step(others, parents=lines, paths=dict(zip(theirs, paths, strict=True)))
        check_books(rig.pool)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal_outputs(got[a], want[b])
            assert_same(rig, a, twin, b)
            assert_rows_are_equal(rig, a, twin, b)
            for name in ("base", "history", "undo"):
                x, y = (getattr(r.pool.cursors, name)[r.pool.slot(s)] for r, s in
                        ((rig, a), (twin, b)))  # fmt: skip
                assert x == y, name


def test_a_step_of_trees_reads_nothing(rng, monkeypatch):
    pool = small_pool(4, capacity=8, max_window=4)
    a, b = pool.alloc(2)
    planner = device_planner(pool, policy="deadline:1")
    named, new = torch.tensor([a, -1, b]), torch.tensor([4, 0, 3])
    parents = torch.tensor([[-1, 0, 0, 2], [9, 9, 9, 9], [-1, -1, 1, 9]])
    paths = torch.tensor([[0, 2, 3, -1], [0, 1, 2, 3], [1, 2, -1, -1]])
    with monkeypatch.context() as patch:
        no_reads_in(patch)
        for dtype in (torch.int32, torch.int64):
            plan = planner.plan(named, new, parents=parents.to(dtype))
            planner.folded(plan)
            assert plan.tree
            counts, nodes = planner.accept(plan, paths.to(dtype))
            planner.commit(plan, counts)
    assert counts.tolist() == [3, 0, 2]
    assert nodes.tolist() == [[0, 2, 3, -1], [-1] * 4, [1, 2, -1, -1]]
    assert [pool.tokens(s) for s in (a, b)] == [6, 4]
    assert plan.step.counts.data_ptr() == counts.data_ptr()


@pytest.mark.parametrize("check", [False, True])
def test_what_is_no_tree_and_no_path(check, monkeypatch):
    """Taken as the kernels document, or refused where faults are looked for."""
    monkeypatch.setenv("REPLAYINFER_CHECK", str(int(check)))
    pool = small_pool(4, capacity=8, max_window=4)
    a, b = pool.alloc(2)
    planner = device_planner(pool)
    named, new = torch.tensor([-1, a, b]), torch.tensor([4, 4, 2])
    parents = torch.tensor([[7, 7, 7, 7], [-1, 0, 2, -9], [-1, 0, 50, 50]])
    if check:
        with pytest.raises(InputError, match=r"^parents: got 2 for node 2 of sequence 1; allowed"):
            planner.plan(named, new, parents=parents)
        assert not pool.cursors.unnamed
        parents[1, 2:] = -1
    plan = planner.plan(named, new, parents=parents)
    assert plan.parents.tolist() == [[-1] * 4, [-1, 0, -1, -1], [-1, 0, -1, -1]]
    assert plan.arrays.ancestors.tolist() == [[0] * 4, [1, 3, 4, 8], [1, 3, 4, 8]]
    planner.folded(plan)
    wrong = [[0, 2, 3, -1], [0, 1, 1, -1], [1, -1, -1, -1], [2, 3, -1, -1], [-1, 0, 1, -1],
             [-2, 0, -1, -1], [5, -1, -1, -1], [0, 1, 2, 3], [0, 0, -1, -1]]  # fmt: skip
    cut = [1, 2, 0, 1, 0, 0, 0, 2, 1]
    for path, count in zip(wrong, cut, strict=True):
        paths = torch.tensor([[0, 1, -1, -1], path, [0, 1, 2, -1]])
        if check:
            before = snapshot(everything(pool))
            with pytest.raises(InputError, match=r"^paths: got node .* for sequence 1; allowed"):
                planner.accept(plan, paths)
            assert_untouched(before, everything(pool))
            continue
        counts, nodes = planner.accept(plan, paths)
        assert counts.tolist() == [0, count, 2]  # node 2 lies beyond the window of 2
        kept = path[:count] + [-1] * (4 - count)
        assert nodes.tolist() == [[-1] * 4, kept, [0, 1, -1, -1]]
    counts, _ = planner.accept(plan, torch.tensor([[0] * 4, [0, 1, -1, -1], [-1] * 4]))
    assert planner.commit(plan, counts).tolist() == [0, 2, 0]


BAD_PARENTS = {
    "a flat tensor": torch.tensor([-1, 0, 0]),
    "too narrow": torch.tensor([[-1, 0], [-1, 0]]),
    "int16": torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int16),
    "strided": torch.tensor([[-1, -1], [0, 0], [0, 0]]).T,
    "meta": torch.empty(2, 3, dtype=torch.int32, device="meta"),
    "a list of one": [[-1, 0, 0]],
    "floats": [[-1.0, 0, 0]] * 2,
    "no tree": [[-1, 0, 0], [-1, 1, 0]],
}


@pytest.mark.parametrize("parents", BAD_PARENTS.values(), ids=BAD_PARENTS)
def test_bad_parents_change_nothing(parents):
    pool = small_pool(4)
    seqs = pool.alloc(2)
    planner = device_planner(pool)
    before = snapshot(everything(pool))
    with pytest.raises(InputError, match=r"^parents: got .*; allowed"):
        planner.plan(seqs, 3, parents=parents)
    assert_untouched(before, everything(pool))
    good = planner.plan(seqs, 3, parents=[[-1, 0, 0], [-1, 0, 1]])
    assert good.parents.tolist() == [[-1, 0, 0], [-1, 0, 1]]
    planner.abort(good)
    with pytest.raises(InputError, match=r"^parents: got draft trees for a direct step"):
        planner.plan(seqs, 1, parents=[[-1], [-1]], direct=True)


def test_paths_that_are_refused():
    """By form always; by value where handles, windows and parents are on the host."""
    pool = small_pool(4)
    seqs = pool.alloc(2)
    planner = device_planner(pool)
    lines = [[-1, 0, 0], [-1, 0, 1]]
    forms = [
        [[0]], [[0], 1.5, []], "ab", [[0], [0.5]], [[0], [[0]]], torch.tensor([0, 1]),
        torch.tensor([[0.0] * 3] * 2), torch.tensor([[0, 1]] * 2), [[0, 1, 2, 3], []], [[0], [3]],
        [[0], [0, -1, 2]], [[1, 1], []], [[2**40], []],
    ]  # fmt: skip
    for parents, wrong in ((torch.tensor(lines), []), (lines, [[[0, 1, 2], []], [[1], []]])):
        plan = planner.plan(seqs, 3, parents=parents)
        with pytest.raises(PlanError, match=r"^commit: got a plan that is planned"):
            planner.accept(plan, [[0], [0]])
        planner.folded(plan)
        before = snapshot(everything(pool))
        for paths in forms + wrong:
            with pytest.raises(InputError, match=r"^paths: got .*; allowed"):
                planner.accept(plan, paths)
        assert_untouched(before, everything(pool))
        counts, nodes = planner.accept(plan, [[0, 2], np.array([0, 1, 2])])
        assert nodes.tolist() == [[0, 2, -1], [0, 1, 2]]
        planner.commit(plan, counts)
    assert [pool.tokens(s) for s in seqs] == [4, 6]


def test_counts_for_trees_and_paths_for_chains(rng):
    rig = Rig(SPECS["mamba2"], rng, planner="device")
    seqs = rig.pool.alloc(2)
    parts = {s: rig.draw(3) for s in seqs}
    rig.start(parts, parents=[[-1, 0, 0]] * 2)
    for call in (lambda: rig.wrapper.commit(), lambda: rig.wrapper.commit(torch.tensor([1, 1, 0]))):
        with pytest.raises(InputError, match="accepted: got a count for a plan of trees"):
            call()
    assert rig.wrapper.commit(paths=[[0], []]).tolist() == [1, 0, 0]
    rig.start(parts)
    with pytest.raises(InputError, match="paths: got paths for a plan of chains"):
        rig.wrapper.commit(paths=torch.tensor([[0, 1, 2]] * 2))
    rig.wrapper.abort()


def test_windows_of_one_token(rng):
    """Trees of a node, in a pool that has no masks."""
    rig = Rig(SPECS["gdn"], rng, planner="device", max_window=1)
    a, b = rig.pool.alloc(2)
    rig.start({a: rig.draw(1), b: rig.draw(1)}, parents=torch.tensor([[-1], [-1]]))
    assert rig.wrapper.commit(paths=torch.tensor([[0], [-1]])).tolist() == [1, 0, 0]
    assert [rig.pool.tokens(s) for s in (a, b)] == [1, 0]


def test_a_sequence_that_is_freed_before_the_commit_is_left_alone(rng):
    """Its pages may be another's by then: no row of it moves."""
    rig = Rig(SPECS["mamba2"], rng, planner="device")
    a, b = rig.pool.alloc(2)
    tree = {s: rig.draw(3) for s in (a, b)}
    rig.start(tree, parents=torch.tensor([[-1, 0, 0]] * 2))
    plan = rig.wrapper._plan
    plan.handles  # noqa: B018  read before the slot is another's
    rig.pool.on_device.records.handle[rig.pool.slot(a)] += 2 << 20
    held = snapshot(memory(rig.pool))
    slot, before = rig.pool.slot(b), plan.starts.copy()
    assert rig.wrapper.commit(paths=torch.tensor([[0, 2, -1]] * 2)).tolist() == [0, 2, 0]
    moved = memory(rig.pool)
    page, row = plan.table[1, 0], int(before[1])
    for name, tensor in moved.items():
        changed = held[name].clone()
        if name.startswith("rows."):
            source, target = row + 2, row + 1  # pages of 2 rows
            changed[:, page, target] = tensor[:, plan.table[1, source // 2], source % 2]
        elif name == "conv":
            place = plan.ring_places()[1]
            ring = rig.pool.conv.ring
            changed[:, slot, (place + 1) % ring] = tensor[:, slot, (place + 2) % ring]
        assert_bitwise_equal(tensor, changed, name)


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_a_session_over_a_device_pool(family, rng):
    toy = Toy(SPECS[family], rng, planner="device")
    from ..speculation.test_session import begin

    prompts = [torch.randint(0, VOCABULARY, (n,), generator=rng).tolist() for n in (1, 3)]
    session, handles = begin(toy, Guesser(toy, rng, trees=True), prompts)
    for _ in range(6):
        session.step(handles)
        check_books(toy.pool)
    for handle, prompt in zip(handles, prompts, strict=True):
        text = session.remove(handle)
        toy.assert_greedy(prompt, text)
        assert toy.pool.tokens(handle) == len(text) - 1
    assert 0 < session.counters.accepted < session.counters.drafts


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
def test_kernels_take_whole_steps_of_trees(rng, monkeypatch):
    """From plan to commit, bit for bit as the host planned them."""
    spec = Mamba2Spec(heads=2, dim=4, state=8, groups=1)
    options = {"capacity": 6, "max_window": 4, "layers": (1,), "policy": "spread"}
    rig = Rig(spec, rng, planner="device", **options)
    twin = Rig(spec, rng, like=rig, **options)
    for r in (rig, twin):
        r.wrapper = ReplayDecodeWrapper(r.pool, backend="triton", policy="spread", direct="never")
    a, b = rig.pool.alloc(2), twin.pool.alloc(2)
    trees = [[-1, 0, 0, 2], [-1, -1, 1, 0]]
    for paths in ([[0, 2, 3], [1, 2]], [[0], [0, 3]]):
        parts = [rig.draw(len(t)) for t in trees]
        mine, others = (dict(zip(s, parts, strict=True)) for s in (a, b))
        for r in (rig, twin):
            if r is rig:
                with monkeypatch.context() as patch:
                    patch.setattr(type(r.pool.on_device), "pull", pytest.fail)
                    got = r.start(mine, parents=matrix(trees))
                    tensor = torch.from_numpy(padded_paths(paths, 4))
                    assert r.wrapper.commit(paths=tensor).tolist()[:2] == [*map(len, paths)]
            else:
                want = r.step(others, parents=matrix(trees), paths=dict(zip(b, paths, strict=True)))
        for x, y in zip(a, b, strict=True):
            assert_equal_outputs(got[x], want[y])
            assert_same(rig, x, twin, y)
            assert_rows_are_equal(rig, x, twin, y)
    assert wrapped(rig.pool).pool is rig.pool
