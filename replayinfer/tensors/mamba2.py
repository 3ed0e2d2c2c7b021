"""Mamba-2 on states, and rings of rows, that the caller owns."""

from __future__ import annotations

import torch

from ..backends.walks import select_walks
from ..errors import InputError
from .arguments import (
    INDEX,
    Write,
    batch_of,
    check,
    check_mamba2_inputs,
    check_state,
    device_of,
    dims_of,
    index_of,
    lead_of,
    output_like,
    require_steps,
)

__all__ = ["mamba2_ring", "mamba2_walk"]


@torch.no_grad()
def mamba2_walk(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    out: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    source: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    write: Write = "last",
    each: torch.Tensor | None = None,
    entry: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    each_scale: torch.Tensor | None = None,
    pad: int = -1,
    backend: str = "auto",
) -> torch.Tensor:
    """Mamba-2 over short windows, token after token, in float32 on the decoded states.

    Parameters
    ----------
    state : Tensor, [slots, heads, dim, state]
        float32, bfloat16 or float16, or int8 or int16 with `scale`. Slots may be any distance
        apart.
    x : Tensor, [batch, window, heads, dim]
        Or packed, ``[tokens, heads, dim]`` with `starts`; 16-bit or float32.
    dt : Tensor, [batch, window, heads]
        Before bias and softplus.
    B, C : Tensor, [batch, window, groups, state]
    A, D, dt_bias : Tensor, [heads]
    z : Tensor, as `x`
        Output gate, ``y *= silu(z)``.
    out : Tensor, as `x`
    starts : int32 or int64 Tensor, [batch + 1]
        Where each sequence's tokens begin; with `window`, the most tokens of one.
    source : int32 or int64 Tensor, [batch] or [batch, columns]
        Slot that a sequence begins at, its batch index if omitted. A pad begins at zero, gets
        outputs, and writes nothing else.
    accepted : int32 or int64 Tensor, [batch]
        Which column of `source` that is: ``max(accepted - 1, 0)``.
    target : int32 or int64 Tensor, [batch] or [batch, columns]
        Slot of the last state (the first column), or of each token's; `source` if omitted. A pad is
        skipped.
    write : {"last", "each", "none"}
        Which states go to `target`.
    each : Tensor, [entries, steps, heads, dim, state]
        Gets each token's state, beside that; in the type of `state`.
    entry : int32 or int64 Tensor, [batch]
        Which entry of `each` is a sequence's; its source slot if omitted.
    scale, each_scale : float32 Tensor, [slots, heads, dim] and [entries, steps, heads, dim]
        What a row of integers is multiplied by; set with every write.
    pad : int
        The index that means no slot.
    backend : {"auto", "triton", "torch"}

    Returns
    -------
    Tensor
        As `x`.

    Notes
    -----
    No sync, and the same launch for every batch of a size, so it can be captured in a CUDA graph. A
    sequence must not write what another one reads.
    """
    device = device_of(state)
    lead = lead_of(x, starts)
    heads, dim, size = (int(n) for n in dims_of("state", state, 4)[1:])
    check_state(state, heads, dim, size, scale)
    check_mamba2_inputs(device, lead, heads, dim, size, x, dt, B, C, A, D, z, dt_bias)
    batch, window = batch_of(device, x, starts, window)
    out = output_like(out, x, device)
    columns = window if write == "each" else 1
    source = index_of("source", source, batch, 1, device)
    target = index_of("target", target, batch, columns, device)
    if write not in ("none", "last", "each") or (write == "each" and target is None):
        raise InputError(
            f"write: got {write!r}, target {'none' if target is None else 'given'}; allowed none, "
            "last, or each with a target for every token; change one"
        )
    for name, vector in (("accepted", accepted), ("entry", entry)):
        if vector is not None:
            check(name, vector, [batch], ["batch"], INDEX, device)
    if accepted is not None and (source is None or source.shape[1] < window):
        got = "no source" if source is None else f"source {list(source.shape)}"
        raise InputError(
            f"accepted: got {got}; allowed a source with a column for every token; pass "
            f"[batch, {window}]"
        )
    if each is not None:
        check("each", each, [None, None, heads, dim, size],
               ["entries", "steps", "heads", "dim", "state"], (state.dtype,), device,
               contiguous=2, written=True)  # fmt: skip
        require_steps("each", each, window)
        if (each_scale is None) != (scale is None):
            raise InputError(
                "each_scale: got one of scale and each_scale; allowed both or none; integers need "
                "a scale wherever they are kept"
            )
        if each_scale is not None:
            check("each_scale", each_scale, [each.shape[0], each.shape[1], heads, dim],
                   ["entries", "steps", "heads", "dim"], (torch.float32,), device,
                   contiguous=2, written=True)  # fmt: skip
    select_walks(backend, device).mamba2_walk(
        out, state, x, dt, B, C, z, A, D, dt_bias,
        batch=batch, window=window, starts=starts, source=source, accepted=accepted,
        target=target, each=each, entry=entry, scale=scale, each_scale=each_scale,
        write=write, pad=pad, dt_softplus=dt_softplus,
    )  # fmt: skip
    return out


