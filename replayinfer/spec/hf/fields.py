"""A config read field by field: each with its default, its older names, and what it may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import InputError, UnsupportedError

__all__ = ["Fields"]

_FLOAT_TAG = "__float__"  # how transformers 5 writes an infinity into JSON
_FP32_MAX = torch.finfo(torch.float32).max


class Fields:
    """The fields of one text model's config; every refusal names the field as the config spells it.

    A field is looked up under its present name and then under older ones. Two names that disagree
    are refused, since which of them wins differs between libraries. An explicit null counts as
    absent only where the model's class gives null a meaning.
    """

    def __init__(self, values: Mapping[str, Any], inside: str = "") -> None:
        self._values = values
        self._inside = inside  # the object that holds these fields, for messages

    def has(self, *names: str) -> bool:
        """Whether a field of any of `names` is there, be it null."""
        return any(name in self._values for name in names)

    def raw(self, name: str, *older: str) -> tuple[str, Any]:
        """The name under which a field is given, and its value; None if it is nowhere."""
        found = [(n, self._values[n]) for n in (name, *older) if n in self._values]
        set_ = [(n, v) for n, v in found if v is not None]
        for other, value in set_[1:]:
            if value != set_[0][1]:
                raise InputError(
                    f"{self._inside}{other}: got {value!r} beside {set_[0][0]}={set_[0][1]!r}; "
                    "allowed one value under both names; remove one"
                )
        given, value = set_[0] if set_ else (found[0] if found else (name, None))
        return self._inside + given, value

    def optional_integer(self, name: str, *older: str, minimum: int = 1) -> int | None:
        """An integer, or None where the field is absent or null."""
        found, value = self.raw(name, *older)
        return None if value is None else _integer(found, value, minimum)

    def integer(self, name: str, default: int, *older: str, minimum: int = 1) -> int:
        """An integer; null is refused."""
        found, value = self.raw(name, *older)
        if value is None and not self.has(name, *older):
            value = default
        return _integer(found, value, minimum)

    def width(self, name: str, default: int, *older: str) -> int:
        """The kernel size of the layer's convolution: at least two taps."""
        return self.integer(name, default, *older, minimum=2)

    def flag(self, name: str, default: bool, *older: str) -> bool:
        found, value = self.raw(name, *older)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{found}: got {value!r}; allowed true or false; correct the config")
        return value

    def positive(self, name: str, default: float) -> float:
        """A positive number; null is refused."""
        found, value = self.raw(name)
        if value is None and not self.has(name):
            return default
        number = _float(value)
        if not 0 < number < math.inf:
            raise InputError(f"{found}: got {value!r}; allowed a number > 0; correct the config")
        return number

    def negative(self, name: str) -> float | None:
        """A negative number, or None where the field is absent or null."""
        found, value = self.raw(name)
        if value is None:
            return None
        number = _float(value)
        if not -math.inf < number < 0:
            raise InputError(f"{found}: got {value!r}; allowed a number < 0; correct the config")
        return number

    def limits(self, name: str, *older: str) -> tuple[float, float]:
        """A pair ``[low, high]``; absent or null means no limit.

        What float32 cannot hold is no limit: the published 1e308 stands for infinity, and a clamp
        of a float32 tensor refuses it.
        """
        found, value = self.raw(name, *older)
        if value is None:
            return (0.0, math.inf)
        pair = list(value) if isinstance(value, (list, tuple)) else []
        low, high = (_float(v) for v in pair) if len(pair) == 2 else (math.nan, math.nan)
        if not 0.0 <= low <= min(high, _FP32_MAX):
            raise InputError(
                f"{found}: got {value!r}; allowed [low, high] with 0 <= low <= high; "
                "correct the config"
            )
        return (low, math.inf if high > _FP32_MAX else high)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers >= 0, or None where the field is absent or null."""
        found, value = self.raw(name)
        if value is None:
            return None
        ok = isinstance(value, (list, tuple)) and all(
            isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
        )
        if not ok:
            raise InputError(
                f"{found}: got {value!r}; allowed a list of integers >= 0; correct the config"
            )
        return tuple(value)

    def mapping(self, name: str) -> Fields:
        """A nested object, empty where it is absent or null."""
        _, value = self.raw(name)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{name}: got {value!r}; allowed an object; correct the config")
        return Fields(value or {}, inside=f"{name}.")

    def dtype(self, *names: str) -> torch.dtype | None:
        """A floating dtype by any of `names`, as a string or a torch dtype; None where absent."""
        found, value = self.raw(*names)
        if value is None:
            return None
        named = getattr(torch, value.removeprefix("torch."), None) if type(value) is str else value
        if not isinstance(named, torch.dtype) or not named.is_floating_point:
            raise InputError(
                f"{found}: got {value!r}; allowed the name of a floating dtype such as 'bfloat16'; "
                "correct the config"
            )
        return named

    def require_silu(self, name: str, default: str = "silu") -> None:
        """Refuse an activation after the convolution that no layer specification has."""
        found, value = self.raw(name)
        value = default if value is None else value
        if value not in ("silu", "swish"):
            raise UnsupportedError(
                f"{found}: got {value!r}; allowed 'silu', which the layers apply after their "
                "convolution; serve this model without replay"
            )

    def require_divisor(self, name: str, value: int, of: str, whole: int) -> None:
        if whole % value:
            raise InputError(
                f"{name}: got {value}; allowed a divisor of {of}={whole}; correct the config"
            )


def _integer(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(
            f"{name}: got {value!r}; allowed an integer >= {minimum}; correct the config"
        )
    return value


def _float(value: Any) -> float:
    """A number of a config as a float; NaN for anything else."""
    if isinstance(value, Mapping) and set(value) == {_FLOAT_TAG}:
        value = value[_FLOAT_TAG]
        return float(value) if value in ("Infinity", "-Infinity") else math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond any float
        return math.inf if value > 0 else -math.inf
