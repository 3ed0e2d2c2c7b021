"""Speculative decoding: drafts of any origin, one step that verifies them, and what is kept.

A *window* is a sequence's newest token, which it has not taken in yet, followed by drafts. One step
runs the window through the model; what the model says after each node decides how far the drafts
were right. Accepted nodes are committed, the others are dropped by not moving a cursor over them.

The functions are pure and know nothing of pools: `accepted_prefix` for chains, `accepted_path` for
a tree and `accepted_paths` for many, `sampled_path` for both where tokens are sampled.
`SpeculativeSession` is the loop around them, `ReplayTarget` its step over a `ReplayDecodeWrapper`,
`NGramDrafter` a drafter without a model.
"""

from .accepted import accepted_path, accepted_paths, accepted_prefix, sampled_path
from .drafts import Draft, Drafter, NGramDrafter
from .session import SpeculationCounters, SpeculativeSession
from .target import ReplayTarget, Target

__all__ = [
    "Draft",
    "Drafter",
    "NGramDrafter",
    "ReplayTarget",
    "SpeculationCounters",
    "SpeculativeSession",
    "Target",
    "accepted_path",
    "accepted_paths",
    "accepted_prefix",
    "sampled_path",
]
