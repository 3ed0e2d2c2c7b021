"""FlashInfer's Mamba-2 calls, served by this library: same arguments, same meaning.

Written against flashinfer-python 0.7.4, which need not be installed. What its kernels refuse and
these serve, and the reverse, is in ``docs/guides/flashinfer.md``. Everything unsupported is refused
before anything is written.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from replayinfer import InputError, UnsupportedError, mamba2_ring, mamba2_walk

__all__ = ["checkpointing_ssu", "selective_state_update"]

Kernels = Literal["auto", "triton", "torch"]


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    backend: str = "auto",
    *,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """``flashinfer.mamba.selective_state_update``: one token or a window, states moved in place.

    Parameters
    ----------
    kernels : {"auto", "triton", "torch"}
        What computes it; ``"auto"``: Triton on a GPU, torch elsewhere. All others are FlashInfer's.

    Raises
    ------
    UnsupportedError
        `rand_seed`; a `dt`, `A`, `D` or `dt_bias` that differs within a head; another `backend`
        than FlashInfer's own.
    InputError
        Shapes, types and strides that do not fit.

    Notes
    -----
    `algorithm` is checked and has no effect: there is one kernel. A pad in
    `state_batch_indices` gives the outputs from a zero state and writes no state; one in
    `dst_state_batch_indices` is not written; an index outside the states counts as a pad. A
    destination must not be another sequence's source: which of the two is first is not defined.
    """
    _require_choice("algorithm", algorithm, _ALGORITHMS)
    _require_choice("backend", backend, ("auto", "flashinfer"))
    if rand_seed is not None:
        raise UnsupportedError(
            "rand_seed: got a seed for stochastic rounding; allowed rounding to nearest; leave it "
            "out, or keep the states in float32"
        )
    if intermediate_states_buffer is not None and dst_state_batch_indices is not None:
        raise InputError(
            "intermediate_states_buffer: got one beside dst_state_batch_indices; allowed one of "
            "the two; they are different places for the same states"
        )
    _same_dtype(
        "state_batch_indices", state_batch_indices,
        intermediate_state_indices=intermediate_state_indices,
        dst_state_batch_indices=dst_state_batch_indices,
    )  # fmt: skip
    _same_dtype("dt", dt, D=D, dt_bias=dt_bias)
    _same_dtype("x", x, B=B, C=C, z=z, out=out)

    state = state[:, None] if state.dim() == 3 else state
    packed = cu_seqlens is not None and x.dim() == 3
    rows: tuple[Any, ...] = (x, dt, B, C, z, out)
    if not packed:
        if cu_seqlens is not None:
            raise InputError(
                f"cu_seqlens: got x {list(x.shape)}; allowed packed [tokens, nheads, dim]; leave "
                "it out for a batch"
            )
        rows = tuple(_with_heads(t) for t in rows)
    elif cache_steps < 1:
        raise InputError(
            f"cache_steps: got {cache_steps} with cu_seqlens; allowed the most tokens of a "
            "sequence, 1 or more; pass it"
        )
    batched = packed or x.dim() == 4 or cache_steps >= 1  # the result has the window's axis
    given = out
    if not packed:
        rows = tuple(_with_window(t) for t in rows)
    x, dt, B, C, z, out = rows
    window = cache_steps if packed else int(x.shape[1])
    # A column for each token only where there are several of them; else the last state's.
    every = dst_state_batch_indices is not None and (
        dst_state_batch_indices.dim() == 2 and (batched and window > 1)
    )
    y = mamba2_walk(
        state, x, _per_head("dt", dt, 1), B, C,
        A=_per_head("A", A[None] if A.dim() == 2 else A, 2),
        D=_weight("D", D), z=z, dt_bias=_weight("dt_bias", dt_bias), dt_softplus=dt_softplus,
        out=out, starts=cu_seqlens if packed else None, window=window if packed else None,
        source=state_batch_indices, accepted=num_accepted_tokens,
        target=dst_state_batch_indices,
        write="none" if disable_state_update else "each" if every else "last",
        each=intermediate_states_buffer, entry=intermediate_state_indices,
        scale=_scales(state_scale), each_scale=intermediate_state_scales,
        pad=pad_slot_id, backend=kernels,
    )  # fmt: skip
    if given is not None:
        return given
    return y if batched else y[:, 0]


def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
    *,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """``flashinfer.mamba.checkpointing_ssu``: a window by replay on rings that the host keeps.

    Parameters
    ----------
    kernels : {"auto", "triton", "torch"}
        What computes it; ``"auto"``: Triton on a GPU, torch elsewhere. All others are FlashInfer's.

    Raises
    ------
    UnsupportedError
        States of 8-bit floats, `rand_seed`, or values that differ within a head.
    InputError
        Shapes, types and strides that do not fit.

    Notes
    -----
    Any window and any ring of at least twice its length. `d_split`, `enable_pdl`,
    `precompute_heads_per_cta` and the scratch tensors have no effect: there is one launch. A pad
    gets zeros and writes nothing else. The host moves `ring_start` on by
    `prev_num_accepted_tokens` wherever that and the window exceed the ring less one window.
    """
    _require_choice("algorithm", algorithm, ("auto", "monolith", "two-kernel"))
    scratch = {"cb_scaled": cb_scaled, "cumAdt_vec": cumAdt_vec, "cb_old": cb_old}
    given = [name for name, tensor in scratch.items() if tensor is not None]
    if len(given) in (1, 2) or (algorithm == "two-kernel" and not given):
        raise InputError(
            f"cb_scaled: got {', '.join(given) or 'no scratch'} with algorithm={algorithm!r}; "
            "allowed cb_scaled, cumAdt_vec and cb_old together, or none; they are not used here"
        )
    if state.dtype is torch.float8_e4m3fn:
        raise UnsupportedError(
            f"state: got {state.dtype}; allowed float32, bfloat16, float16, or int8 with "
            "state_scale; keep the states in one of them"
        )
    if rand_seed is not None:
        raise UnsupportedError(
            "rand_seed: got a seed for stochastic rounding; allowed rounding to nearest; leave it "
            "out: a state is rounded once a fold here, not once a token"
        )
    _same_dtype("x", x, B=B, C=C, z=z, out=out, x_cache=x_cache, B_cache=B_cache)
    if D is not None:
        _same_dtype("D", D, dt_bias=dt_bias)
    packed = cu_seqlens is not None
    if packed != (max_seqlen is not None):
        raise InputError(
            f"max_seqlen: got {max_seqlen} {'with' if packed else 'without'} cu_seqlens; allowed "
            "both or none; the ring's window follows from it"
        )
    tokens: dict[str, Any] = {"x": x, "dt": dt, "B": B, "C": C, "z": z, "out": out}
    for name, tensor in tokens.items():
        if tensor is None:
            continue
        if tensor.dim() != 4 or (packed and tensor.shape[0] != 1):
            raise InputError(
                f"{name}: got {list(tensor.shape)}; allowed [batch, tokens, ...], or "
                "[1, tokens, ...] with cu_seqlens; reshape it"
            )
        tokens[name] = tensor[0] if packed else tensor
    mamba2_ring(
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens,
        tokens["x"], _per_head("dt", tokens["dt"], 1), tokens["B"], tokens["C"],
        A=_per_head("A", A, 2), D=_weight("D", D), z=tokens["z"],
        dt_bias=_weight("dt_bias", dt_bias), dt_softplus=dt_softplus, out=tokens["out"],
        starts=cu_seqlens, window=max_seqlen, slot=state_batch_indices,
        scale=state_scale, pad=pad_slot_id, backend=kernels,
    )  # fmt: skip
    return out


_ALGORITHMS = ("auto", "simple", "vertical", "horizontal", "async_horizontal")


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UnsupportedError(f"{name}: got {value!r}; allowed {', '.join(allowed)}; pick one")


def _same_dtype(name: str, first: torch.Tensor | None, **others: torch.Tensor | None) -> None:
    for other, tensor in others.items():
        if first is not None and tensor is not None and tensor.dtype != first.dtype:
            raise InputError(
                f"{other}: got {tensor.dtype}; allowed that of {name}, {first.dtype}; convert it"
            )


def _with_heads(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor[:, None] if tensor is not None and tensor.dim() == 2 else tensor


def _with_window(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor[:, None] if tensor is not None and tensor.dim() == 3 else tensor


def _per_head(name: str, tensor: torch.Tensor, inner: int) -> torch.Tensor:
    """The one value of each head: the last `inner` axes only repeat it."""
    for axis in range(1, inner + 1):
        if tensor.shape[-axis] > 1 and tensor.stride(-axis) != 0:
            raise UnsupportedError(
                f"{name}: got strides {list(tensor.stride())}; allowed one value a head, so stride "
                f"0 in the last {inner} axes; expand it from [..., nheads]"
            )
    for _ in range(inner):
        tensor = tensor[..., 0]
    return tensor


def _weight(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return _per_head(name, tensor[None] if tensor.dim() == 1 else tensor, 1)


def _scales(scale: torch.Tensor | None) -> torch.Tensor | None:
    """``[slots, nheads, dim]``, from that or with an axis of one behind it."""
    return scale[..., 0] if scale is not None and scale.dim() == 4 else scale
