"""The attention cache with a length per sequence, by itself."""

from __future__ import annotations

import pytest
import torch

from replayinfer import InputError
from replayinfer.integrations.transformers.kv import SlotLayer, SlotTable

HEADS, DIM = 2, 3


@pytest.fixture
def table():
    table = SlotTable(3, torch.device("cpu"))
    SlotLayer(table, 3)
    SlotLayer(table, 3)
    return table


def add(table, sequences, tokens, rng):
    """One forward; returns what each layer was given and what it gave back."""
    table.begin(sequences, tokens)
    exchanged = []
    for layer in table.layers:
        new = torch.randn((2, len(sequences), HEADS, tokens, DIM), generator=rng)
        exchanged.append((new, layer.update(new[0], new[1])))
    table.advance(sequences, tokens)
    return exchanged


def test_each_row_is_written_at_its_own_length(table, rng):
    table.open(10)
    table.open(20)
    first = add(table, [10], 5, rng)
    second = add(table, [20], 2, rng)
    both = add(table, [20, 10], 1, rng)
    mask = table.mask(torch.float32)
    assert mask.shape == (2, 1, 1, 6)
    assert (mask == 0).sum(-1).flatten().tolist() == [3, 6]
    for (a, _), (b, _), (c, (keys, values)) in zip(first, second, both, strict=True):
        assert torch.equal(keys[0, :, :3], torch.cat([b[0, 0], c[0, 0]], 1))
        assert torch.equal(keys[1], torch.cat([a[0, 0], c[0, 1]], 1))
        assert torch.equal(values[1], torch.cat([a[1, 0], c[1, 1]], 1))


def test_a_mask_of_several_tokens_is_causal(table, rng):
    table.open(1)
    add(table, [1], 2, rng)
    table.begin([1], 3)
    assert (table.mask(torch.float32)[0, 0] == 0).int().tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_growth_keeps_what_was_there(table, rng):
    table.open(1)
    kept = [new[0, 0] for new, _ in add(table, [1], 60, rng)]
    (first, _), (second, _) = table.layers[0].read(0, 60), table.layers[1].read(0, 60)
    add(table, [1], 300, rng)
    for layer, old, was in zip(table.layers, (first, second), kept, strict=True):
        assert torch.equal(layer.read(0, 60)[0], old)
        assert torch.equal(old, was)


def test_copy_read_and_write(table, rng):
    table.open(1)
    add(table, [1], 4, rng)
    table.copy(1, 2)
    data = table.read(2)
    table.close(1)
    table.close(2)
    table.open(3, length=4)
    table.write(3, data)
    for (keys, values), (k, v) in zip(table.read(3), data, strict=True):
        assert torch.equal(keys, k)
        assert torch.equal(values, v)


def test_a_closed_slot_is_zero(table, rng):
    table.open(1)
    add(table, [1], 4, rng)
    table.close(1)
    for layer in table.layers:
        assert not layer.keys.any()
        assert not layer.values.any()


def test_a_forward_that_never_advanced_is_written_over(table, rng):
    table.open(1)
    add(table, [1], 2, rng)
    table.begin([1], 1)
    table.layers[0].update(*torch.full((2, 1, HEADS, 1, DIM), 9.0))
    assert table.length(1) == 2
    (new, (keys, _)), _ = add(table, [1], 1, rng)
    assert torch.equal(keys[0, :, 2], new[0, 0, :, 0])


def test_another_batch_than_was_announced_is_refused(table):
    table.open(1)
    table.begin([1], 1)
    with pytest.raises(InputError, match="got a batch of 2; allowed 1"):
        table.layers[0].update(*torch.zeros((2, 2, HEADS, 1, DIM)))
