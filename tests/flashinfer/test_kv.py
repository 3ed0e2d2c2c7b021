"""The KV page pool against lists of keys and values, through forks, rollbacks and refused calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayinfer import CapacityError, InputError, PlanError, StaleHandleError
from replayinfer.integrations.flashinfer import KVPagePool

HEADS, DIM, PAGE, LAYERS = 2, 3, 4, (1, 5)


def make(pages=64, max_tokens=40, **options):
    return KVPagePool(
        LAYERS, pages=pages, page_size=PAGE, kv_heads=HEADS, head_dim=DIM, max_tokens=max_tokens,
        **options,
    )  # fmt: skip


class Texts:
    """What every sequence should hold: a row of keys and values per token, by layer."""

    def __init__(self, kv, rng):
        self.kv, self.rng = kv, rng
        self.rows: dict[int, torch.Tensor] = {}  # [tokens, layers, 2, heads, dim]

    def open(self, sequences):
        self.kv.open(sequences)
        for s in sequences:
            self.rows[s] = torch.zeros(0, len(LAYERS), 2, HEADS, DIM)

    def step(self, sequences, windows, accepted=None, **options):
        """One step with NaN wherever no token is."""
        meta = self.kv.step(sequences, windows, **options)
        new = torch.full((meta.rows, len(LAYERS), 2, HEADS, DIM), float("nan"))
        live = meta.host.token_live.bool()
        new[live] = torch.randn((int(live.sum()), *new.shape[1:]), generator=self.rng)
        for i, layer in enumerate(LAYERS):
            self.kv.append(layer, new[:, i, 0], new[:, i, 1], meta)
        if accepted is not None and accepted == "abort":
            self.kv.abort(meta)
            return meta
        self.kv.commit(meta, accepted)
        counts = windows if accepted is None else accepted
        starts = meta.host.qo_indptr.tolist()
        for s, start, count in zip(sequences, starts, counts, strict=False):
            self.rows[s] = torch.cat([self.rows[s], new[start : start + count]])
        return meta

    def check(self):
        for s, rows in self.rows.items():
            assert self.kv.length(s) == len(rows)
            table = torch.from_numpy(self.kv.table(s)).long()
            for i, layer in enumerate(LAYERS):
                pages = self.kv.cache(layer)[table]
                if self.kv.kv_layout == "HND":
                    pages = pages.transpose(-3, -2)
                held = pages.transpose(1, 2).reshape(-1, 2, HEADS, DIM)[: len(rows)]
                assert torch.equal(held, rows[:, i])
        assert not self.kv.storage[:, self.kv.pad_page].any()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_walk_of_steps_forks_rollbacks_and_frees(packed, kv_layout, rng, seed):
    kv = make(kv_layout=kv_layout)
    kv.storage[:, : kv.pad_page] = float("nan")  # as if others had used it
    texts, draw = Texts(kv, rng), np.random.default_rng(seed)
    name = 0
    for _ in range(60):
        live = list(texts.rows)
        room = [s for s in live if len(texts.rows[s]) < 30]
        action = draw.choice(["open", "step", "step", "step", "fork", "rollback", "free"])
        if action == "open" and len(live) < 5:
            texts.open([name])
            name += 1
        elif action == "step" and room:
            chosen = [int(s) for s in draw.permutation(room)[: draw.integers(1, 4)]]
            windows = draw.integers(0, 6, len(chosen)).tolist()
            accepted = [int(draw.integers(0, w + 1)) for w in windows]
            ends = draw.choice(["all", "some", "abort"])
            given = {"all": None, "some": accepted, "abort": "abort"}[ends]
            options = {"packed": True} if packed else {"bucket": 4, "window": 5}
            texts.step(chosen, windows, given, **options)
        elif action == "fork" and live and len(live) < 5:
            parent = int(draw.choice(live))
            kv.fork(parent, [name, name + 1])
            for child in (name, name + 1):
                texts.rows[child] = texts.rows[parent]
            name += 2
        elif action == "rollback" and live:
            s = int(draw.choice(live))
            gone = int(draw.integers(0, len(texts.rows[s]) + 1))
            kv.rollback(s, gone)
            texts.rows[s] = texts.rows[s][: len(texts.rows[s]) - gone]
        elif action == "free" and live:
            kv.free([s := int(draw.choice(live))])
            del texts.rows[s]
        texts.check()
    held = np.concatenate([kv.table(s) for s in texts.rows] or [np.zeros(0, dtype=np.int32)])
    assert np.array_equal(np.bincount(held, minlength=kv.pad_page), kv.page_ids.refs)
    kv.free(list(texts.rows))
    assert kv.pages_in_use() == 0


def test_a_fork_shares_full_pages_and_copies_the_partial_one(rng):
    kv = make()
    texts = Texts(kv, rng)
    texts.open([1])
    texts.step([1], [10], packed=True)
    kv.fork(1, [2, 3])
    tables = [kv.table(s).tolist() for s in (1, 2, 3)]
    assert [t[:2] for t in tables] == [tables[0][:2]] * 3
    assert len({t[2] for t in tables}) == 3
    assert kv.pages_in_use() == 5


def test_a_fork_at_a_page_boundary_copies_nothing(rng):
    kv = make()
    texts = Texts(kv, rng)
    texts.open([1])
    texts.step([1], [8], packed=True)
    kv.fork(1, [2])
    assert kv.pages_in_use() == 2
    texts.rows[2] = texts.rows[1]
    texts.step([1, 2], [3, 2], packed=True)
    texts.check()


def test_a_shared_page_that_became_partial_is_copied_before_it_is_written(rng):
    kv = make()
    texts = Texts(kv, rng)
    texts.open([1])
    texts.step([1], [8], packed=True)
    kv.fork(1, [2])
    kv.rollback(2, 3)
    texts.rows[2] = texts.rows[1][:5]
    assert kv.table(2).tolist() == kv.table(1).tolist()
    texts.step([2], [2], packed=True)
    assert kv.table(2)[1] != kv.table(1)[1]
    texts.check()


def test_exhaustion_changes_nothing(rng):
    kv = make(pages=3)
    texts = Texts(kv, rng)
    texts.open([1, 2])
    texts.step([1], [6], packed=True)
    with pytest.raises(CapacityError, match="KV pages: got a need of 2; allowed 1"):
        kv.step([1, 2], [3, 4], packed=True)
    with pytest.raises(CapacityError, match="KV pages: got a need of 2; allowed 1"):
        kv.fork(1, [3, 4])
    assert (kv.pages_in_use(), kv.length(1), kv.length(2)) == (2, 6, 0)
    texts.step([2], [4], packed=True)
    texts.check()
    with pytest.raises(StaleHandleError, match="got 3"):
        kv.length(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda kv: kv.open([1]), InputError, r"of which \[1\] are open"),
        (lambda kv: kv.open([8, 8]), InputError, "allowed each once"),
        (lambda kv: kv.free([9]), StaleHandleError, "sequence: got 9"),
        (lambda kv: kv.free([1, 9]), StaleHandleError, "sequence: got 9"),
        (lambda kv: kv.step([1, 1]), InputError, "allowed each once"),
        (lambda kv: kv.step([1], [41], packed=True), InputError, "46 after the step; allowed 40"),
        (lambda kv: kv.step([1, 2], bucket=1), InputError, "at most the bucket, 1"),
        (lambda kv: kv.step([1], [3], window=2), InputError, r"got \[3\] after lengths"),
        (lambda kv: kv.step([1], [-1]), InputError, r"got \[-1\]"),
        (lambda kv: kv.step([1], [1, 1]), InputError, r"windows: got \[2\]; allowed \[1\]"),
        (lambda kv: kv.rollback(1, 6), InputError, r"allowed 0\.\.5"),
        (lambda kv: kv.cache(0), InputError, r"got 0; allowed the layers of this pool, \[1, 5\]"),
    ],
)
def test_refused_calls_change_nothing(call, error, message, rng):
    kv = make()
    texts = Texts(kv, rng)
    texts.open([1, 2])
    texts.step([1, 2], [5, 3], packed=True)
    before = kv.pages_in_use()
    with pytest.raises(error, match=message):
        call(kv)
    assert kv.pages_in_use() == before
    texts.step([1, 2], [1, 1])
    texts.check()


def test_a_step_holds_its_sequences(rng):
    kv = make()
    kv.open([1, 2])
    meta = kv.step([1], 2)
    for call in (
        lambda: kv.step([2, 1]),
        lambda: kv.free([1]),
        lambda: kv.fork(1, [3]),
        lambda: kv.rollback(1, 0),
    ):
        with pytest.raises(PlanError, match=r"got sequences \[1\], which are in a step"):
            call()
    with pytest.raises(InputError, match=r"accepted: got \[3\]"):
        kv.commit(meta, [3])
    kv.commit(meta, [1])
    for end in (kv.commit, kv.abort):
        with pytest.raises(PlanError, match="not open in this pool"):
            end(meta)
    assert kv.length(1) == 1


def test_an_overwritten_step_is_refused():
    kv = make()
    kv.open([1, 2])
    old = kv.step([1])
    kv.step([2])
    with pytest.raises(PlanError, match="step 1 of its bucket while the buffers hold step 2"):
        kv.append(1, torch.ones(1, HEADS, DIM), torch.ones(1, HEADS, DIM), old)


@pytest.mark.parametrize("name", ["pages", "page_size", "kv_heads", "head_dim", "max_tokens"])
def test_sizes_are_checked(name):
    sizes = {"pages": 4, "page_size": 4, "kv_heads": 1, "head_dim": 4, "max_tokens": 8}
    with pytest.raises(InputError, match=f"{name}: got 0"):
        KVPagePool([0], **(sizes | {name: 0}))
