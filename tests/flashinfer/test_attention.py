"""Attention over pages with torch, against a loop over queries in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from replayinfer import InputError, PlanError, UnsupportedError
from replayinfer.integrations.flashinfer import KVPagePool, PagedAttentionWrapper

PAGE = 4


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] = (0, 7, 8, 13)
    windows: tuple[int, ...] = (3, 1, 0, 2)
    packed: bool = False
    bucket: int = 6
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    layout: str = "NHD"
    window_left: int = -1
    sm_scale: float | None = None
    dtype: torch.dtype = torch.float32
    pair: bool = False


CASES = [
    Case(),
    Case(packed=True),
    Case(windows=(1, 1, 1, 1)),
    Case(windows=(9, 4, 21, 1), packed=True),
    Case(windows=(5, 5, 5, 5), packed=True),
    Case(heads=2),
    Case(heads=8, layout="HND"),
    Case(kv_heads=4, dim=24, pair=True),
    Case(window_left=3),
    Case(window_left=0, packed=True),
    Case(sm_scale=0.7),
    Case(dtype=torch.bfloat16),
]


class World:
    """A pool with those sequences in it, and a step whose keys are written."""

    def __init__(self, case: Case, rng: torch.Generator) -> None:
        self.case, self.rng = case, rng
        self.kv = KVPagePool(
            [0], pages=40, page_size=PAGE, kv_heads=case.kv_heads, head_dim=case.dim,
            max_tokens=60, kv_layout=case.layout, dtype=case.dtype,
        )  # fmt: skip
        self.kv.storage[:, : self.kv.pad_page] = float("nan")  # what others left
        self.sequences = list(range(len(case.lengths)))
        self.kv.open(self.sequences)
        self.keys = [torch.zeros(0, 2, case.kv_heads, case.dim) for _ in self.sequences]
        self.write(case.lengths, packed=True)

    def write(self, windows, **options):
        case = self.case
        meta = self.kv.step(self.sequences, windows, **options)
        new = torch.full((meta.rows, 2, case.kv_heads, case.dim), float("nan"), dtype=case.dtype)
        live = meta.host.token_live.bool()
        new[live] = self.draw(int(live.sum()), 2, case.kv_heads, case.dim)
        self.kv.append(0, new[:, 0], new[:, 1], meta)
        self.kv.commit(meta)
        starts = meta.host.qo_indptr.tolist()
        for i, count in enumerate(windows):
            rows = new[starts[i] : starts[i] + count].float()
            self.keys[i] = torch.cat([self.keys[i], rows])
        return meta

    def step(self):
        case = self.case
        if case.packed:
            return self.write(case.windows, packed=True)
        return self.write(case.windows, bucket=case.bucket, window=max(case.windows))

    def draw(self, *shape):
        return torch.randn(shape, generator=self.rng).to(self.case.dtype)

    def plan(self, wrapper, meta, **options):
        case, at = self.case, meta.host
        wrapper.plan(
            at.qo_indptr, at.kv_indptr, at.kv_indices, at.last_page_len,
            case.heads, case.kv_heads, case.dim, PAGE, causal=True, sm_scale=case.sm_scale,
            window_left=case.window_left, q_data_type=case.dtype, **options,
        )  # fmt: skip

    def oracle(self, q, meta):
        """Rows of sequences only; what is past a window is left NaN."""
        case = self.case
        y = torch.full((meta.rows, case.heads, case.dim), float("nan"), dtype=torch.float64)
        scale = case.sm_scale or 1 / math.sqrt(case.dim)
        for i, (rows, count) in enumerate(zip(self.keys, case.windows, strict=True)):
            start = int(meta.host.qo_indptr[i])
            before = len(rows) - count
            for t in range(count):
                first = 0 if case.window_left < 0 else max(before + t - case.window_left, 0)
                seen = rows[first : before + t + 1].double()
                for h in range(case.heads):
                    g = h * case.kv_heads // case.heads
                    weight = seen[:, 0, g] @ q[start + t, h].double() * scale
                    y[start + t, h] = weight.softmax(0) @ seen[:, 1, g]
        return y


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_are_those_of_a_loop(case, rng):
    world = World(case, rng)
    meta = world.step()
    wrapper = PagedAttentionWrapper(torch.empty(0), case.layout)
    assert (wrapper.backend, wrapper.is_cuda_graph_enabled) == ("torch", False)
    world.plan(wrapper, meta)
    q = world.draw(meta.rows, case.heads, case.dim)
    cache = world.kv.cache(0)
    y = wrapper.run(q, (cache[:, 0], cache[:, 1]) if case.pair else cache)
    out = torch.full_like(q, float("nan"))
    assert wrapper.run(q, cache, out=out) is out
    assert torch.equal(out, y)
    exact = world.oracle(q, meta)
    live = meta.host.token_live.bool()
    # float32: a dot product of 24 terms and a mean of up to 34 values; bfloat16: one rounding of
    # the weights (2^-9) and one of the output, values up to about 4.
    bound = 2e-6 if case.dtype == torch.float32 else 4 * 2**-8
    torch.testing.assert_close(y.double()[live], exact[live], rtol=0, atol=bound)
    assert y.isfinite().all()
    if not case.packed:
        pads = meta.host.qo_indptr[meta.batch]
        assert not y[pads:].any()


def test_fixed_buffers_give_the_same_and_never_move(rng):
    case = Case(lengths=(5, 2, 9), windows=(2, 1, 2), bucket=4)
    world = World(case, rng)
    buffers = world.kv.buffers(4, 2)
    fixed = PagedAttentionWrapper(torch.empty(0), use_cuda_graph=True, **buffers.prefill_buffers())
    eager = PagedAttentionWrapper(torch.empty(0))
    held = None
    for _ in range(4):
        meta = world.step()
        q = world.draw(meta.rows, case.heads, case.dim)
        for wrapper in (fixed, eager):
            world.plan(wrapper, meta, uniform_q_len=2, seq_lens=meta.host.kv_len)
        mine = [fixed.run(q, world.kv.cache(0)), eager.run(q, world.kv.cache(0))]
        # More masked keys, another blocking of the same sums.
        torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=2e-6)
        inner = fixed.inner
        found = [t.data_ptr() for t in (inner._table, inner._kv_len, inner._q_len)]
        assert held in (None, found)
        held = found


def test_fixed_buffers_refuse_another_shape(rng):
    world = World(Case(lengths=(5, 2), windows=(2, 2), bucket=2), rng)
    fixed = PagedAttentionWrapper(
        torch.empty(0), use_cuda_graph=True, **world.kv.buffers(2, 2).prefill_buffers()
    )
    world.plan(fixed, world.step())
    one = world.kv.step(world.sequences, 1)
    with pytest.raises(
        UnsupportedError, match=r"got \[1, 1\] queries by request; allowed \[2, 2\]"
    ):
        world.plan(fixed, one)
    world.kv.abort(one)
    more = world.kv.step(world.sequences, 2, bucket=3)
    with pytest.raises(InputError, match=r"got 3 requests .* allowed 2 requests of up to 15"):
        world.plan(fixed, more)


def test_buffers_are_required_for_graphs():
    with pytest.raises(InputError, match="True without qo_indptr_buf, paged_kv_indices_buf, "):
        PagedAttentionWrapper(
            torch.empty(0), use_cuda_graph=True, paged_kv_indptr_buf=torch.empty(3)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_soft_cap": 30.0}, "logits_soft_cap: got 30.0; allowed None"),
        ({"custom_mask": torch.ones(3)}, "custom_mask: got a mask; allowed None"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: got 'ALIBI'; allowed 'NONE'"),
        ({"head_dim_vo": 16}, "head_dim_vo: got 16"),
        ({"surprise": 1}, "surprise: got 1; allowed 'nothing'"),
    ],
)
def test_options_that_torch_does_not_serve(options, message, rng):
    world = World(Case(), rng)
    wrapper = PagedAttentionWrapper(torch.empty(0))
    with pytest.raises(UnsupportedError, match=message):
        world.plan(wrapper, world.step(), **options)
    with pytest.raises(PlanError, match="run: got no plan"):
        wrapper.run(torch.empty(18, 4, 8), world.kv.cache(0))


def test_options_that_change_nothing_are_taken(rng):
    world = World(Case(), rng)
    neutral = {
        "logits_soft_cap": 0.0,
        "custom_mask": None,
        "head_dim_vo": 8,
        "disable_split_kv": True,
    }
    world.plan(PagedAttentionWrapper(torch.empty(0)), world.step(), **neutral)


def test_bad_arguments_name_what_was_seen(rng):
    world = World(Case(), rng)
    wrapper, meta = PagedAttentionWrapper(torch.empty(0)), world.step()
    world.plan(wrapper, meta)
    cache, q = world.kv.cache(0), torch.zeros(18, 4, 8)
    for call, message in (
        (lambda: wrapper.run(q[:3], cache), r"q: got \[3, 4, 8\] over pages \[4, 2, 8\]"),
        (lambda: wrapper.run(q.half(), cache), "q: got torch.float16 over pages of torch.float32"),
        (lambda: wrapper.run(q, cache, out=q[:2]), r"out: got \[2, 4, 8\]"),
        (lambda: World.plan(replaced(world, heads=3), wrapper, meta), "got 3 over 2 key heads"),
        (lambda: PagedAttentionWrapper(q, "NDH"), "kv_layout: got 'NDH'"),
        (lambda: PagedAttentionWrapper(q, backend="fa2"), "backend: got 'fa2'"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(UnsupportedError, match="run: got return_lse"):
        wrapper.run(q, cache, return_lse=True)
    with pytest.raises(UnsupportedError, match=r"backend: got 'flashinfer' .* on a GPU with"):
        PagedAttentionWrapper(q, backend="flashinfer")


def replaced(world, **values):
    """The same world under another case."""
    other = object.__new__(World)
    other.__dict__ = world.__dict__ | {"case": replace(world.case, **values)}
    return other


@pytest.mark.parametrize(
    ("name", "values"),
    [("qo_indptr", [0, 2, 1]), ("qo_indptr", [1, 2, 3]), ("kv_indptr", [0, 1]),
     ("last_page_len", [1, 5]), ("last_page_len", [0, 1]), ("kv_indices", [0])],
)  # fmt: skip
def test_offsets_that_are_none(name, values):
    given = {
        "qo_indptr": [0, 1, 2],
        "kv_indptr": [0, 1, 2],
        "kv_indices": [3, 4],
        "last_page_len": [1, 4],
    }
    arrays = [torch.tensor(v, dtype=torch.int32) for v in (given | {name: values}).values()]
    shown = "last_page_len" if name == "kv_indices" else name
    with pytest.raises(InputError, match=f"{shown}: got"):
        PagedAttentionWrapper(torch.empty(0)).plan(*arrays, 2, 1, 8, PAGE)


def test_torch_needs_no_workspace():
    assert PagedAttentionWrapper(torch.empty(0)).workspace_size() == (0, 0)
