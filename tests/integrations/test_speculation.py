"""Drafts through the adapter: windows that are verified, accepted in part, and cropped."""

from __future__ import annotations

import pytest
import torch

from replayinfer import (
    Draft,
    InputError,
    NGramDrafter,
    PlanError,
    SpeculativeSession,
    UnsupportedError,
)
from replayinfer.demo.configs import MODELS
from replayinfer.integrations.transformers import (
    CroppingDrafter,
    ModelDrafter,
    ReplayCache,
    ReplayEngine,
    assisted_decoding,
    assisted_generate,
)

from .helpers import LOGITS_ATOL, generate, own_tokens

TOKENS, DRAFTS = 20, 4


class Sayer:
    """Drafts what `texts` say comes next; every second draft is wrong somewhere."""

    def __init__(self, texts, rng, *, trees=False):
        self.texts, self.rng, self.trees = texts, rng, trees
        self.of = {}  # sequence -> index of its text
        self.asked = 0

    def __call__(self, contexts):
        return {s: self._draft(self.texts[self.of.get(s, 0)], len(t)) for s, t in contexts.items()}

    def _draft(self, text, length):
        tokens = list(text[length : length + DRAFTS])
        if self.trees:  # a wrong sibling before each right node
            parents = [p for i in range(2) for p in (2 * i - 1, 2 * i - 1)]
            nodes = [t for token in tokens[:2] for t in ((token + 7) % 256, token)]
            return Draft(tuple(nodes), tuple(parents[: len(nodes)]))
        self.asked += 1
        if self.asked % 2 and tokens:
            place = int(torch.randint(0, len(tokens), (), generator=self.rng))
            tokens[place] = (tokens[place] + 1) % 256
        return Draft(tuple(tokens))


def ids(prompt):
    return torch.tensor([prompt])


def sayer(model, prompts, rng, **options):
    return Sayer([[*p, *own_tokens(model, p, TOKENS)] for p in prompts], rng, **options)


def both_kinds(counters):
    return 0 < counters.accepted < counters.drafts


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_in_a_session(models, prompts, name, trees, rng):
    """Prompts of different lengths, accepted counts of their own, and folds between."""
    model = models[name]
    engine = ReplayEngine(model, max_sequences=2, max_window=1 + DRAFTS, capacity=7)
    drafter = sayer(model, prompts[:2], rng, trees=trees)
    session = SpeculativeSession(engine, drafter)
    for index, prompt in enumerate(prompts[:2]):
        sequence, logits = engine.prefill(prompt)
        drafter.of[sequence] = index
        session.add(sequence, [*prompt, int(logits.argmax())])
    left = dict(drafter.of)
    while left:
        session.step(list(left))
        for sequence, index in list(left.items()):
            if len(session.text(sequence)) >= len(drafter.texts[index]):
                want = drafter.texts[index]
                assert session.text(sequence)[: len(want)] == want
                engine.free([sequence])
                del left[sequence]
    assert both_kinds(session.counters)
    assert engine.counters.folds > 0
    assert engine.counters.rows_rejected > 0
    assert not any(engine.pool.pages_in_use().values())


def test_a_window_gives_the_logits_of_single_steps(model, prompts):
    own = own_tokens(model, prompts[0], 6)
    engine = ReplayEngine(model, max_sequences=3, max_window=6)
    (a, _), (b, _), (c, _) = (engine.prefill(p) for p in (prompts[0], prompts[0], prompts[1]))
    logits = engine.verify([c, a], [[1], own])
    engine.accept([[0], range(6)])
    for place, token in enumerate(own):
        row = engine.step([b], [token])[0]
        torch.testing.assert_close(logits[1, place], row, rtol=0, atol=LOGITS_ATOL)
    assert engine.tokens(a) == engine.tokens(b) == len(prompts[0]) + 6


