"""One plan for both halves of a hybrid step, with stand-ins for FlashInfer's wrappers."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayinfer import (
    InputError,
    Mamba2Spec,
    PlanError,
    ReplayDecodeWrapper,
    ReplayPrefillWrapper,
    StatePool,
    UnsupportedError,
)
from replayinfer.integrations.flashinfer import (
    AttentionShape,
    HybridStepPlanner,
    KVPagePool,
    PagedAttentionWrapper,
)

from . import stand_ins

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
SHAPE = AttentionShape(HEADS, KV_HEADS, DIM, torch.float32, torch.float32)
EMPTY = torch.empty(0)


class Half:
    """A recurrent layer and an attention layer, and the sequences of both."""

    def __init__(self, rng, planner="host", window=4):
        spec = Mamba2Spec(heads=2, dim=4, state=8, groups=1, conv_width=0)
        self.pool = StatePool(
            spec, [0], max_sequences=8, capacity=8, max_window=window, planner=planner
        )
        self.pool.bind(0, A=-torch.rand(2), D=torch.ones(2), dt_bias=torch.zeros(2))
        self.replay = ReplayDecodeWrapper(self.pool, backend="torch", direct="never")
        self.prefill = ReplayPrefillWrapper(self.pool, backend="torch")
        self.kv = KVPagePool(
            [1], pages=64, page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, max_tokens=64
        )
        self.rng = rng

    def start(self, lengths):
        sequences = self.pool.alloc(len(lengths))
        self.kv.open(sequences)
        meta = self.kv.step(sequences, lengths, packed=True)
        HybridStepPlanner(PagedAttentionWrapper(EMPTY), self.prefill).plan(meta, SHAPE)
        self.prefill.run(0, **self.inputs(meta.rows))
        self.write(meta)
        self.prefill.commit()
        self.kv.commit(meta)
        return sequences

    def inputs(self, *lead):
        def draw(*shape):
            return torch.randn((*lead, *shape), generator=self.rng)

        return {"x": draw(2, 4), "dt": draw(2), "B": draw(1, 8), "C": draw(1, 8)}

    def write(self, meta):
        for_both = torch.randn((2, meta.rows, KV_HEADS, DIM), generator=self.rng)
        self.kv.append(1, for_both[0], for_both[1], meta)

    def finish_plain(self, planner, sequences):
        meta = self.kv.step(sequences, 1)
        planner.plan(meta, SHAPE)
        self.write(meta)
        self.finish(meta)

    def finish(self, meta, accepted=None):
        self.replay.fold()
        self.replay.run(0, **self.inputs(meta.bucket, meta.window))
        self.replay.commit(accepted)
        self.kv.commit(meta, accepted)


@pytest.fixture
def half(rng):
    return Half(rng)


def decode(**options):
    return stand_ins.BatchDecodeWithPagedKVCacheWrapper(EMPTY, use_tensor_cores=True, **options)


def graph_decode(half, bucket, window):
    buffers = half.kv.buffers(bucket, window).decode_buffers()
    return stand_ins.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        EMPTY, "NHD", True, True, **buffers
    )


WRAPPERS = {
    "decode": lambda half: decode(),
    "graph decode": lambda half: graph_decode(half, 4, 3),
    "prefill": lambda half: stand_ins.BatchPrefillWithPagedKVCacheWrapper(EMPTY),
    "holistic": lambda half: stand_ins.BatchAttention(device="cpu"),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("planner", ["host", "device"])
def test_both_wrappers_get_one_step(name, planner, rng):
    half = Half(rng, planner)
    theirs = WRAPPERS[name](half)
    ours = PagedAttentionWrapper(EMPTY)
    sequences = half.start([5, 9, 2])
    for accepted in ([3, 1, 0], [2, 1, 1], [1, 1, 2]):
        windows = [3, 1, 2]
        meta = half.kv.step(sequences, windows, bucket=4, window=3)
        plan = HybridStepPlanner(theirs, half.replay).plan(meta, SHAPE)
        assert (plan.batch, plan.bucket, plan.window) == (3, 4, 3)
        assert plan.windows.tolist() == windows
        half.write(meta)
        q = torch.randn((meta.rows, HEADS, DIM), generator=rng)
        y = theirs.run(q, half.kv.cache(1))
        at = meta.host
        ours.plan(
            at.qo_indptr, at.kv_indptr, at.kv_indices, at.last_page_len,
            HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=torch.float32,
        )  # fmt: skip
        assert torch.equal(y[0] if name == "holistic" else y, ours.run(q, half.kv.cache(1)))
        half.finish(meta, accepted)
        assert [half.pool.tokens(s) for s in sequences] == [half.kv.length(s) for s in sequences]


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_their_plan_is_given(name, half):
    theirs = WRAPPERS[name](half)
    sequences = half.start([5, 9, 2])
    meta = half.kv.step(sequences, [3, 1, 2], bucket=4, window=3)
    options = {} if name == "holistic" else {"disable_split_kv": True}
    shape = AttentionShape(HEADS, KV_HEADS, DIM, torch.float32, torch.float32, 0.5)
    HybridStepPlanner(theirs, half.replay).plan(meta, shape, **options)
    (call,) = theirs.calls
    # The pad's window lies in the pad page; 5 + 3, 9 + 3, 2 + 3 and 3 keys of pages of 4.
    offsets = call["indptr" if "decode" in name else "kv_indptr" if name == "holistic" else
                   "paged_kv_indptr"]  # fmt: skip
    assert offsets.tolist() == [0, 2, 5, 7, 8]
    ids = next(v for k, v in call.items() if k.endswith("indices"))
    assert ids.tolist() == [
        *half.kv.table(sequences[0]),
        *half.kv.table(sequences[1]),
        *half.kv.table(sequences[2]),
        half.kv.pad_page,
    ]
    assert ids.data_ptr() == meta.device.kv_indices.data_ptr()
    assert call["sm_scale"] == 0.5
    heads = (call["num_qo_heads"], call["num_kv_heads"], call["page_size"])
    assert heads == (HEADS, KV_HEADS, PAGE)
    assert {call["q_data_type"], call["kv_data_type"]} == {torch.float32}
    if name == "holistic":
        assert call["kv_len_arr"].tolist() == [8, 12, 5, 3]
    else:
        assert call["seq_lens"].tolist() == [8, 12, 5, 3]
        assert (call["non_blocking"], call["disable_split_kv"]) == (True, True)
    if "decode" in name:
        assert (call["q_len_per_req"], call["is_causal"]) == (3, None)
    else:
        assert call["causal"]
        assert call["qo_indptr"].tolist() == [0, 3, 6, 9, 12]
    if name == "prefill":
        assert call["uniform_q_len"] == 3


def test_a_graph_wrapper_over_our_buffers_holds_the_step(half):
    wrapper = graph_decode(half, 4, 2)
    sequences = half.start([5, 1, 8])
    planner = HybridStepPlanner(wrapper, half.replay)
    for count in (3, 1, 2):
        meta = half.kv.step(sequences[:count], 2, bucket=4)
        planner.plan(meta, SHAPE)
        for held, ours in zip(
            wrapper._buffers,
            (meta.device.kv_indptr, meta.device.kv_indices, meta.device.last_page_len),
            strict=True,
        ):
            assert held.data_ptr() == ours.data_ptr()
            assert torch.equal(held[: ours.numel()], ours)
        half.write(meta)
        half.finish(meta)


def test_a_packed_step_goes_to_prefill(half):
    theirs = stand_ins.BatchPrefillWithPagedKVCacheWrapper(EMPTY)
    sequences = half.start([5, 2])
    meta = half.kv.step(sequences, [3, 7], packed=True)
    plan = HybridStepPlanner(theirs, half.prefill).plan(meta, SHAPE)
    assert plan.cu_seqlens.tolist() == [0, 3, 10]
    (call,) = theirs.calls
    assert call["qo_indptr"].tolist() == [0, 3, 10]
    assert call["uniform_q_len"] is None
    half.prefill.abort()


def test_a_failing_attention_plan_leaves_no_replay_plan(half):
    theirs = decode()
    sequences = half.start([5])
    before = half.pool.pages_in_use()
    meta = half.kv.step(sequences, 2)
    planner = HybridStepPlanner(theirs, half.replay)
    theirs.fails = ValueError("the buffer is too small")
    with pytest.raises(ValueError, match="too small"):
        planner.plan(meta, SHAPE)
    assert half.pool.pages_in_use() == before
    theirs.fails = None
    planner.plan(meta, SHAPE)
    half.write(meta)
    half.finish(meta)


def test_their_rules_reach_the_caller(half):
    sequences = half.start([5, 3])
    meta = half.kv.step(sequences, 2, bucket=3)
    wrong_batch = HybridStepPlanner(graph_decode(half, 4, 2), half.replay)
    with pytest.raises(ValueError, match="batch size 3 mismatches"):
        wrong_batch.plan(meta, SHAPE)
    plain = HybridStepPlanner(stand_ins.BatchDecodeWithPagedKVCacheWrapper(EMPTY), half.replay)
    with pytest.raises(ValueError, match="requires tensor-core decode"):
        plain.plan(meta, SHAPE)


def test_halves_that_disagree_are_refused(half):
    sequences = half.start([5, 3])
    half.kv.rollback(sequences[1], 1)
    meta = half.kv.step(sequences, 1)
    with pytest.raises(PlanError, match=rf"got 2 keys .* sequence {sequences[1]}; allowed 3"):
        HybridStepPlanner(decode(), half.replay).plan(meta, SHAPE)
    half.pool.free(sequences)  # no plan holds them


def test_refusals_name_what_was_seen(half):
    sequences = half.start([5, 3])
    prefill = stand_ins.BatchPrefillWithPagedKVCacheWrapper(EMPTY)
    with pytest.raises(UnsupportedError, match="attention_wrapper: got Linear"):
        HybridStepPlanner(torch.nn.Linear(1, 1), half.replay)
    with pytest.raises(UnsupportedError, match="replay_wrapper: got StatePool"):
        HybridStepPlanner(prefill, half.pool)
    old = half.kv.step(sequences[:1], 2)
    half.kv.abort(old)
    padded = half.kv.step(sequences[1:], 2)
    planner = HybridStepPlanner(decode(), half.replay)
    with pytest.raises(PlanError, match=r"step 1 .* hold step 2"):
        planner.plan(old, SHAPE)
    with pytest.raises(UnsupportedError, match="parents: got draft trees"):
        planner.plan(padded, SHAPE, parents=[[-1, 0]])
    with pytest.raises(InputError, match="got a padded step for a ReplayPrefillWrapper"):
        HybridStepPlanner(prefill, half.prefill).plan(padded, SHAPE)
    with pytest.raises(UnsupportedError, match="window_left: got 8 for BatchAttention"):
        HybridStepPlanner(stand_ins.BatchAttention(device="cpu"), half.replay).plan(
            padded, AttentionShape(HEADS, KV_HEADS, DIM, window_left=8)
        )
    packed = half.kv.step(sequences[:1], 4, packed=True)
    with pytest.raises(InputError, match="got a packed step for a ReplayDecodeWrapper"):
        HybridStepPlanner(prefill, half.replay).plan(packed, SHAPE)
    with pytest.raises(InputError, match=r"windows \[4\] for a decode wrapper"):
        HybridStepPlanner(decode(), half.prefill).plan(packed, SHAPE)
    with pytest.raises(InputError, match="force_fold: got True, direct None for a prefill"):
        HybridStepPlanner(prefill, half.prefill).plan(packed, SHAPE, force_fold=True)
    half.kv.abort(packed)
    wide = half.kv.step(sequences[:1], 3, packed=True, bucket=2)
    with pytest.raises(InputError, match="got 1 sequences in a bucket of 2 for a prefill"):
        HybridStepPlanner(prefill, half.prefill).plan(wide, SHAPE)


def test_options_of_the_replay_plan_reach_it(half):
    planner = HybridStepPlanner(decode(), half.replay)
    sequences = half.start([5, 3])
    half.finish_plain(planner, sequences)
    meta = half.kv.step(sequences, 1)
    plan = planner.plan(meta, SHAPE, force_fold=[True, False])
    assert (plan.forced, plan.fold.tolist(), plan.direct) == (1, [True, False], False)
    half.write(meta)
    half.finish(meta)
    meta = half.kv.step(sequences, 1)
    assert planner.plan(meta, SHAPE, direct=True).direct


def test_a_fork_in_both_pools_goes_on_from_the_same_tokens(half, rng):
    theirs, parent = decode(), half.start([6])[0]
    planner = HybridStepPlanner(theirs, half.replay)
    children = half.pool.fork(parent, 2)
    half.kv.fork(parent, children)
    sequences = [parent, *children]
    meta = half.kv.step(sequences, 1)
    planner.plan(meta, SHAPE)
    # One token for all three: what they see is the same, wherever it lies.
    k, v, q = (torch.randn((1, h, DIM), generator=rng) for h in (KV_HEADS, KV_HEADS, HEADS))
    half.kv.append(1, k.expand(3, -1, -1), v.expand(3, -1, -1), meta)
    y = theirs.run(q.expand(3, -1, -1).contiguous(), half.kv.cache(1))
    # The batched kernel sums each row in its own order at most.
    torch.testing.assert_close(y[1:], y[:1].expand(2, -1, -1), rtol=0, atol=1e-6)
    half.finish(meta)
    half.pool.free(sequences)
    half.kv.free(sequences)
    assert half.kv.pages_in_use() == 0


def test_importing_the_package_imports_no_flashinfer():
    code = (
        "import sys, replayinfer.integrations.flashinfer as f; [getattr(f, n) for n in f.__all__];"
        "assert 'flashinfer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.prefix)


# Their signatures -------------------------------------------------------------------------------

SOURCES = {
    "BatchDecodeWithPagedKVCacheWrapper": ("decode.py", ("__init__", "plan", "_plan_impl", "run")),
    "BatchPrefillWithPagedKVCacheWrapper": ("prefill.py", ("__init__", "plan", "run")),
    "BatchAttention": ("attention/_core.py", ("__init__", "plan", "run")),
}


def source_of(file: str) -> Path:
    found = importlib.util.find_spec("flashinfer")  # finds it without importing it
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    pytest.skip(f"flashinfer's {file} is not installed")


def parameters(function: ast.FunctionDef) -> list[tuple[str, str]]:
    a = function.args
    kinds = [(p.arg, "either") for p in a.posonlyargs + a.args]
    kinds += [(a.vararg.arg, "args")] if a.vararg else []
    kinds += [(p.arg, "keyword") for p in a.kwonlyargs]
    return kinds + ([(a.kwarg.arg, "kwargs")] if a.kwarg else [])


def methods(tree: ast.AST, name: str) -> dict[str, ast.FunctionDef]:
    (cls,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    # The last definition counts: the ones before are overloads.
    return {m.name: m for m in cls.body if isinstance(m, ast.FunctionDef)}


@pytest.mark.parametrize("name", SOURCES)
def test_stand_ins_have_their_signatures(name):
    file, checked = SOURCES[name]
    theirs = methods(ast.parse(source_of(file).read_text(encoding="utf-8")), name)
    ours = methods(ast.parse(inspect.getsource(stand_ins)), name)
    for method in checked:
        assert parameters(ours[method]) == parameters(theirs[method]), method


def test_our_wrapper_takes_names_of_theirs():
    ours = inspect.signature(PagedAttentionWrapper.plan).parameters
    theirs = inspect.signature(stand_ins.BatchPrefillWithPagedKVCacheWrapper.plan).parameters
    assert set(ours) - {"options"} <= set(theirs)
    assert list(ours)[:9] == list(theirs)[:9]
    built = set(inspect.signature(PagedAttentionWrapper).parameters)
    peer = inspect.signature(stand_ins.BatchPrefillWithPagedKVCacheWrapper).parameters
    assert built - {"kernel"} <= set(peer)
