"""Gated DeltaNet on states that the caller owns."""

from __future__ import annotations

from typing import Literal

import torch

from ..backends.walks import select_walks
from ..errors import InputError
from .arguments import (
    FLOATS,
    INDEX,
    Write,
    check,
    device_of,
    dims_of,
    index_of,
    output_like,
    require_steps,
)

__all__ = ["delta_walk"]


@torch.no_grad()
def delta_walk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    query_scale: float | None = None,
    norm: bool = True,
    norm_eps: float = 1e-6,
    out: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    write: Write | Literal["all"] = "last",
    each: torch.Tensor | None = None,
    keep_pads: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Gated DeltaNet over short windows, token after token, in float32 on the decoded states.

    Parameters
    ----------
    state : Tensor, [slots, heads, dim, state]
        float32, bfloat16 or float16; rows of `state` values, at any distance.
    q, k : Tensor, [batch, window, key_heads, state]
    v : Tensor, [batch, window, heads, dim]
    a, b : Tensor, [batch, window, heads]
        Raw gate, ``g = -exp(A_log) softplus(a + dt_bias)``, and raw beta, ``sigmoid(b)``.
    A_log, dt_bias : Tensor, [heads]
    query_scale : float, optional
        ``state ** -0.5`` if omitted.
    norm, norm_eps
        Whether `q` and `k` are normalised, ``rsqrt(sum x^2 + norm_eps)``.
    out : Tensor, [batch, window, heads, dim]
    source : int32 or int64 Tensor, [batch]
        Slot that a sequence begins at, its batch index if omitted. A negative one is a pad: zeros,
        and no other write.
    target : int32 or int64 Tensor, [batch] or [batch, window] or [batch, window + 1]
        Slot of the last state, or of each token's; `source` if omitted. A negative one is skipped.
    write : {"last", "each", "all", "none"}
        Which states go to `target`; ``"all"``: each token's, and the last one to a further column.
    each : Tensor, [entries, steps, heads, dim, state]
        Gets each token's state, entry by batch index, in the type of `state`.
    keep_pads : bool
        Leave the outputs of pads as they are in `out`, rather than make them zeros.
    backend : {"auto", "triton", "torch"}

    Returns
    -------
    Tensor
        ``[batch, window, heads, dim]`` of the type of `v`, or `out`.

    Notes
    -----
    No sync, and the same launch for every batch of a size. A sequence must not write what another
    one reads.
    """
    device = device_of(state)
    heads, dim, size = (int(n) for n in dims_of("state", state, 4)[1:])
    batch, window = (int(n) for n in dims_of("v", v, 4)[:2])
    check("state", state, [None, heads, dim, size], ["slots", "heads", "dim", "state"], FLOATS,
           device, written=True)  # fmt: skip
    lead, names = [batch, window], ["batch", "window"]
    check("v", v, [*lead, heads, dim], [*names, "heads", "dim"], FLOATS, device)
    for name, t in (("q", q), ("k", k)):
        check(name, t, [*lead, None, size], [*names, "key_heads", "state"], FLOATS, device)
    if q.shape[2] != k.shape[2] or q.shape[2] == 0 or heads % k.shape[2]:
        raise InputError(
            f"k: got {k.shape[2]} key heads beside {q.shape[2]} query heads and {heads} value "
            "heads; allowed as many as query heads, and a divisor of the value heads; reshape"
        )
    for name, t in (("a", a), ("b", b)):
        check(name, t, [*lead, heads], [*names, "heads"], FLOATS, device)
    for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
        check(name, t, [heads], ["heads"], FLOATS, device)
    out = output_like(out, v, device)
    if source is not None:
        check("source", source, [batch], ["batch"], INDEX, device)
    columns = {"each": window, "all": window + 1}.get(write, 1)
    target = index_of("target", target, batch, columns, device)
    if write not in ("none", "last", "each", "all") or (
        write in ("each", "all") and target is None
    ):
        raise InputError(
            f"write: got {write!r}, target {'none' if target is None else 'given'}; allowed none, "
            "last, or each and all with a target for every token; change one"
        )
    if each is not None:
        check("each", each, [None, None, heads, dim, size],
               ["entries", "steps", "heads", "dim", "state"], (state.dtype,), device,
               contiguous=2, written=True)  # fmt: skip
        require_steps("each", each, window)
        if each.shape[0] < batch:
            raise InputError(
                f"each: got {each.shape[0]} entries for a batch of {batch}; allowed one for every "
                "sequence; pass a longer one"
            )
    select_walks(backend, device).delta_walk(
        out, state, q, k, v, a, b, A_log, dt_bias,
        source=source, target=target, each=each, write=write, keep_pads=keep_pads,
        norm=norm, norm_eps=norm_eps,
        query_scale=size**-0.5 if query_scale is None else float(query_scale),
    )  # fmt: skip
    return out