def test_nothing_of_an_aborted_window_stays(model, prompts):
    engine = ReplayEngine(model, max_sequences=2, max_window=4)
    (a, _), (b, _) = engine.prefill(prompts[0]), engine.prefill(prompts[0])
    engine.verify([a], [[1, 2, 3]])
    engine.abort()
    assert engine.tokens(a) == engine.tokens(b)
    rows = engine.step([a, b], [7, 7])
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=LOGITS_ATOL)
    # Keys of rejected drafts are past the length, and are gone with the sequence.
    engine.verify([a], [[1, 2, 3, 4]])
    engine.accept([[0]])
    engine.free([a, b])
    for layer in engine._table.layers:
        assert layer.keys is None or not layer.keys.any()


def test_what_an_engine_refuses(model, prompts):
    engine = ReplayEngine(model, max_sequences=2, max_window=3)
    a, _ = engine.prefill(prompts[0])
    for call in (lambda: engine.accept([[0]]), engine.abort):
        with pytest.raises(PlanError, match="got no step; allowed after verify"):
            call()
    with pytest.raises(InputError, match=r"windows: got \[0\] tokens"):
        engine.verify([a], [[]])
    with pytest.raises(InputError, match="windows: got 4; allowed"):
        engine.verify([a], [[1, 2, 3, 4]])
    with pytest.raises(InputError, match="token_ids: got 256"):
        engine.verify([a], [[1, 256]])
    engine.verify([a], [[1, 2]])
    for call in (
        lambda: engine.step([a], [1]),
        lambda: engine.prefill([1]),
        lambda: engine.verify([a], [[1]]),
        lambda: engine.fork(a),
        lambda: engine.free([a]),
    ):
        with pytest.raises(PlanError, match="allowed after accept or abort"):
            call()
    with pytest.raises(InputError, match=r"paths: got \[1\] for a chain"):
        engine.accept([[1]])
    engine.accept([[0, 1]])
    assert engine.tokens(a) == len(prompts[0]) + 2


@pytest.mark.parametrize("name", MODELS)
def test_assisted_generation_gives_greedy_tokens(models, prompts, name):
    """A small model of another kind drafts."""
    model, small = models[name], models["bamba" if name != "bamba" else "qwen3_5"]
    cache = ReplayCache.from_model(model, drafts=3, capacity=6)
    out = assisted_generate(
        model, ids(prompts[0]), assistant_model=small, drafts=3, cache=cache, do_sample=False,
        max_new_tokens=TOKENS, pad_token_id=0,
    )  # fmt: skip
    assert out[0, len(prompts[0]) :].tolist() == own_tokens(model, prompts[0], TOKENS)
    assert cache.speculation.drafts > 0
    assert cache.pool.tokens(cache.driver.sequences[0]) == out.shape[1] - 1


def test_right_and_wrong_drafts_give_the_same_logits_too(model, prompts, rng):
    drafter = sayer(model, prompts[:1], rng)
    cache = ReplayCache.from_model(model, drafts=DRAFTS, capacity=6)
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    out = assisted_generate(
        model, ids(prompts[0]), drafter=drafter, drafts=DRAFTS, cache=cache, do_sample=False,
        max_new_tokens=TOKENS, pad_token_id=0, **options,
    )  # fmt: skip
    own = generate(model, prompts[:1], TOKENS)
    assert torch.equal(out.sequences, own.sequences)
    assert len(out.logits) == len(out.scores) == TOKENS
    for mine, theirs in zip(out.logits, own.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=LOGITS_ATOL)
    assert both_kinds(cache.speculation)
    assert cache.counters.folds > 0


