"""Bare operations, for engines that compose their own step.

The order of a step is plan, `fold`, `conv_update` and `readout` per layer, `commit`. Each checks
its arguments, raises before anything changes, and leaves the work to a backend.
`ReplayDecodeWrapper` is these functions with the bookkeeping done. None of it is differentiable: a
graph over the pool's tensors would grow with every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from .backends import Backend, ShiftedConvolution, scratch_bytes, select, why_not_convolved
from .checks import capturing, check_tensor
from .errors import InputError, PlanError, UnsupportedError
from .gating import gated_norm
from .operands import (
    check_convolution,
    check_convolved,
    check_convolved_example,
    check_example,
    check_inputs,
    check_rows,
    layer_output,
)
from .planner import DevicePlanner, HostPlanner, Plan
from .pools import StatePool

__all__ = [
    "ShiftedConvolution",
    "commit",
    "conv_update",
    "convolved_readout",
    "convolves",
    "fold",
    "gated_norm",
    "join_pages",
    "materialize",
    "readout",
    "scratch_bytes",
    "split_pages",
    "warmup",
]


def fold(planner: HostPlanner, plan: Plan, *, backend: str | Backend = "auto") -> None:
    """Fold the sequences that `plan` selects, in all layers, before the first readout of the step.

    Writes the checkpoint pages of the fold list and moves those sequences' cursors.
    """
    pool = planner.pool
    pool.require_bound()
    planner.require(plan, "planned", "fold")
    select(backend, pool).fold(pool, plan)
    planner.folded(plan)


@torch.no_grad()
def conv_update(
    pool: StatePool,
    plan: Plan,
    layer: int,
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """The layer's causal convolution over the window.

    Parameters
    ----------
    x : Tensor, [bucket, window, channels]
        Pre-convolution activations of the pool's dtype.
    out : Tensor, optional
        As `x`; may not overlap it.

    Returns
    -------
    Tensor
        ``[bucket, window, channels]``; zeros in pad rows and dead tokens.

    Notes
    -----
    Writes the window's rows into the convolution rings of its sequences. Running it twice for one
    layer and plan writes the same again.
    """
    _require_folded(pool, plan, "conv_update")
    index = pool.index(layer)
    lead = {"bucket": plan.bucket, "window": plan.window}
    check_convolution(pool, lead, x)
    out = layer_output(pool, lead, out, ("channels",))
    select(backend, pool).conv(pool, plan, index, x, out)
    return out


@torch.no_grad()
def readout(
    pool: StatePool,
    plan: Plan,
    layer: int,
    *,
    out: torch.Tensor | None = None,
    backend: str | Backend = "auto",
    **inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Append the window's rows in one layer and return its outputs; the checkpoint is only read.

    In a plan of a direct step the state itself moves by the token instead, and no row is written.

    Parameters
    ----------
    **inputs
        By family, ``[bucket, window, ...]`` each. Mamba-2: ``x [heads, dim]``, ``dt [heads]``,
        ``B [groups, state]``, ``C [groups, state]``, optional ``z [heads, dim]``. GDN:
        ``q [key_heads, state]``, ``k [key_heads, state]``, ``v [heads, dim]``, ``a [heads]`` (or
        ``g [heads]``, the log decay, with ``gate="log"``), ``b [heads]``. Activations have the
        pool's dtype; gates may be float32 or 16-bit and are computed in float32.
    out : Tensor, optional
        ``[bucket, window, heads, dim]`` of the pool's dtype or float32.

    Returns
    -------
    Tensor
        ``[bucket, window, heads, dim]``; zeros in pad rows and dead tokens.

    Raises
    ------
    PlanError
        The plan is not between fold and commit, or its direct step of this layer is done: a second
        one would move the states again.
    """
    _require_folded(pool, plan, "readout")
    index = pool.index(layer)
    if plan.direct and layer in plan.layers_run:
        raise PlanError(
            f"readout: got layer {layer} a second time in a direct step; allowed once, since it "
            "moves the states; keep its output"
        )
    lead = {"bucket": plan.bucket, "window": plan.window}
    ready = check_inputs(pool, lead, inputs, "pad to the plan's bucket and window")
    out = layer_output(pool, lead, out, pool.spec.output_dims)
    chosen = select(backend, pool)
    (chosen.direct if plan.direct else chosen.readout)(pool, plan, index, ready, out)
    plan.layers_run.add(layer)
    return out


def convolves(pool: StatePool, bucket: int, *, backend: str | Backend = "auto") -> bool:
    """Whether `convolved_readout` serves steps of this bucket; never in a pool that has rings."""
    return not pool.spec.conv_width and select(backend, pool).convolves(pool, bucket) is None


