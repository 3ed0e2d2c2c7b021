"""Cases of kernel tests: a base with one thing changed, or all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

Case = TypeVar("Case")


def vary(bases: Iterable[Case], **choices: Iterable[Any]) -> list[Case]:
    """Each of `bases`, with each value of each field in turn."""
    return [
        dataclasses.replace(base, **{name: value})  # type: ignore[type-var]
        for base in bases
        for name, values in choices.items()
        for value in values
    ]


def cover(bases: Iterable[Case], **choices: Iterable[Any]) -> list[Case]:
    """Each of `bases` with every field changed at once, as often as the longest choice is long.

    Every value of every field comes up, beside others in each base: for where each case costs a
    compiler's time, and the product of the choices runs in the interpreter.
    """
    columns = {name: list(values) for name, values in choices.items()}
    longest = max(len(values) for values in columns.values())
    return [
        dataclasses.replace(  # type: ignore[type-var]
            base, **{name: values[(i + turn) % len(values)] for name, values in columns.items()}
        )
        for turn, base in enumerate(bases)
        for i in range(longest)
    ]