def test_an_end_of_text_among_the_drafts_ends_it_there(model, prompts, rng):
    own = own_tokens(model, prompts[0], TOKENS)
    end = own[9]
    stop = own.index(end) + 1
    cache = ReplayCache.from_model(model, drafts=DRAFTS)
    right = Sayer([[*prompts[0], *own]], rng)
    right._draft = lambda text, length: Draft(tuple(text[length : length + DRAFTS]))
    out = assisted_generate(
        model, ids(prompts[0]), drafter=right, drafts=DRAFTS, cache=cache, do_sample=False,
        max_new_tokens=TOKENS, pad_token_id=0, eos_token_id=end,
    )  # fmt: skip
    assert out[0, len(prompts[0]) :].tolist() == own[:stop]
    assert cache.pool.tokens(cache.driver.sequences[0]) == out.shape[1] - 1
    # And the text goes on from there with the same cache.
    more = assisted_generate(
        model, out, drafter=NGramDrafter(2), drafts=2, cache=cache, do_sample=False,
        max_new_tokens=5, pad_token_id=0,
    )  # fmt: skip
    assert more[0, out.shape[1] :].tolist() == own_tokens(model, out[0].tolist(), 5)


def test_processors_see_the_text_before_each_draft(model, prompts, rng):
    """A penalty on what was said already, with drafts that are right under it."""
    options = {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2}
    own = generate(model, prompts[:1], TOKENS, **options).sequences[0].tolist()
    drafter = Sayer([own], rng)
    cache = ReplayCache.from_model(model, drafts=DRAFTS)
    out = assisted_generate(
        model, ids(prompts[0]), drafter=drafter, drafts=DRAFTS, cache=cache, do_sample=False,
        max_new_tokens=TOKENS, pad_token_id=0, **options,
    )  # fmt: skip
    assert out[0].tolist() == own
    assert both_kinds(cache.speculation)


def test_sampling_keeps_to_what_is_likely(models, prompts):
    """With two candidates left at each place, a sampled text never leaves them."""
    model = models["qwen3_next"]
    torch.manual_seed(0)
    cache = ReplayCache.from_model(model, drafts=3)
    out = assisted_generate(
        model, ids(prompts[0]), assistant_model=model, drafts=3, cache=cache, do_sample=True,
        top_k=2, max_new_tokens=TOKENS, pad_token_id=0,
    )  # fmt: skip
    logits = model(out).logits[0, len(prompts[0]) - 1 : -1]
    for token, row in zip(out[0, len(prompts[0]) :], logits, strict=True):
        assert token in row.topk(2).indices
    assert both_kinds(cache.speculation)  # the model drafts greedily for itself


