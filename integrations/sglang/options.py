"""What a user can choose besides the flag, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from replayinfer import FORMATS, InputError, UnsupportedError

__all__ = ["Options"]

_POLICIES = ("spread", "full")
_FORMATS = ("auto", "fp32", "fp32_split")


@dataclass(frozen=True)
class Options:
    """Capacity, format and policy of the replay.

    Attributes
    ----------
    capacity : int
        Rows that a slot holds between folds: ``REPLAYINFER_SGLANG_CAPACITY``, 16 if unset.
    format : {"auto", "fp32", "fp32_split"}
        How fp32 states are kept: ``REPLAYINFER_SGLANG_FORMAT``. ``auto``: ``fp32_split`` beside
        16-bit activations, else ``fp32``. 16-bit states (``--mamba-ssm-dtype``) stay what they are.
    policy : {"spread", "full"}
        When sequences fold early: ``REPLAYINFER_SGLANG_POLICY``.
    """

    capacity: int = 16
    format: str = "auto"
    policy: str = "spread"

    def __post_init__(self) -> None:
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int):
            raise InputError(
                f"REPLAYINFER_SGLANG_CAPACITY: got {self.capacity!r}; allowed an integer of 1 to "
                "32; set it to one or unset it"
            )
        if not 1 <= self.capacity <= 32:
            raise UnsupportedError(
                f"REPLAYINFER_SGLANG_CAPACITY: got {self.capacity}; allowed 1 to 32, at least the "
                "window of a step, which is one token without speculation; change it or unset it"
            )
        for name, value, allowed in (
            ("FORMAT", self.format, _FORMATS),
            ("POLICY", self.policy, _POLICIES),
        ):
            if value not in allowed:
                raise InputError(
                    f"REPLAYINFER_SGLANG_{name}: got {value!r}; allowed {', '.join(allowed)}; set "
                    "it to one of them or unset it"
                )

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Options:
        """From environment variables, by default this process's."""
        env = os.environ if environment is None else environment
        capacity = env.get("REPLAYINFER_SGLANG_CAPACITY", "").strip() or "16"
        try:
            rows = int(capacity)
        except ValueError:
            raise InputError(
                f"REPLAYINFER_SGLANG_CAPACITY: got {capacity!r}; allowed an integer of 1 to 32; "
                "set it to one or unset it"
            ) from None
        return cls(
            capacity=rows,
            format=env.get("REPLAYINFER_SGLANG_FORMAT", "").strip() or "auto",
            policy=env.get("REPLAYINFER_SGLANG_POLICY", "").strip() or "spread",
        )

    def require_for(self, arguments: Any) -> None:
        """Refuse server arguments that these options contradict.

        Raises
        ------
        UnsupportedError
            Deterministic inference with a policy by which a sequence's bits depend on its batch.
            A capacity that does not exceed the window of a verify.
        """
        window = getattr(arguments, "speculative_num_draft_tokens", None)
        speculates = getattr(arguments, "speculative_algorithm", None) is not None
        if speculates and window is not None and self.capacity <= window:
            raise UnsupportedError(
                f"REPLAYINFER_SGLANG_CAPACITY: got {self.capacity}; allowed at least {window + 1} "
                f"beside --speculative-num-draft-tokens {window}, since a slot must hold a window "
                "and a row before it; raise it, or draft fewer tokens"
            )
        if getattr(arguments, "enable_deterministic_inference", False) and self.policy != "full":
            raise UnsupportedError(
                f"REPLAYINFER_SGLANG_POLICY: got {self.policy}; allowed full beside "
                "--enable-deterministic-inference, since other policies fold by the batch; set it"
            )

    def format_for(self, states: torch.dtype, activations: torch.dtype) -> str:
        """The checkpoint format of a pool's states.

        Raises
        ------
        UnsupportedError
            States of a type that no format has.
        """
        if states == torch.float32:
            if self.format != "auto":
                return self.format
            return "fp32" if activations == torch.float32 else "fp32_split"
        for name, known in FORMATS.items():
            if known.plane_dtype == states and not known.rounded_readout:
                return name
        raise UnsupportedError(
            f"--mamba-ssm-dtype: got states of {states}; allowed float32, bfloat16 or float16; "
            "choose one of them"
        )
