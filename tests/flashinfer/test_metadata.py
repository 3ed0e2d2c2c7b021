"""The arrays of a step: values by a loop over tokens, addresses, leftovers, refusals."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest

from replayinfer import InputError
from replayinfer.integrations.flashinfer import MetadataBuffers

PAD = 77


def make(bucket=5, rows=20, indices=60, page_size=4):
    return MetadataBuffers(bucket, rows=rows, indices=indices, page_size=page_size, pad_page=PAD)


def expected(lengths, windows, tables, bucket, window, packed, page_size):
    """One token after the other."""
    qo, kv, ids, last, kv_len = [0], [0], [], [], []
    page, offset, live, positions = [], [], [], []
    for r in range(bucket):
        real = r < len(lengths)
        queries = (windows[r] if real else 0) if packed else window
        keys = queries + (lengths[r] if real else 0)
        pages = (keys + page_size - 1) // page_size
        qo.append(qo[-1] + queries)
        kv.append(kv[-1] + pages)
        kv_len.append(keys)
        ids += [tables[r][i] if real else PAD for i in range(pages)]
        last.append((keys - 1) % page_size + 1 if keys else 1)
        for t in range(queries):
            token = lengths[r] + t if real else 0
            page.append(tables[r][token // page_size] if real else PAD)
            offset.append(token % page_size)
            live.append(int(real and t < windows[r]))
            positions.append(token)
    return {
        "qo_indptr": qo, "kv_indptr": kv, "kv_indices": ids, "last_page_len": last,
        "kv_len": kv_len, "token_page": page, "token_offset": offset, "token_live": live,
        "positions": positions,
    }  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
def test_arrays_say_what_a_loop_says(packed, seed):
    draw, buffers = np.random.default_rng(seed), make()
    addresses = {}
    for _ in range(20):  # the same buffers, larger and smaller batches by turns
        batch = int(draw.integers(0, 6))
        lengths = draw.integers(0, 30, batch).tolist()
        windows = draw.integers(0, 5, batch).tolist()
        tables = draw.integers(0, 70, (batch, 9)).tolist()
        meta = buffers.fill(
            list(range(10, 10 + batch)), lengths=lengths, windows=windows, tables=tables,
            window=4, packed=packed,
        )  # fmt: skip
        wanted = expected(lengths, windows, tables, 5, 4, packed, 4)
        for name, values in wanted.items():
            assert getattr(meta.device, name).tolist() == values, name
            assert getattr(meta.host, name).tolist() == values, name
        for name in wanted:
            array = getattr(meta.device, name)
            if array.numel():  # an empty view has no address
                assert addresses.setdefault(name, array.data_ptr()) == array.data_ptr()
        assert (meta.batch, meta.bucket, meta.window) == (batch, 5, 4)
        assert meta.rows == wanted["qo_indptr"][-1]


def test_graph_buffers_are_the_device_arrays():
    buffers = make()
    meta = buffers.fill([3], lengths=[2], tables=[[1, 2]], windows=[1])
    assert meta.device.kv_indptr.data_ptr() == (
        buffers.decode_buffers()["paged_kv_indptr_buffer"].data_ptr()
    )
    sizes = {name: buffer.numel() for name, buffer in buffers.prefill_buffers().items()}
    assert sizes == {
        "qo_indptr_buf": 6, "paged_kv_indptr_buf": 6, "paged_kv_indices_buf": 60,
        "paged_kv_last_page_len_buf": 5,
    }  # fmt: skip
    assert {buffer.data_ptr() % 16 for buffer in buffers.prefill_buffers().values()} == {0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sequences": [1, 1]}, "2 handles, 1 of them distinct"),
        ({"sequences": range(6)}, "6 handles"),
        ({"lengths": [1.5, 2.0]}, "lengths: got float64"),
        ({"lengths": [1, 2, 3]}, r"lengths: got \[3\]; allowed \[2\]"),
        ({"windows": [5, 0]}, r"windows: got \[5, 0\]"),
        ({"lengths": [-1, 0]}, r"after lengths \[-1, 0\]"),
        ({"lengths": [16, 0]}, "got 4 pages a sequence .* allowed at least 5"),
        ({"tables": [[0, -1, 2, 3], [0, 0, 0, 0]], "lengths": [6, 0]}, "got page -1 of sequence 1"),
    ],
)
def test_what_is_wrong_is_refused_and_writes_nothing(given, message):
    buffers = make()
    base = {
        "sequences": [1, 2], "lengths": [3, 2], "windows": [2, 1], "window": 4,
        "tables": [[0, 1, 2, 3], [4, 5, 6, 7]],
    }  # fmt: skip
    meta = buffers.fill(**base)
    before = {n: getattr(meta.device, n).tolist() for n in ("kv_indptr", "kv_indices", "kv_len")}
    with pytest.raises(InputError, match=message):
        buffers.fill(**(base | given))
    assert meta.is_current
    assert {n: getattr(meta.device, n).tolist() for n in before} == before


def test_too_many_page_ids_are_refused():
    with pytest.raises(InputError, match=r"11 page ids; allowed .* 10 ids"):
        make(bucket=1, rows=4, indices=10).fill([1], lengths=[40], tables=[list(range(11))])


@pytest.mark.parametrize("name", ["metadata", "kv", "attention"])
def test_examples(name):
    module = importlib.import_module(f"replayinfer.integrations.flashinfer.{name}")
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0