def llama(hidden=32):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_an_assistant_of_the_peers_own_kind(models, prompts):
    model, small = models["qwen3_next"], llama()
    out = assisted_generate(
        model, ids(prompts[0]), assistant_model=small, drafts=3, do_sample=False,
        max_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    assert out[0, len(prompts[0]) :].tolist() == own_tokens(model, prompts[0], TOKENS)[:12]


def test_a_cropping_drafter_follows_the_text(prompts):
    small = llama()
    text = list(prompts[0])
    drafter = CroppingDrafter(small, 3)
    for grow in (0, 1, 3, 2):
        text += prompts[1][:grow] if grow else []
        if grow:
            want = small.generate(
                ids(text), max_new_tokens=3, do_sample=False, pad_token_id=0
            )[0, len(text) :].tolist()  # fmt: skip
            assert list(drafter({5: text})[5].tokens) == want
    with pytest.raises(InputError, match="contexts: got 2 texts"):
        drafter({0: text, 1: text})


def test_a_model_drafter_drafts_what_its_model_would_say(model, prompts):
    engine = ReplayEngine(model, max_sequences=4, max_window=3)
    drafter = ModelDrafter(engine, 4)
    texts = {11: list(prompts[0]), 12: list(prompts[1])}
    for grow in (0, 1, 5):
        for text in texts.values():
            text += prompts[2][:1] * grow
        drafts = drafter({s: tuple(t) for s, t in texts.items()})
        for s, text in texts.items():
            assert list(drafts[s].tokens) == own_tokens(model, text, 4)
    drafter.forget(11)
    drafter.forget(11)
    drafter.forget(12)
    assert not any(engine.pool.pages_in_use().values())


def test_the_peers_own_loop_refuses_and_its_hook_does_not(model, prompts):
    cache = ReplayCache.from_model(model, drafts=2)
    argument = {cache.driver.binding.cache_argument: cache}
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        model.generate(ids(prompts[0]), assistant_model=model, max_new_tokens=4, **argument)
    out = model.generate(
        ids(prompts[0]), custom_generate=assisted_decoding, drafter=NGramDrafter(2),
        max_new_tokens=4, do_sample=False, pad_token_id=0, **argument,
    )  # fmt: skip
    assert out[0, len(prompts[0]) :].tolist() == own_tokens(model, prompts[0], TOKENS)[:4]


@pytest.mark.parametrize("rows", [1, 2])
def test_crop_drops_what_the_last_window_brought(model, prompts, rows):
    """As the peer's croppable caches: recorded, forwarded, cropped, forwarded again."""
    batch = torch.tensor([p[:24] for p in prompts[:rows]])
    drafts = torch.tensor([[5, 6, 7, 8]] * rows)
    logits = []
    with torch.no_grad():
        for keep in (2, None):
            cache = ReplayCache.from_model(model, drafts=3, capacity=4)
            argument = {cache.driver.binding.cache_argument: cache, "use_cache": True}
            model(batch, **argument)
            cache.activate_past_recording()
            for _ in range(3):
                if keep is not None:
                    model(drafts, **argument)
                    cache.crop(keep - 4)
                else:
                    for place in range(2):
                        model(drafts[:, place : place + 1], **argument)
                        cache.crop(0)
            logits.append(model(drafts[:, :1], **argument).logits[:, -1])
            assert [cache.pool.tokens(s) for s in cache.driver.sequences] == [24 + 7] * rows
    torch.testing.assert_close(*logits, rtol=0, atol=LOGITS_ATOL)


def test_what_cannot_be_cropped(model, prompts):
    cache = ReplayCache.from_model(model, drafts=1)
    argument = {cache.driver.binding.cache_argument: cache, "use_cache": True}
    assert not cache.is_croppable
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids(prompts[0]), **argument)
        with pytest.raises(InputError, match="rows: got 1 to drop; allowed 0"):
            cache.crop(-1)
        with pytest.raises(InputError, match="tokens_to_remove: got 3; allowed 0 or less"):
            cache.crop(3)
        with pytest.raises(InputError, match=r"windows: got 3; allowed 0\.\.2"):
            model(torch.tensor([[1, 2, 3]]), **argument)
        cache.activate_past_recording(False)
        model(torch.tensor([[1, 2, 3]]), **argument)  # more of a prompt again
    assert cache.pool.tokens(cache.driver.sequences[0]) == len(prompts[0]) + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got neither of assistant_model and drafter"),
        ({"drafter": NGramDrafter(1), "assistant_model": object()}, "got both"),
        ({"drafter": NGramDrafter(1), "num_beams": 2}, "got 2 prompts, 2 beams"),
        (
            {"drafter": NGramDrafter(1), "attention_mask": torch.tensor([[0, 1, 1]])},
            "attention_mask: got padding",
        ),
        ({"drafter": lambda c: {s: Draft((1,), (-1,)) for s in c}}, "drafter: got a tree"),
    ],
    ids=["nobody", "two", "beams", "padding", "trees"],
)
def test_what_assisted_generation_refuses(models, options, message):
    with pytest.raises((InputError, UnsupportedError), match=message):
        assisted_generate(models["qwen3_next"], ids([1, 2, 3]), max_new_tokens=3, **options)


def test_a_cache_of_the_peer_is_refused(models):
    with pytest.raises(UnsupportedError, match="past_key_values: got no ReplayCache"):
        models["qwen3_next"].generate(
            ids([1, 2]),
            custom_generate=assisted_decoding,
            drafter=NGramDrafter(1),
            max_new_tokens=2,
        )
