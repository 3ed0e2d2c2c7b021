"""The launches that `replayinfer` chooses for large batches, for the small ones of a CPU test."""

from __future__ import annotations

import functools

MARK = "two kernels: "
NORMS = "gated norms: "


def install() -> None:
    import replayinfer.kernels.launch.lookup as lookup
    from replayinfer import ops

    rule, convolved_readout, gated_norm = lookup.rule, ops.convolved_readout, ops.gated_norm

    def without_one_kernel(op, *args):
        return None if op == "fused" else rule(op, *args)

    @functools.lru_cache
    def say(line: str) -> None:
        """Once for each kind of call."""
        print(line, flush=True)

    def said(pool, plan, layer, conv, **options):
        out = convolved_readout(pool, plan, layer, conv, **options)
        projected = conv.z is not None and conv.z_out is not None
        say(f"{MARK}x of {conv.x.dim()} axes, {'with' if projected else 'without'} z")
        return out

    def normed(x, *args, activation="silu", **options):
        out = gated_norm(x, *args, activation=activation, **options)
        say(f"{NORMS}{activation} of {x.shape[-1]} channels")
        return out

    lookup.rule = without_one_kernel
    ops.convolved_readout = said
    ops.gated_norm = normed
