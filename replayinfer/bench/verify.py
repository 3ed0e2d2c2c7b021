"""Whether a peer's kernel computes the layer at all; one that does not must not become a baseline.

Both its outputs and its states are held against the reference backend, over two calls, so that the
second reads what the first wrote. With windows, all tokens' outputs and the last token's state are.
"""

from __future__ import annotations

import torch

from ..pools import StatePool
from ..spec import LayerSpec
from ..testing import relative_error, split_channels
from ..wrapper import ReplayDecodeWrapper
from .peers import Scope, Variant, describe
from .work import Work, make_work

__all__ = ["BOUND", "verify_peer"]

BOUND = 0.02
"""Largest relative error of a head.

16-bit outputs, betas and states are within 2^-8 each; a wrong gate, layout or decay is off by
tenths."""

_CALLS = 2


def verify_peer(
    variant: Variant,
    spec: LayerSpec,
    *,
    scope: Scope = "ssm",
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gated: bool = False,
    conv_bias: bool = True,
    window: int = 1,
    batch: int = 16,
) -> str | None:
    """Run a peer's kernel on a small batch and compare it with the torch backend.

    Parameters
    ----------
    batch : int
        16 by default: Triton compiles multiples of 16 alike, so that most timings find their kernel
        compiled.

    Returns
    -------
    str or None
        None where it agrees; else what it raised, or how far off it is.
    """
    work = make_work(
        spec, batch=batch, layers=1, dtype=dtype, state_dtype=state_dtype,
        device=torch.device(device), gated=gated, conv_bias=conv_bias, window=window,
    )  # fmt: skip
    exact = _reference(work, scope)
    try:
        bound = variant.bind(work)
        outputs = []
        for _ in range(_CALLS):
            outputs.append(bound.step(0).clone())
            work.states[0].copy_(bound.state(0))
    except Exception as error:
        if "out of memory" in str(error).lower():
            raise
        return describe(error)
    pairs = zip((*outputs, work.states[0]), exact, strict=True)
    for name, (have, want) in zip(("first output", "second output", "state"), pairs, strict=True):
        # Of the worst head, and of a window the worst token's.
        heads = (1,) if have.dim() == 3 or name == "state" else (1, 2)
        off = relative_error(have.float(), want.float(), keep=heads)
        if off > BOUND:
            return f"wrong: the {name} is off by {off:.2g} in a head; allowed {BOUND}"
    return None


def _reference(work: Work, scope: Scope) -> tuple[torch.Tensor, ...]:
    """The outputs of every call, and the states after the last, by the torch backend."""
    pool = StatePool(
        work.spec, [0], work.batch, capacity=_CALLS * work.window, max_window=work.window,
        format="fp32", dtype=work.dtype, device=work.device,
    )  # fmt: skip
    pool.bind(0, **work.weights[0])
    sequences = pool.alloc(work.batch)
    for i, sequence in enumerate(sequences):
        conv = {0: work.windows[0][i]} if work.spec.conv_width else None
        pool.seed(sequence, {0: work.states[0][i]}, tokens=_CALLS, conv=conv)
    wrapper = ReplayDecodeWrapper(pool, backend="torch")
    tokens, outputs = work.tokens[0], []
    for _ in range(_CALLS):
        wrapper.plan(sequences, work.window)
        wrapper.fold()
        inputs = tokens.windows(work.window)
        if scope == "mixer":
            rows = tokens.rows.unflatten(0, (-1, work.window))
            inputs |= split_channels(work.spec, wrapper.conv(0, rows))
        y = wrapper.run(0, **inputs)
        outputs.append(y[:, 0] if work.window == 1 else y)
        wrapper.commit()
    states = torch.stack([wrapper.materialize(s)[0] for s in sequences])
    return (*outputs, states)