@torch.no_grad()
def mamba2_ring(
    state: torch.Tensor,
    row_x: torch.Tensor,
    row_B: torch.Tensor,
    row_dt: torch.Tensor,
    start: torch.Tensor,
    history: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    A: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    out: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    slot: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    pad: int = -1,
    backend: str = "auto",
) -> torch.Tensor:
    """Mamba-2 by replay on rings of rows that the caller keeps, in one launch.

    The window reads the state and the `history` rows after it, and its own rows are appended. Where
    ``history + tokens > length - window`` the history is folded into the state as well; the caller
    then moves `start` on by `history`. Otherwise a state is only read.

    Parameters
    ----------
    state : Tensor, [slots, heads, dim, state]
        float32, bfloat16 or float16, or int8 or int16 with `scale`. Slots may be any distance
        apart.
    row_x, row_B : Tensor, [slots, heads, length, dim] and [slots, groups, length, state]
        Of the type of `x`. `length` is at least twice the window.
    row_dt : float32 Tensor, [slots, heads, length]
        Step sizes after bias and softplus.
    start, history : int32 Tensor, [slots]
        The oldest live row of each ring and their number, as the caller counts them.
    x, dt, B, C, A, D, z, dt_bias, out, starts, window, backend
        As in `mamba2_walk`.
    slot : int32 or int64 Tensor, [batch]
        Slot of a sequence, its batch index if omitted. A pad gets zeros and writes nothing else.
    scale : float32 Tensor, [slots, heads, dim]
        What a row of integers is multiplied by; set where the state is folded.

    Returns
    -------
    Tensor
        As `x`.

    Notes
    -----
    No sync, and the same launch for every batch of a size. A row outside the live ones may hold
    anything. No two sequences of a batch may share a slot.
    """
    device = device_of(state)
    lead = lead_of(x, starts)
    heads, dim, size = (int(n) for n in dims_of("state", state, 4)[1:])
    check_state(state, heads, dim, size, scale)
    groups = check_mamba2_inputs(device, lead, heads, dim, size, x, dt, B, C, A, D, z, dt_bias)
    batch, window = batch_of(device, x, starts, window)
    out = output_like(out, x, device)
    slots = state.shape[0]
    length = int(dims_of("row_x", row_x, 4)[2])
    for name, rows, dims, dtype in (
        ("row_x", row_x, {"slots": slots, "heads": heads, "length": length, "dim": dim}, x.dtype),
        ("row_B", row_B, {"slots": slots, "groups": groups, "length": length, "state": size},
         x.dtype),
        ("row_dt", row_dt, {"slots": slots, "heads": heads, "length": length}, torch.float32),
    ):  # fmt: skip
        check(name, rows, list(dims.values()), list(dims), (dtype,), device, written=True)
    if length < 2 * window:
        raise InputError(
            f"row_x: got rings of {length} rows for windows of {window}; allowed {2 * window} or "
            "more, so that a history that cannot take a window has been folded before; use longer "
            "rings"
        )
    for name, vector in (("start", start), ("history", history)):
        check(name, vector, [slots], ["slots"], (torch.int32,), device, strided=True)
    if slot is not None:
        check("slot", slot, [batch], ["batch"], INDEX, device)
    select_walks(backend, device).mamba2_ring(
        out, state, row_x, row_B, row_dt, start, history, x, dt, B, C, z, A, D, dt_bias,
        batch=batch, window=window, slot=slot, starts=starts, scale=scale, pad=pad,
        dt_softplus=dt_softplus,
    )  # fmt: skip
    return out
