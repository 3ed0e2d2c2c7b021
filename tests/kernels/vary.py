"""Cases of kernel tests: a base with one thing changed."""

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
