"""Assisted generation: drafts by a small model, verified as windows, rolled back by a cursor.

The peer's own loop, ``model.generate(..., assistant_model=…)``, refuses every model with a
recurrent state before it looks at the cache. `assisted_decoding` is a loop for the hook that
``generate`` offers instead, ``custom_generate``: preparation, logits processors and stopping
criteria are the peer's. `assisted_generate` puts the parts together.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replayinfer import (
    Draft,
    Drafter,
    InputError,
    UnsupportedError,
    accepted_prefix,
    sampled_path,
)

from . import peer
from .cache import ReplayCache
from .engine import ReplayEngine
from .families import describe, unsupported_reason

__all__ = ["CroppingDrafter", "ModelDrafter", "assisted_decoding", "assisted_generate"]


class ModelDrafter:
    """Drafts greedily by a model that a `ReplayEngine` serves, many sequences at once.

    Its own sequences follow the texts; what it drafts is decoded by forks, which are freed again.

    Parameters
    ----------
    engine : ReplayEngine
        Of the draft model: with a `max_window` of at least two (the longer, the fewer forwards it
        needs to follow) and room for two sequences per text.
    drafts : int
        Tokens to propose.
    """

    def __init__(self, engine: ReplayEngine, drafts: int) -> None:
        self.engine = engine
        self.drafts = drafts
        self._mine: dict[int, int] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def __call__(self, contexts: Mapping[int, Sequence[int]]) -> dict[int, Draft]:
        if not contexts or self.drafts < 1:
            return {}
        self._follow(contexts)
        drafts = {s: [int(self._logits[s].argmax())] for s in contexts}
        if self.drafts > 1:
            forks: list[int] = []
            try:
                forks += [self.engine.fork(self._mine[s])[0] for s in contexts]
                for _ in range(self.drafts - 1):
                    logits = self.engine.step(forks, [drafts[s][-1] for s in contexts])
                    for s, row in zip(contexts, logits, strict=True):
                        drafts[s].append(int(row.argmax()))
            finally:
                self.engine.free(forks)
        return {s: Draft(tuple(tokens)) for s, tokens in drafts.items()}

    def forget(self, sequence: int) -> None:
        """Free what it holds for a text, if it has seen it."""
        if sequence in self._mine:
            self.engine.free([self._mine.pop(sequence)])
            del self._logits[sequence]

    def _follow(self, contexts: Mapping[int, Sequence[int]]) -> None:
        """Take in what is new of every text."""
        for s, text in contexts.items():
            if s not in self._mine:
                self._mine[s], self._logits[s] = self.engine.prefill(list(text))
        while True:
            new = {s: list(t[self.engine.tokens(self._mine[s]) :]) for s, t in contexts.items()}
            windows = {s: part[: self.engine.max_window] for s, part in new.items() if part}
            if not windows:
                return
            logits = self.engine.verify([self._mine[s] for s in windows], list(windows.values()))
            self.engine.accept([range(len(part)) for part in windows.values()])
            for row, (s, part) in enumerate(windows.items()):
                self._logits[s] = logits[row, len(part) - 1]


class CroppingDrafter:
    """Drafts greedily by any model of the peer whose own cache can be cropped; one text.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    drafts : int
    """

    def __init__(self, model: Any, drafts: int) -> None:
        from transformers import DynamicCache

        self.model = model
        self.drafts = drafts
        self._cache = DynamicCache(config=model.config)
        self._taken = 0

    @torch.no_grad()
    def __call__(self, contexts: Mapping[int, Sequence[int]]) -> dict[int, Draft]:
        if len(contexts) != 1:
            raise InputError(
                f"contexts: got {len(contexts)} texts; allowed one, since a cache of the peer has "
                "one length; use ModelDrafter, or a drafter per text"
            )
        ((sequence, text),) = contexts.items()
        part, drafts = list(text[self._taken :]), []
        for _ in range(self.drafts):
            ids = torch.tensor([part], device=self.model.device)
            out = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            part = [int(out.logits[0, -1].argmax())]
            drafts += part
        self._taken = len(text)
        if not self._cache.is_croppable:
            raise UnsupportedError(
                f"assistant_model: got {type(self.model).__name__}, whose cache cannot drop "
                "rejected drafts; allowed full attention, or one of FAMILIES; pick another"
            )
        self._cache.crop(-(len(drafts) - 1) if drafts else 0)
        return {sequence: Draft(tuple(drafts))}


def assisted_generate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    assistant_model: Any = None,
    drafter: Drafter | None = None,
    drafts: int = 4,
    cache: ReplayCache | None = None,
    **options: Any,
) -> Any:
    """``model.generate`` with drafts: the same tokens in fewer forwards of `model`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        One of `FAMILIES`.
    input_ids : Tensor, [1, tokens]
        One prompt, as the peer's own assisted generation.
    assistant_model : transformers.PreTrainedModel, optional
        Proposes drafts, greedily: one of `FAMILIES`, or a model with full attention. It has the
        same tokens.
    drafter : Drafter, optional
        Instead of a model, e.g. ``NGramDrafter(4)``.
    drafts : int
        Most drafts of a round.
    cache : ReplayCache, optional
        Made with at least as many `drafts`; a new one if omitted. Its `speculation` counts.
    **options
        Of ``model.generate``: lengths, sampling, processors, stopping criteria.

    Raises
    ------
    UnsupportedError
        A model that is not served, several prompts, beams, or padding.

    Examples
    --------
    >>> assisted_generate(model, ids, assistant_model=small, max_new_tokens=64)  # doctest: +SKIP
    """
    if (assistant_model is None) == (drafter is None):
        raise InputError(
            f"drafter: got {'both' if drafter else 'neither'} of assistant_model and drafter; "
            "allowed one of them; say who drafts"
        )
    if drafter is None:
        drafter = _drafter_of(assistant_model, drafts)
    if cache is None:
        cache = ReplayCache.from_model(model, drafts=drafts, capacity=max(16, 1 + drafts))
    argument = {describe(model).cache_argument: cache}
    return model.generate(
        input_ids, custom_generate=assisted_decoding, drafter=drafter, **argument, **options
    )


def _drafter_of(model: Any, drafts: int) -> Drafter:
    if unsupported_reason(model) is not None:
        return CroppingDrafter(model, drafts)
    window = max(1 + drafts, 2)
    engine = ReplayEngine(model, max_sequences=2, max_window=window, capacity=max(16, window))
    return ModelDrafter(engine, drafts)


@torch.no_grad()
def assisted_decoding(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: Drafter,
    **model_kwargs: Any,
) -> Any:
    """A decoding loop for ``model.generate(custom_generate=assisted_decoding, drafter=…)``.

    Give it a `ReplayCache` as well, made with ``drafts=…``. Greedy or sampled as the generation
    config says; tokens are those of ``generate`` without it, or distributed alike.
    """
    cache = next((x for x in model_kwargs.values() if isinstance(x, ReplayCache)), None)
    _require_served(input_ids, cache, generation_config, model_kwargs)
    assert cache is not None
    run = _Run(model, cache, logits_processor, generation_config)
    ids, token = run.start(input_ids)
    done = bool(stopping_criteria(ids, run.last_scores).all())
    while not done:
        window, count, token = run.round(ids, drafter)
        new = torch.cat([window[1:count], token])
        kept = 0
        while kept < count and not done:
            ids = torch.cat([ids, new[None, kept : kept + 1]], dim=-1)
            done = bool(stopping_criteria(ids, run.scores_of_round[kept]).all())
            kept += 1
        # What came after an end of the text counts no more than what the model refused.
        run.finish(kept)
    return run.output(ids)


class _Run:
    """One text on its way through `assisted_decoding`."""

    def __init__(self, model: Any, cache: ReplayCache, processor: Any, config: Any) -> None:
        self.model = model
        self.cache = cache
        self.processor = processor
        self.config = config
        self.argument = cache.driver.binding.cache_argument
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.scores_of_round: list[torch.Tensor] = []
        self.logits_of_round = torch.empty(0)
        self.window = torch.empty(0)
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []

    @property
    def _taken(self) -> int:
        """Tokens that the cache has taken in."""
        sequences = self.cache.driver.sequences
        return int(self.cache.pool.tokens(sequences[0])) if sequences else 0

    @property
    def last_scores(self) -> torch.Tensor:
        return self._scores[-1]

    def start(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the prompt in, or what is new of it, and choose the first token."""
        taken = self._taken
        self.cache.activate_past_recording(False)
        self.logits_of_round = self._forward(ids[:, taken:], 1)
        scores = self.processor(ids, self.logits_of_round[0:1])
        self.scores_of_round = [scores]
        token = self._choose(scores)
        self._keep(1)
        return torch.cat([ids, token[None]], dim=-1), token

    def round(self, ids: torch.Tensor, drafter: Drafter) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Draft, verify, and choose: the window, how much of it is right, and the token after."""
        room = min(self.config.max_length - ids.shape[1], self.cache.pool.max_window)
        key = int(self.cache.driver.sequences[0])
        draft = drafter({key: tuple(ids[0].tolist())}).get(key, Draft()).first(max(room - 1, 0))
        if draft.parents is not None:
            raise UnsupportedError(
                "drafter: got a tree; allowed chains, since the peer's attention takes no tree; "
                "use ReplayEngine with SpeculativeSession"
            )
        drafts = torch.tensor(draft.tokens, dtype=ids.dtype, device=ids.device)
        self.window = torch.cat([ids[0, -1:], drafts])
        self.cache.activate_past_recording()
        count = self.window.numel()
        self.logits_of_round = self._forward(self.window[None], count)
        text = torch.cat([ids, drafts[None]], dim=-1)
        start = ids.shape[1]
        self.scores_of_round = [
            self.processor(text[:, : start + i], self.logits_of_round[i : i + 1])
            for i in range(count)
        ]
        kept, token = self._accept(draft)
        counters = self.cache.speculation
        counters.rounds += 1
        counters.drafts += count - 1
        counters.accepted += kept - 1
        return self.window, kept, token

    def finish(self, kept: int) -> None:
        """Roll back to the first `kept` tokens of the window."""
        self.cache.crop(kept - self.window.numel())
        self._keep(kept)

    def output(self, ids: torch.Tensor) -> Any:
        if not self.config.return_dict_in_generate:
            return ids
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(self._scores) if self.config.output_scores else None,
            logits=tuple(self._logits) if self.config.output_logits else None,
            past_key_values=self.cache,
        )

    def _forward(self, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Logits after the last tokens, float32 ``[keep, vocabulary]``."""
        options: dict[str, Any] = {self.argument: self.cache}
        if self._takes_positions:  # some models would count from 0 in every forward
            places = self._taken + torch.arange(ids.shape[1], device=ids.device)
            options["position_ids"] = places[None]
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **options)
        logits: torch.Tensor = output.logits[0, -keep:].float()
        return logits

    def _accept(self, draft: Draft) -> tuple[int, torch.Tensor]:
        scores = torch.cat(self.scores_of_round)
        if not self.config.do_sample:
            choices = scores.argmax(-1)
            kept = int(accepted_prefix(self.window, choices))
            return kept, choices[kept - 1 : kept]
        drawn = draft.probabilities
        if drawn is not None:
            drawn = torch.cat([drawn[:1], drawn]).to(scores)
        path, token = sampled_path(
            self.window.tolist(), scores.softmax(-1), draft=drawn if len(draft.tokens) else None
        )
        return len(path), torch.tensor([token], device=scores.device)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if self.config.do_sample:
            return torch.multinomial(scores.softmax(-1), 1)[0]
        return scores.argmax(-1)

    def _keep(self, count: int) -> None:
        self._scores += self.scores_of_round[:count]
        self._logits += [self.logits_of_round[i : i + 1] for i in range(count)]


def _require_served(
    ids: torch.Tensor, cache: ReplayCache | None, config: Any, kwargs: Mapping[str, Any]
) -> None:
    peer.load()
    if cache is None:
        raise UnsupportedError(
            "past_key_values: got no ReplayCache; allowed one made with drafts=…, since the peer's "
            "own cache cannot drop a token of a recurrent state; pass "
            "ReplayCache.from_model(model, drafts=4)"
        )
    if ids.shape[0] != 1 or config.num_beams != 1 or config.num_return_sequences != 1:
        raise UnsupportedError(
            f"input_ids: got {ids.shape[0]} prompts, {config.num_beams} beams; allowed one prompt "
            "and no beams, since rows accept different counts; serve more with ReplayEngine and "
            "SpeculativeSession"
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise UnsupportedError(
            "attention_mask: got padding; allowed none for a single prompt; drop the pads"
        )
