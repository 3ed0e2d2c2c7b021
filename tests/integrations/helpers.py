"""Comparing a replayed run with the model's own."""

from __future__ import annotations

import functools

import torch

LOGITS_ATOL = 2e-4  # two float32 programs; logits have a standard deviation of 2


def generate(model, prompts, tokens=20, **options):
    """``model.generate`` over a left-padded batch: sequences, and logits where they are kept."""
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip


def own_tokens(model, prompt, tokens=20):
    """Greedy tokens of one prompt by the model's own cache."""
    return list(_own_tokens(model, tuple(prompt), tokens))


@functools.cache
def _own_tokens(model, prompt, tokens):
    return generate(model, [prompt], tokens).sequences[0, len(prompt) :].tolist()


def assert_same(replayed, own):
    assert torch.equal(replayed.sequences, own.sequences)
    for mine, theirs in zip(replayed.logits, own.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=LOGITS_ATOL)
