"""`HybridStepPlanner`: one step, one plan, for the attention and the recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from replayinfer import (
    InputError,
    PlanError,
    ReplayDecodeWrapper,
    ReplayPrefillWrapper,
    UnsupportedError,
)

from .metadata import StepMetadata
from .peers import AttentionShape, kind_of, plan_attention, require_step

__all__ = ["HybridStepPlanner"]


class HybridStepPlanner:
    """Plans an attention wrapper and a replay wrapper from the same metadata.

    Neither wrapper is subclassed or patched; their own calls run every layer as before.

    Parameters
    ----------
    attention_wrapper
        FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``, ``BatchPrefillWithPagedKVCacheWrapper``
        or ``BatchAttention``, or a `PagedAttentionWrapper`.
    replay_wrapper : ReplayDecodeWrapper or ReplayPrefillWrapper
        The first for padded steps, the second for packed ones.

    Examples
    --------
    >>> planner = HybridStepPlanner(attention, replay)              # doctest: +SKIP
    >>> meta = kv.step(sequences, windows, bucket=8, window=4)      # doctest: +SKIP
    >>> planner.plan(meta, shape)                                   # doctest: +SKIP
    >>> replay.fold()                                               # doctest: +SKIP
    """

    def __init__(
        self,
        attention_wrapper: Any,
        replay_wrapper: ReplayDecodeWrapper | ReplayPrefillWrapper,
    ) -> None:
        self.attention_wrapper = attention_wrapper
        self.replay_wrapper = replay_wrapper
        self.kind = kind_of(attention_wrapper)
        if not isinstance(replay_wrapper, ReplayDecodeWrapper | ReplayPrefillWrapper):
            raise UnsupportedError(
                f"replay_wrapper: got {type(replay_wrapper).__name__}; allowed ReplayDecodeWrapper "
                "or ReplayPrefillWrapper; pass the wrapper, not its pool"
            )

    def plan(
        self,
        meta: StepMetadata,
        shape: AttentionShape,
        *,
        force_fold: ArrayLike | None = None,
        direct: bool | None = None,
        parents: ArrayLike | None = None,
        **attention: Any,
    ) -> Any:
        """Plan one step of both.

        Parameters
        ----------
        meta : StepMetadata
            The newest of its buffers.
        shape : AttentionShape
        force_fold, direct
            As in `ReplayDecodeWrapper.plan`.
        parents
            Refused: attention over draft trees needs a mask that these calls do not carry.
        **attention
            Further options of the attention wrapper's ``plan``, e.g. ``disable_split_kv``.

        Returns
        -------
        Plan or PrefillPlan
            What the replay wrapper planned, held until its commit or abort.

        Raises
        ------
        InputError, PlanError, UnsupportedError, CapacityError
            The replay wrapper has no plan then. The attention wrapper keeps its old one, unless it
            was itself what raised.

        Notes
        -----
        The attention wrapper plans for `meta`'s bucket, and so does the replay wrapper: pads of one
        are pads of the other. No sync of ours; FlashInfer's ``BatchAttention`` waits for the device
        in its ``plan``, the other two do not.
        """
        meta.require_current("plan")
        self._require_agreement(meta)
        require_step(self.kind, meta, shape)
        if parents is not None:
            raise UnsupportedError(
                "parents: got draft trees; allowed chains in a hybrid step; plan the two wrappers "
                "yourself, the attention with custom_mask"
            )
        replay = self.replay_wrapper
        plan: Any
        if isinstance(replay, ReplayPrefillWrapper):
            if force_fold is not None or direct is not None:
                raise InputError(
                    f"force_fold: got {force_fold!r}, direct {direct!r} for a prefill; allowed for "
                    "decode steps; leave them out"
                )
            plan = replay.plan(meta.sequences, meta.host.qo_indptr[: meta.batch + 1])
        else:
            plan = replay.plan(
                meta.sequences, meta.windows, bucket=meta.bucket, window=meta.window,
                force_fold=force_fold, direct=direct,
            )  # fmt: skip
        try:
            self._require_lengths(meta, plan)
            plan_attention(self.kind, self.attention_wrapper, meta, shape, attention)
        except BaseException:
            replay.abort()
            raise
        meta.mark_read()
        return plan

    def _require_agreement(self, meta: StepMetadata) -> None:
        replay = self.replay_wrapper
        packed = isinstance(replay, ReplayPrefillWrapper)
        if packed != meta.packed:
            got, allowed = ("packed", "padded") if meta.packed else ("padded", "packed")
            raise InputError(
                f"meta: got a {got} step for a {type(replay).__name__}; allowed a {allowed} one; "
                f"make it with packed={packed}"
            )
        if packed and meta.bucket != meta.batch:
            raise InputError(
                f"meta: got {meta.batch} sequences in a bucket of {meta.bucket} for a prefill; "
                "allowed equal, since packed rows have no pads; leave bucket out"
            )
        if meta.device.qo_indptr.device != replay.pool.device:
            raise InputError(
                f"meta: got arrays on {meta.device.qo_indptr.device}; allowed "
                f"{replay.pool.device}, where the state pool is; make both there"
            )

    def _require_lengths(self, meta: StepMetadata, plan: Any) -> None:
        """The attention layers and the recurrent ones must have taken in the same tokens."""
        pool = self.replay_wrapper.pool
        if pool.on_device is not None:  # its cursors would have to be waited for
            return
        slots = plan.slots
        tokens = pool.cursors.base[slots] + pool.cursors.history[slots]
        wrong = np.flatnonzero(tokens != meta.lengths)
        if wrong.size:
            i = int(wrong[0])
            raise PlanError(
                f"meta: got {int(meta.lengths[i])} keys before the step of sequence "
                f"{int(meta.sequences[i])}; allowed {int(tokens[i])}, the tokens in its recurrent "
                "state; commit and roll back both alike"
            )