@torch.no_grad()
def convolved_readout(
    pool: StatePool,
    plan: Plan,
    layer: int,
    conv: ShiftedConvolution,
    *,
    out: torch.Tensor | None = None,
    backend: str | Backend = "auto",
    **gates: torch.Tensor,
) -> torch.Tensor:
    """`readout` of one token with the convolution before it, of windows that an engine keeps.

    The traffic of the windows then overlaps with that of the states. For engines with convolution
    states of their own, as SGLang's and vLLM's, and so with ``conv_width=0``; a pool that keeps
    rings has `conv_update`.

    Parameters
    ----------
    conv : ShiftedConvolution
        Its windows move by the token, so a second call for the same step is not the same again.
        A call that is captured in a CUDA graph moves none yet: it may follow one that ran.
    **gates
        GDN: ``a [bucket, 1, heads]`` (or ``g``) and ``b [bucket, 1, heads]``, as in `readout`; or
        ``[bucket, key_heads, ratio]`` where ``x`` lies by key head.
    out : Tensor, optional
        ``[bucket, 1, heads, dim]``, as in `readout`.

    Raises
    ------
    UnsupportedError
        Another family than GDN, a pool with rings, a window of several tokens, a direct step, or a
        bucket that the backend does not serve so: ask `convolves`.
    PlanError
        The plan is not between fold and commit, or it has had this layer's call: a second one would
        move the windows again.
    """
    _require_folded(pool, plan, "convolved_readout")
    index = pool.index(layer)
    if pool.spec.conv_width:
        raise UnsupportedError(
            f"convolved_readout: got a pool with rings (conv_width={pool.spec.conv_width}), which "
            "would miss the token; allowed conv_width=0, where an engine keeps the windows; call "
            "conv_update and readout, or make the spec so"
        )
    run = layer, capturing(pool.device)
    if run in plan.layers_convolved:
        raise PlanError(
            f"convolved_readout: got layer {layer} a second time in a step; allowed once, since it "
            "moves the windows; keep its output, or make a new plan"
        )
    chosen = select(backend, pool)
    reason = chosen.convolves(pool, plan.bucket)
    if plan.window > 1 or plan.direct:
        reason = f"a window of {plan.window}" if plan.window > 1 else "a direct step"
    if reason is not None:
        raise UnsupportedError(
            f"convolved_readout: got {reason}; allowed replay of one token, for what convolves() "
            "says; convolve first, and call readout"
        )
    ready = check_convolved(pool, plan.bucket, conv, gates, "pad to the plan's bucket")
    lead = {"bucket": plan.bucket, "window": 1}
    out = layer_output(pool, lead, out, pool.spec.output_dims)
    chosen.convolved_readout(pool, plan, index, conv, ready, out)
    plan.layers_run.add(layer)
    plan.layers_convolved.add(run)
    return out


def commit(
    planner: HostPlanner,
    plan: Plan,
    accepted: ArrayLike | torch.Tensor | None = None,
    *,
    paths: Sequence[ArrayLike] | torch.Tensor | None = None,
    backend: str | Backend = "auto",
) -> NDArray[np.int32] | torch.Tensor:
    """Advance the histories by the accepted counts (the whole windows if omitted).

    Parameters
    ----------
    accepted : int array or Tensor [batch], optional
        How many tokens of each chain are kept, 0..window. A device plan takes a tensor on its
        device, int32 or int64, and nothing waits for it.
    paths : sequence of node lists or Tensor [batch, window], optional
        For a plan with ``parents``: the accepted nodes of each tree, from the root down; -1 ends a
        path. Their rows move to where a chain's would be; checkpoints are not touched. A device
        plan takes a tensor on its device, int32 or int64, and nothing waits for it; see
        `DevicePlanner.accept`.

    Returns
    -------
    int32 [batch]
        Accepted tokens; of a device plan a tensor ``[bucket]``.
    """
    if not plan.tree:
        if paths is not None:
            raise InputError(
                "paths: got paths for a plan of chains; allowed with plan(parents=…); "
                "pass accepted counts"
            )
        return planner.commit(plan, accepted)
    if paths is None or accepted is not None:
        raise InputError(
            "accepted: got a count for a plan of trees; allowed paths, since a count does not say "
            "which nodes; pass paths=[[node, …], …]"
        )
    counts, nodes = planner.accept(plan, paths)
    select(backend, planner.pool).compact(planner.pool, plan, nodes)
    return planner.commit(plan, counts)


def materialize(
    pool: StatePool,
    sequence: int,
    rows: int | None = None,
    *,
    backend: str | Backend = "auto",
) -> torch.Tensor:
    """The full state of a sequence after `rows` of its committed rows (all if omitted).

    Returns
    -------
    Tensor
        float32 ``[layers, heads, dim, state]``, in the order of ``pool.layers``. Nothing is
        written. Inside a direct step the layers that ran are one token ahead.
    """
    pool.require_bound()
    slot = pool.cursors.peek(sequence)
    pool.refresh(slot)
    history = int(pool.cursors.history[slot])
    if rows is None:
        rows = history
    if isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows <= history:
        raise InputError(
            f"rows: got {rows!r}; allowed 0..{history}, the committed rows after the checkpoint; "
            "choose a count within"
        )
    page = int(pool.cursors.checkpoint[slot])
    table = pool.cursors.table[slot].tolist()
    chosen = select(backend, pool)
    return torch.stack(
        [chosen.materialize(pool, i, page, table, rows) for i in range(len(pool.layers))]
    )


