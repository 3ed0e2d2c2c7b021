"""What is right: the model's own ``generate``, one prompt at a time, and the comparison with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..formats import get_format

__all__ = ["FP32_BOUND", "Comparison", "Reference", "compare", "generate", "logit_bound"]

FP32_BOUND = 2e-4
"""Largest logit difference between two float32 programs; 4e-5 was the most in 30,000 tokens."""

# Largest logit difference for a relative state error of 1, in models whose logits have a standard
# deviation of 2. Measured: 43 at most over the two default models, six seeds and capacities 1 to
# 16; 36 over the others and four seeds.
_GAIN = 80.0
# Tokens over which the roundings of a state add up before its decay has forgotten them.
_MEMORY = 32
_ROUNDOFF = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def logit_bound(format: str, capacity: int) -> float:
    """Largest allowed difference of a logit for a checkpoint format and a capacity.

    A readout sees the state with the roundoff ``u`` of its format: a logit is off by ``gain * u``.
    In the formats that round the state itself, one more rounding is added at each fold; within the
    state's memory these make a random walk of ``memory / capacity`` steps.
    """
    fmt = get_format(format)
    if fmt.lossless and not fmt.rounded_readout:
        return FP32_BOUND
    walk = 0.0 if fmt.lossless else _MEMORY / capacity
    return _GAIN * _ROUNDOFF[fmt.plane_dtype] * math.sqrt(1.0 + walk)


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of one sequence and the logits that they were chosen from.

    Attributes
    ----------
    tokens : list of int
    logits : Tensor
        float32 ``[tokens, vocabulary]``.
    """

    tokens: list[int]
    logits: torch.Tensor

    def second_best(self, position: int) -> int:
        """The runner-up at a position: what a fork takes to differ from its parent."""
        return int(self.logits[position].topk(2).indices[1])


def generate(
    model: Any, prompt: Sequence[int], tokens: int, *, forced: Sequence[int] = ()
) -> Reference:
    """Decode with ``model.generate`` and the model's own cache: greedy, one prompt.

    Parameters
    ----------
    forced : sequence of int
        Tokens that generation must begin with; the rest is greedy.
    """
    start = len(prompt)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        place = ids.numel() - start
        return [forced[place]] if place < len(forced) else everything

    everything = list(range(model.config.vocab_size))
    output = model.generate(
        torch.tensor([list(prompt)], device=model.device),
        max_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        prefix_allowed_tokens_fn=allowed if forced else None,
    )
    return Reference(output.sequences[0, start:].tolist(), torch.cat(output.logits).float())


@dataclass
class Comparison:
    """How served tokens compare with the reference; add them up with ``+=``.

    Attributes
    ----------
    tokens, equal : int
        Tokens checked, and those that are the reference's.
    ties : int
        Tokens that differ where the reference itself had two candidates within rounding.
    max_logit_diff : float
    """

    tokens: int = 0
    equal: int = 0
    ties: int = 0
    max_logit_diff: float = 0.0

    def __iadd__(self, other: Comparison) -> Comparison:
        self.tokens += other.tokens
        self.equal += other.equal
        self.ties += other.ties
        self.max_logit_diff = max(self.max_logit_diff, other.max_logit_diff)
        return self


def compare(
    model: Any,
    prompt: Sequence[int],
    reference: Reference,
    tokens: Sequence[int],
    logits: Sequence[torch.Tensor],
    *,
    skip: int = 0,
    bound: float,
    forced: bool = False,
) -> Comparison:
    """Compare a served sequence, token by token.

    Two correct programs may pick different tokens where the best two logits are closer than their
    rounding: each may be off by `bound`, so a token whose reference logit lies within twice that of
    the best is a tie. The reference is then generated again from there, so that the tokens after it
    are checked as strictly as the others.

    Parameters
    ----------
    skip : int
        Leading tokens that are not counted: those a fork has from its parent, and the forced one.
    bound : float
        What a logit may be off by where both sides compute in float32.
    forced : bool
        The tokens followed the reference: one is equal where it would have been chosen as well.
    """
    result = Comparison(tokens=len(tokens) - skip)
    for place in range(skip, len(tokens)):
        served, expected = tokens[place], reference.logits[place]
        difference = float((logits[place] - expected).abs().max())
        # A NaN must not hide behind max, which drops it.
        result.max_logit_diff = (
            max(result.max_logit_diff, difference) if difference == difference else float("inf")
        )
        if forced:
            result.equal += int(logits[place].argmax()) == int(expected.argmax())
        elif served == reference.tokens[place]:
            result.equal += 1
        elif float(expected.max() - expected[served]) <= 2 * bound:
            result.ties += 1
            reference = generate(
                model, prompt, len(tokens), forced=[*reference.tokens[:place], served]
            )
        else:
            # Past this point the two follow different texts, and nothing is comparable.
            break
    return result
