"""Hybrid steps on a GPU: with torch's attention anywhere, with FlashInfer's where it is installed.

FlashInfer compiles a module for each backend, type and head size at its first use: the decode and
prefill wrappers here share one (fa2, fp16, 64), and ``BatchAttention`` has one of its own.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from replayinfer import Mamba2Spec, ReplayDecodeWrapper, ReplayPrefillWrapper, StatePool
from replayinfer.integrations.flashinfer import (
    AttentionShape,
    HybridStepPlanner,
    KVPagePool,
    PagedAttentionWrapper,
)

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGE, BUCKET, WINDOW = 8, 2, 64, 16, 4, 3
SHAPE = AttentionShape(HEADS, KV_HEADS, DIM, torch.float16, torch.float16)
# Weights and outputs are rounded to fp16 (2^-11), values are of size 1 to 4.
ATOL = 4e-3


def workspace():
    return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")


class Half:
    """A recurrent layer and an attention layer on the GPU."""

    def __init__(self, rng, planner="host", kv_layout="NHD"):
        spec = Mamba2Spec(heads=4, dim=32, state=64, groups=1, conv_width=0)
        self.pool = StatePool(
            spec, [0], max_sequences=8, capacity=8, max_window=WINDOW, planner=planner,
            device="cuda",
        )  # fmt: skip
        self.pool.bind(
            0, A=-torch.rand(4).cuda(), D=torch.ones(4).cuda(), dt_bias=torch.zeros(4).cuda()
        )
        self.replay = ReplayDecodeWrapper(self.pool, direct="never")
        self.prefill = ReplayPrefillWrapper(self.pool, backend="torch")
        self.kv = KVPagePool(
            [1], pages=64, page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, max_tokens=256,
            dtype=torch.float16, device="cuda", kv_layout=kv_layout,
        )  # fmt: skip
        self.kv.storage[:, : self.kv.pad_page] = float("nan")  # what others left
        self.rng = rng

    def draw(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.rng).to("cuda", dtype)

    def inputs(self, *lead):
        return {
            "x": self.draw(*lead, 4, 32), "dt": self.draw(*lead, 4),
            "B": self.draw(*lead, 1, 64), "C": self.draw(*lead, 1, 64),
        }  # fmt: skip

    def write(self, meta):
        k, v = self.draw(2, meta.rows, KV_HEADS, DIM, dtype=torch.float16)
        self.kv.append(1, k, v, meta)

    def start(self, lengths, attention):
        sequences = self.pool.alloc(len(lengths))
        self.kv.open(sequences)
        meta = self.kv.step(sequences, lengths, packed=True)
        HybridStepPlanner(attention, self.prefill).plan(meta, SHAPE)
        self.prefill.run(0, **self.inputs(meta.rows))
        self.write(meta)
        self.prefill.commit()
        self.kv.commit(meta)
        return sequences

    def expected(self, meta, q):
        """By gathering on the CPU."""
        ours = PagedAttentionWrapper(torch.empty(0), self.kv.kv_layout, backend="torch")
        at = meta.host
        ours.plan(
            at.qo_indptr, at.kv_indptr, at.kv_indices, at.last_page_len,
            HEADS, KV_HEADS, DIM, PAGE, causal=True,
            q_data_type=torch.float32, kv_data_type=torch.float16,
        )  # fmt: skip
        return ours.run(q.cpu().float(), self.kv.cache(1).cpu()).cuda()

    def finish(self, meta, accepted):
        self.replay.fold()
        self.replay.run(0, **self.inputs(meta.bucket, meta.window))
        counts = torch.tensor(accepted, dtype=torch.int32, device="cuda")
        self.replay.commit(accepted if self.pool.on_device is None else counts)
        self.kv.commit(meta, accepted)


def make(name, half):
    if name == "torch":
        return PagedAttentionWrapper(workspace(), half.kv.kv_layout, backend="torch")
    peer = pytest.importorskip("flashinfer")
    layout, buffers = half.kv.kv_layout, half.kv.buffers(BUCKET, WINDOW)
    return {
        "ours": lambda: PagedAttentionWrapper(
            workspace(), layout, backend="flashinfer", kernel="fa2"
        ),
        "decode": lambda: peer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), layout, use_tensor_cores=True, backend="fa2"
        ),
        "graph decode": lambda: peer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), layout, use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
            **buffers.decode_buffers(),
        ),
        "graph prefill": lambda: peer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(), layout, use_cuda_graph=True, backend="fa2", **buffers.prefill_buffers()
        ),
        "holistic": lambda: peer.BatchAttention(layout, "cuda"),
    }[name]()  # fmt: skip


@pytest.mark.parametrize(
    ("name", "planner", "kv_layout"),
    [
        ("torch", "host", "HND"),
        ("ours", "host", "NHD"),
        ("decode", "device", "NHD"),
        ("graph decode", "host", "HND"),
        ("graph prefill", "device", "NHD"),
        ("holistic", "host", "NHD"),
    ],
)
def test_windows_of_a_padded_batch(name, planner, kv_layout, rng):
    half = Half(rng, planner, kv_layout)
    attention = make(name, half)
    fill = PagedAttentionWrapper(workspace(), kv_layout, backend="torch")
    sequences = half.start([5, 40, 17], fill)
    held = None
    for accepted in ([3, 1, 0], [1, 1, 2], [2, 0, 1]):
        windows = [3, 1, 2]
        meta = half.kv.step(sequences, windows, bucket=BUCKET, window=WINDOW)
        HybridStepPlanner(attention, half.replay).plan(meta, SHAPE)
        half.write(meta)
        q = half.draw(meta.rows, HEADS, DIM, dtype=torch.float16)
        y = attention.run(q, half.kv.cache(1))
        y = y[0] if name == "holistic" else y
        live = meta.device.token_live.bool()
        expected = half.expected(meta, q)
        torch.testing.assert_close(y[live].float(), expected[live], rtol=0, atol=ATOL)
        assert not y[3 * WINDOW :].any()  # the pad attends to zeros
        found = [t.data_ptr() for t in (meta.device.kv_indptr, meta.device.kv_indices)]
        assert held in (None, found)
        held = found
        half.finish(meta, accepted)
        assert [half.pool.tokens(s) for s in sequences] == [half.kv.length(s) for s in sequences]


@pytest.mark.parametrize("name", ["torch", "ours"])
def test_a_packed_prefill(name, rng):
    half = Half(rng)
    attention = make(name, half)
    sequences = half.start([5, 40, 17], attention)
    meta = half.kv.step(sequences, [33, 1, 20], packed=True)
    HybridStepPlanner(attention, half.prefill).plan(meta, SHAPE)
    half.write(meta)
    q = half.draw(meta.rows, HEADS, DIM, dtype=torch.float16)
    y = attention.run(q, half.kv.cache(1))
    torch.testing.assert_close(y.float(), half.expected(meta, q), rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_a_captured_attention_follows_the_plan(name, rng):
    """Keys are appended and attended to in a graph; each plan moves them."""
    if name == "flashinfer":
        pytest.importorskip("flashinfer")
    half = Half(rng)
    attention = PagedAttentionWrapper(
        workspace(), use_cuda_graph=True, backend=name, kernel="fa2",
        **half.kv.buffers(BUCKET, WINDOW).prefill_buffers(),
    )  # fmt: skip
    fill = PagedAttentionWrapper(workspace(), backend="torch")
    sequences = half.start([5, 40, 17], fill)
    planner = HybridStepPlanner(attention, half.replay)
    q = half.draw(BUCKET * WINDOW, HEADS, DIM, dtype=torch.float16)
    k, v = half.draw(2, BUCKET * WINDOW, KV_HEADS, DIM, dtype=torch.float16)
    out, graph = torch.empty_like(q), None
    for count in (3, 1, 2):
        meta = half.kv.step(sequences[:count], WINDOW, bucket=BUCKET)
        planner.plan(meta, SHAPE)
        if graph is None:
            half.kv.append(1, k, v, meta)
            attention.run(q, half.kv.cache(1), out=out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                half.kv.append(1, k, v, meta)
                attention.run(q, half.kv.cache(1), out=out)
        for fresh in (q, k, v):
            fresh.normal_()
        out.fill_(float("nan"))
        graph.replay()
        live = meta.device.token_live.bool()
        expected = half.expected(meta, q)
        torch.testing.assert_close(out[live].float(), expected[live], rtol=0, atol=ATOL)
        assert not out[count * WINDOW :].any()
        half.finish(meta, [WINDOW] * count)


def test_our_part_of_a_step_waits_for_nothing(rng):
    half = Half(rng)
    fill = PagedAttentionWrapper(workspace(), backend="torch")
    sequences = half.start([5, 40, 17], fill)
    half.kv.abort(half.kv.step(sequences, 1, bucket=BUCKET))  # buffers are made at the first
    k, v = half.draw(2, BUCKET, KV_HEADS, DIM, dtype=torch.float16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            meta = half.kv.step(sequences, 1, bucket=BUCKET)
            half.kv.append(1, k, v, meta)
            meta.mark_read()
            half.kv.commit(meta)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_the_engine_of_the_docs(attention, capsys):
    pytest.importorskip("transformers")
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    path = Path(__file__).parents[2] / "docs" / "examples" / "hybrid_engine.py"
    spec = importlib.util.spec_from_file_location("hybrid_engine_on_gpu", path)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    code = example.main(["--device", "cuda", "--attention", attention, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["attention"], result["recurrence"]) == (attention, "triton")
    assert result["tokens"] == result["tokens_equal"] == 104
    assert (code, result["pages_leaked"]) == (0, 0)
    assert result["engine"]["graph_replays"] > 20