@torch.no_grad()
def split_pages(
    pool: StatePool,
    pages: torch.Tensor,
    chosen: torch.Tensor,
    *,
    backend: str | Backend = "auto",
) -> None:
    """Turn checkpoint pages that hold plain float32 into the planes of ``fp32_split``, in place.

    For pages that somebody else has written, e.g. an engine's prefill into slots that it lends.

    Parameters
    ----------
    pages : int32 or int64 Tensor [n]
        Each that is chosen once; negative entries are pads.
    chosen : bool Tensor [n]
        Which of them hold plain float32. Both on the pool's device.

    Notes
    -----
    All layers, bit for bit (a NaN becomes the quiet NaN of its sign); no sync. Zeros are the same
    in both forms.
    """
    _check_recode(pool, pages, chosen)
    select(backend, pool).recode(pool, pages, chosen, split=True)


@torch.no_grad()
def join_pages(
    pool: StatePool,
    pages: torch.Tensor,
    chosen: torch.Tensor,
    *,
    backend: str | Backend = "auto",
) -> None:
    """The inverse of `split_pages`: plain float32, for somebody else to read and to write."""
    _check_recode(pool, pages, chosen)
    select(backend, pool).recode(pool, pages, chosen, split=False)


@torch.no_grad()
def warmup(
    planner: HostPlanner,
    bucket: int,
    *,
    window: int = 1,
    direct: bool = False,
    inputs: Sequence[Mapping[str, torch.Tensor | None]] | None = None,
    conv: Sequence[Mapping[str, torch.Tensor | None]] | None = None,
    convolved: Sequence[tuple[ShiftedConvolution, Mapping[str, torch.Tensor | None]]] = (),
    backend: str | Backend = "auto",
) -> None:
    """Compile and load every kernel that a step of `bucket` and `window` can launch.

    It launches them on a plan of no sequences, in every layer. Sequences, pages, rows and rings
    stay as they are, bit for bit.

    Parameters
    ----------
    direct : bool
        For direct steps, instead of those that replay.
    inputs : sequence of mappings, optional
        Examples of what `readout` will get by keyword, ``out`` included where it will be given. Of
        their tensors ``[any, any, ...]`` the dtypes, the strides, and whether an address is
        divisible by 16 matter; the values do not. Without it: contiguous tensors, with and without
        the optional ones, gates and outputs of the pool's dtype and of float32. An empty list: no
        readout is warmed.
    conv : sequence of mappings, optional
        The same for `conv_update`: ``x`` and perhaps ``out``.
    convolved : sequence of (ShiftedConvolution, mapping), optional
        The same for `convolved_readout`: the convolution of any batch, one per layer where their
        tensors are not laid out alike, and the gates and perhaps ``out``. Its windows stay as they
        are. Steps that `convolved_readout` does not serve are skipped, and in pools that it does
        not serve the examples are not looked at.

    Raises
    ------
    PlanError
        A plan of this bucket is neither committed nor aborted, the pool sleeps, or the stream
        captures a CUDA graph.
    """
    pool = planner.pool
    chosen = select(backend, pool)
    if capturing(pool.device):
        raise PlanError(
            "warmup: got a stream that captures a CUDA graph; allowed before the capture, which "
            "must not load kernels; warm up first"
        )
    examples = None if inputs is None else [check_example(pool, e) for e in inputs]
    rows = None if conv is None else [check_rows(pool, e) for e in conv]
    served = not pool.spec.conv_width and why_not_convolved(pool) is None
    pairs = [(c, check_convolved_example(pool, c, e)) for c, e in convolved if served]
    if window > 1 or direct or chosen.convolves(pool, bucket) is not None:
        pairs = []
    pool.cursors.require_awake()
    plan = planner.plan([], bucket=bucket, window=window, direct=direct)
    try:
        chosen.warmup(pool, plan, inputs=examples, conv=rows, convolved=pairs)
        if isinstance(planner, DevicePlanner):
            planner.warmup(plan)
    finally:
        planner.abort(plan)


def _check_recode(pool: StatePool, pages: torch.Tensor, chosen: torch.Tensor) -> None:
    if pool.checkpoints.low is None:
        raise UnsupportedError(
            f"pages: got a pool of format {pool.format.name}; allowed fp32_split, the only one "
            "with another form; leave the pages as they are"
        )
    dtypes = (torch.int32, torch.int64)
    check_tensor("pages", pages, shape=(None,), dims=("n",), dtypes=dtypes, device=pool.device)
    check_tensor(
        "chosen", chosen, shape=(pages.shape[0],), dims=("n",), dtypes=(torch.bool,),
        device=pool.device,
    )  # fmt: skip


def _require_folded(pool: StatePool, plan: Plan, action: str) -> None:
    if plan.pool is not pool:
        raise PlanError(
            f"{action}: got a plan of another pool; allowed those of this one; pass the pool that "
            "it was planned for"
        )
    if plan.state != "folded":
        raise PlanError(
            f"{action}: got a plan that is {plan.state}; allowed between fold and commit; the "
            "order of a step is plan, fold, run, commit"
        )
