"""Field reports 1 and 5: a pad yields zeros and writes nothing, and no write leaves its target."""

import numpy as np
import pytest
import torch

from replayinfer.testing import assert_untouched, poison_, snapshot

from ..pools.kit import FORMATS, SPECS, World, books, memory


def permitted(plan, world, tokens, before):
    """Masks of all that one step may write, worked out from what each sequence is.

    A fold its destination page; a window its rows and its ring places; nothing else anywhere.
    """
    pool, cur = world.pool, world.pool.cursors
    masks = {name: torch.zeros(t.shape[:3], dtype=torch.bool) for name, t in memory(pool).items()}
    for i, seq in enumerate(plan.handles.tolist()):
        slot = cur.peek(seq)
        if plan.fold[i]:
            masks["checkpoints"][:, cur.checkpoint[slot]] = True
        for t in range(plan.windows[i]):
            row = (0 if plan.fold[i] else before[i]) + t
            for name in masks:
                if name.startswith("rows."):
                    page = cur.table[slot, row // pool.sizes.page_rows]
                    masks[name][:, page, row % pool.sizes.page_rows] = True
            masks["conv"][:, slot, (tokens[i] + t) % pool.conv.ring] = True
    return {n: m.view(*m.shape, *(1,) * (memory(pool)[n].dim() - 3)) for n, m in masks.items()}


@pytest.fixture(
    params=[(family, fmt) for family in SPECS for fmt in ("fp32", "fp32_split")], ids=str
)
def world(request, rng):
    """Every page and slot is held, so that an index of -1 would land on a living sequence."""
    family, fmt = request.param
    world = World(
        SPECS[family], rng, capacity=4, page_rows=2, max_window=2, max_sequences=6, format=fmt,
        checkpoint_pages=6, input_pages=12, spare=1,
    )  # fmt: skip
    world.seqs = world.alloc(6)
    for seq in world.seqs:
        world.seed(seq, tokens=5)
    world.step(dict.fromkeys(world.seqs, 2))
    world.step(dict.fromkeys(world.seqs, 2), {seq: i % 3 for i, seq in enumerate(world.seqs)})
    assert [ids.free for ids in (world.pool.checkpoint_ids, world.pool.input_ids)] == [0, 0]
    return world


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("bucket", [4, 8])
def test_report_1_pads_write_nothing_and_yield_zeros(world, batch, bucket):
    pool = world.pool
    seqs = world.seqs[1 : 1 + batch]
    windows = np.array([2, 0, 1][:batch], dtype=np.int64)
    tokens, histories = [pool.tokens(s) for s in seqs], [pool.history(s) for s in seqs]
    cursors = {n: t for n, t in books(pool).items() if n.startswith("cursors.")}
    old_cursors, before = snapshot(cursors), snapshot(memory(pool))

    plan = world.wrapper.plan(seqs, windows, bucket=bucket, window=2)
    world.wrapper.fold()
    for conv, y in world.run(plan, world.draw(plan)).values():  # pads and dead tokens are NaN
        for out in (conv, y):
            live = torch.zeros(bucket, 2, dtype=torch.bool)
            for i, window in enumerate(windows):
                live[i, :window] = True
            assert (out[~live] == 0).all()
            assert torch.isfinite(out).all()
            assert batch == 0 or out[live].any()
    world.wrapper.commit()

    assert_untouched(before, memory(pool), permitted(plan, world, tokens, histories))
    others = np.setdiff1d(np.arange(6), plan.slots)
    for name, old in old_cursors.items():
        assert torch.equal(cursors[name][others], old[others]), name


@pytest.mark.parametrize("batch", [1, 3])
def test_report_1_outputs_of_the_callers_are_overwritten_whole(world, batch):
    """A caller's own buffer may hold NaN where the pads are."""
    plan = world.wrapper.plan(world.seqs[:batch], bucket=5)
    world.wrapper.fold()
    for layer, (inputs, rows) in world.draw(plan).items():
        heads, dim, _ = world.spec.state_shape
        y, conv = poison_(torch.empty(5, 1, heads, dim)), poison_(torch.empty_like(rows))
        assert world.wrapper.run(layer, out=y, **inputs) is y
        assert world.wrapper.conv(layer, rows, out=conv) is conv
        for out in (y, conv):
            assert torch.isfinite(out).all()
            assert (out[batch:] == 0).all()
    world.wrapper.abort()


def test_report_1_a_pad_is_no_handle(world):
    """Callers leave pads out, so no -1 can be taken for a sequence."""
    for pads in ([-1], [world.seqs[0], -1]):
        with pytest.raises(RuntimeError, match="leave pads out, the bucket adds them"):
            world.wrapper.plan(pads)


@pytest.mark.parametrize("fmt", FORMATS)
def test_report_5_a_fold_in_a_padded_bucket_writes_its_targets_only(fmt, rng):
    """The list is shorter than the bucket: neither its source pads nor its target pads are used."""
    world = World(
        SPECS["gdn"], rng, capacity=2, page_rows=2, max_sequences=5, checkpoint_pages=8, format=fmt
    )
    a, b, c, d = world.alloc(4)
    world.step([a, b, c, d])
    world.step([a, b])
    (e,) = world.fork(a)
    pool, cur = world.pool, world.pool.cursors
    states = {seq: world.wrapper.materialize(seq) for seq in (a, b, c, d, e)}
    before = snapshot(memory(pool))
    plan = world.wrapper.plan([c, a, b], bucket=8)
    arrays = plan.arrays
    assert arrays.fold_count.item() == 2
    for name in ("fold_source", "fold_target"):
        ids = getattr(arrays, name)
        assert (ids[2:] == -1).all()
        assert ((ids[:2] >= 0) & (ids[:2] < 8)).all()
    assert (arrays.fold_table[2:] == -1).all()
    world.wrapper.fold()
    written = torch.zeros(8, dtype=torch.bool)
    written[[cur.checkpoint[cur.peek(a)], cur.checkpoint[cur.peek(b)]]] = True
    allowed = {"checkpoints": written.view(1, 8, *(1,) * (pool.checkpoints.storage.dim() - 2))}
    assert_untouched(before, memory(pool), allowed)
    world.wrapper.abort()
    for seq in (c, d, e):
        assert torch.equal(world.wrapper.materialize(seq), states[seq])
    world.check()


def test_report_5_a_write_never_goes_to_a_page_that_another_holds(rng):
    """Fork, then every writer in turn: step, fold, rollback, seed; the sibling keeps its bits."""
    for writer in ("step", "fold", "rollback", "seed"):
        world = World(SPECS["mamba2"], rng, capacity=6, page_rows=2, restore="any", layers=[0])
        (a,) = world.alloc()
        world.grow(a, 5)
        (b,) = world.fork(a)
        state, tail = world.wrapper.materialize(b), world.pool.conv_tail(b)
        pages = world.pool.cursors.table[world.pool.cursors.peek(b)]
        rows = {n: f[:, pages[:2]].clone() for n, f in world.pool.inputs.fields.items()}
        if writer == "step":
            world.grow(a, 9)
        elif writer == "fold":
            world.step([a], force=[a])
        elif writer == "rollback":
            world.rollback(a, 4)
            world.grow(a, 4)
        else:
            world.seed(a, tokens=3)
            world.grow(a, 4)
        assert torch.equal(world.wrapper.materialize(b), state), writer
        assert torch.equal(world.pool.conv_tail(b), tail), writer
        for name, field in world.pool.inputs.fields.items():
            assert torch.equal(field[:, pages[:2]], rows[name]), (writer, name)
        world.check()
