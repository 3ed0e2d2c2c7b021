"""`ReplayCache` under the model's own ``generate`` and ``forward``."""

from __future__ import annotations

import pytest
import torch

from replayinfer import CapacityError, InputError
from replayinfer.integrations.transformers import ReplayCache

from .helpers import LOGITS_ATOL, assert_same, generate


@pytest.mark.parametrize("capacity", [1, 3, 16])
def test_generate_alone(model, prompts, capacity):
    cache = ReplayCache.from_model(model, capacity=capacity)
    replayed = generate(model, prompts[:1], past_key_values=cache)
    assert_same(replayed, generate(model, prompts[:1]))
    assert cache.counters.steps == 19  # the prefill gives the first token
    assert cache.counters.folds == (19 - 1) // capacity


def test_generate_a_padded_batch(model, prompts):
    cache = ReplayCache.from_model(model)
    replayed = generate(model, prompts, past_key_values=cache)
    assert_same(replayed, generate(model, prompts))
    assert cache.pool.pages_in_use()["sequence slots"] == len(prompts)


@pytest.mark.parametrize("index", [2, 3])
def test_a_prompt_shorter_than_the_convolution(model, prompts, index):
    replayed = generate(model, prompts[index:][:1], past_key_values=ReplayCache.from_model(model))
    assert_same(replayed, generate(model, prompts[index:][:1]))


def test_a_prompt_of_one_token_is_a_prefill(model):
    cache = ReplayCache.from_model(model)
    replayed = generate(model, [[65]], tokens=5, past_key_values=cache)
    assert_same(replayed, generate(model, [[65]], tokens=5))
    assert cache.counters.steps == 4


def test_beams_fork_and_free(model, prompts):
    cache = ReplayCache.from_model(model, capacity=4)
    options = {"num_beams": 3, "tokens": 12}
    replayed = generate(model, prompts[:2], past_key_values=cache, **options)
    assert torch.equal(replayed.sequences, generate(model, prompts[:2], **options).sequences)
    assert cache.pool.pages_in_use()["sequence slots"] == 6


@pytest.mark.parametrize("more", [1, 7])
def test_the_next_turn_of_a_conversation(model, prompts, more):
    from transformers import DynamicCache

    results = []
    for cache in (ReplayCache.from_model(model), DynamicCache(config=model.config)):
        first = generate(model, prompts[:1], tokens=9, past_key_values=cache)
        text = first.sequences[0].tolist() + prompts[1][:more]
        results.append(generate(model, [text], tokens=9, past_key_values=cache))
    assert_same(*results)


def test_a_prefill_in_chunks(model, prompts):
    ids = torch.tensor(prompts[:1])
    whole = model(ids).logits
    cache = ReplayCache.from_model(model)
    with torch.no_grad():
        parts = [
            model(chunk, past_key_values=cache, use_cache=True).logits
            for chunk in ids.split([2, 20, 1, ids.shape[1] - 23], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=LOGITS_ATOL)
    assert cache.pool.tokens(cache.driver.sequences[0]) == ids.shape[1]


def test_gradients_in_the_prompt_stay_out_of_the_pool(model, prompts):
    cache = ReplayCache.from_model(model)
    out = model(torch.tensor(prompts[:1]), past_key_values=cache, use_cache=True)
    token = out.logits[:, -1:].argmax(-1)
    model(token, past_key_values=cache, use_cache=True)
    assert cache.counters.steps == 1


def test_reset_and_use_again(model, prompts):
    cache = ReplayCache.from_model(model)
    generate(model, prompts[:1], tokens=4, past_key_values=cache)
    cache.reset()
    assert not any(cache.pool.pages_in_use().values())
    assert cache.get_seq_length() == 0
    replayed = generate(model, prompts[1:2], tokens=4, past_key_values=cache)
    assert_same(replayed, generate(model, prompts[1:2], tokens=4))


def test_select_and_repeat_rows(model, prompts):
    ids = torch.tensor([p[:24] for p in prompts[:2]])
    cache = ReplayCache.from_model(model, batch=4)
    with torch.no_grad():
        out = model(ids, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        cache._select([1, 1, 0])
        assert cache.pool.pages_in_use()["sequence slots"] == 3
        cache._select([2])
        assert cache.pool.pages_in_use()["sequence slots"] == 1
        with pytest.raises(InputError, match="batch: got 5 rows; allowed 4"):
            cache._select([0] * 5)


def test_another_batch_than_the_cache_began_with_is_refused(model, prompts):
    cache = ReplayCache.from_model(model)
    ids = torch.tensor([p[:24] for p in prompts[:2]])
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        with pytest.raises(InputError, match="input_ids: got a batch of 1; allowed 2"):
            model(ids[:1], past_key_values=cache, use_cache=True)


def test_more_rows_than_the_pool_was_made_for_are_refused(model, prompts):
    cache = ReplayCache.from_model(model, batch=1)
    with pytest.raises(CapacityError, match="sequence slots"):
        generate(model, prompts[:2], tokens=2, past_key_values=cache)


def test_no_step_can_be_traced(model):
    assert not ReplayCache.from_model(model).is_compileable


def test_a_sixteen_bit_model(model, prompts):
    import copy

    half = copy.deepcopy(model).to(torch.bfloat16)
    own = generate(half, prompts[:1], tokens=1).logits[0]
    cache = ReplayCache.from_model(half)
    assert cache.pool.dtype is torch.bfloat16
    replayed = generate(half, prompts[:1], tokens=6, past_key_values=cache)
    assert torch.equal(replayed.logits[0], own)  # the prefill is the model's own
    # Teacher-forced, against one pass over the text: within twice what the peer's decode is off.
    follow = replayed.sequences
    wide, narrow = ({}, {"past_key_values": ReplayCache.from_model(half)})
    errors = []
    exact = model(follow).logits.detach()[0, -6:-1].float()
    for options in (wide, narrow):
        logits = _forced(half, follow, follow.shape[1] - 6, **options)
        errors.append(float((logits - exact).abs().max()))
    assert errors[1] <= 2 * errors[0], errors


@torch.no_grad()
def _forced(model, ids, start, past_key_values=None):
    from transformers import DynamicCache

    cache = past_key_values or DynamicCache(config=model.config)
    rows = [model(ids[:, :start], past_key_values=cache, use_cache=True).logits[0, -1:]]
    for place in range(start, ids.shape[1] - 1):
        token = ids[:, place : place + 1]
        rows.append(model(token, past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(rows)[-5:].float()
