"""FlashInfer's decode calls for Gated DeltaNet, served by this library.

Written against flashinfer-python 0.7.4, which need not be installed. What its kernels refuse and
these serve, and the reverse, is in ``docs/guides/flashinfer.md``. Everything unsupported is refused
before anything is written.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from replayinfer import InputError, UnsupportedError, delta_walk

__all__ = ["gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp"]

Kernels = Literal["auto", "triton", "torch"]


def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
    *,
    kernels: Kernels = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose``, for any K, V and window.

    Parameters
    ----------
    kernels : {"auto", "triton", "torch"}
        What computes it; ``"auto"``: Triton on a GPU, torch elsewhere. All others are FlashInfer's.

    Raises
    ------
    UnsupportedError
        Another `backend` than FlashInfer's own, or a pool split over two dies.
    InputError
        Shapes, types and strides that do not fit.

    Notes
    -----
    A negative index in `initial_state_indices` gives zeros and writes nothing, for bfloat16 states
    too, where FlashInfer's kernel uses slot 0 for it; in `output_state_indices` it is not written.
    An output slot must not be another sequence's initial one.
    """
    if backend not in ("auto", "flashinfer"):
        raise UnsupportedError(f"backend: got {backend!r}; allowed auto, flashinfer; pick one")
    if q.shape[1] == 1 and (intermediate_states_buffer is not None or disable_state_update):
        raise InputError(
            "intermediate_states_buffer: got it, or disable_state_update, for one token; allowed "
            "for windows of several; leave both out"
        )
    if (initial_state is None) != (initial_state_indices is None):
        raise InputError(
            "initial_state_indices: got one of it and initial_state; allowed both or none; pass "
            "the pool with its indices, or state"
        )
    if initial_state is None and (state is None or output_state_indices is not None):
        raise InputError(
            f"state: got {'none' if state is None else 'one'} without initial_state, "
            f"output_state_indices {'given' if output_state_indices is not None else 'none'}; "
            "allowed a state for every sequence, moved in place; pass a pool for anything else"
        )
    pool = state if initial_state is None else initial_state
    assert pool is not None
    y = _walk(
        pool, q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, initial_state_indices,
        output_state_indices, "none" if disable_state_update else "last",
        intermediate_states_buffer, False, kernels,
    )  # fmt: skip
    return y, pool


def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    *,
    kernels: Kernels = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashinfer.gdn_decode.gated_delta_rule_mtp``, for any K, V, window and state type.

    Parameters
    ----------
    kernels : {"auto", "triton", "torch"}
        What computes it; ``"auto"``: Triton on a GPU, torch elsewhere. All others are FlashInfer's.

    Raises
    ------
    UnsupportedError
        `cache_replayssm`: decode by replay with `ReplayDecodeWrapper` instead.
    InputError
        Shapes, types and strides that do not fit.

    Notes
    -----
    A negative index in `initial_state_indices` writes nothing, and leaves a given `output` as it is
    there; without one its outputs are zeros. A negative one in `output_state_indices` or
    `ssm_state_indices` is not written. With the latter, a last state is written a second time where
    `output_state_indices` is given.
    """
    buffers = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(buffer is not None for buffer in buffers):
        raise UnsupportedError(
            "cache_replayssm: got its raw window of inputs; allowed states only; decode by replay "
            "with ReplayDecodeWrapper"
        )
    if disable_state_update is None:
        warnings.warn(
            "disable_state_update is not given: it is True, as in flashinfer-python 0.7, and will "
            "be False when 0.8 makes it so; pass it",
            FutureWarning,
            stacklevel=2,
        )
        disable_state_update = True
    if ssm_state_indices is None:
        target, write = output_state_indices, "none" if disable_state_update else "last"
    else:
        batch, window = q.shape[:2]
        if disable_state_update or intermediate_states_buffer is not None or window < 2:
            raise InputError(
                f"ssm_state_indices: got it with disable_state_update={disable_state_update}, a "
                f"window of {window}, intermediate_states_buffer "
                f"{'none' if intermediate_states_buffer is None else 'given'}; allowed with "
                "updates, two tokens or more and no buffer; change one"
            )
        if tuple(ssm_state_indices.shape) != (batch, window):
            raise InputError(
                f"ssm_state_indices: got {list(ssm_state_indices.shape)}; allowed "
                f"[{batch}, {window}]; one slot for every token"
            )
        target, write = ssm_state_indices, "each"
        if output_state_indices is not None:  # the last state is written there as well
            if tuple(output_state_indices.shape) != (batch,):
                raise InputError(
                    f"output_state_indices: got {list(output_state_indices.shape)}; allowed "
                    f"[{batch}]; one slot for every sequence"
                )
            last = output_state_indices[:, None].to(target.dtype)
            target, write = torch.cat((target, last), dim=1), "all"
    y = _walk(
        initial_state, q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        initial_state_indices, target, write, intermediate_states_buffer, output is not None,
        kernels,
    )  # fmt: skip
    return y, initial_state


def _walk(
    pool: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None,
    output: torch.Tensor | None,
    norm: bool,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    write: Literal["none", "last", "each", "all"] | str,
    each: torch.Tensor | None,
    keep_pads: bool,
    kernels: Kernels,
) -> torch.Tensor:
    if pool.dim() == 5:
        raise UnsupportedError(
            f"initial_state: got {list(pool.shape)}; allowed [pool_size, HV, V, K]; pools split "
            "over two dies are FlashInfer's own"
        )
    if output is None:
        output = torch.empty(v.shape, dtype=q.dtype, device=v.device)
    return delta_walk(
        pool, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, query_scale=scale, norm=norm,
        out=output, source=source, target=target, write=write,  # type: ignore[arg-type]
        each=each, keep_pads=keep_pads, backend=kernels,
    )  # fmt: skip
