"""The launches that `replayinfer` chooses for large batches, for the small ones of a CPU test."""

from __future__ import annotations

import functools

MARK = "two kernels: "


def install() -> None:
    import replayinfer.kernels.launch.lookup as lookup
    from replayinfer import ops

    rule, convolved_readout = lookup.rule, ops.convolved_readout

    def without_one_kernel(op, *args):
        return None if op == "fused" else rule(op, *args)

    @functools.lru_cache
    def say(axes: int, projected: bool) -> None:
        """Once for each kind of call."""
        print(f"{MARK}x of {axes} axes, {'with' if projected else 'without'} z", flush=True)

    def said(pool, plan, layer, conv, **options):
        out = convolved_readout(pool, plan, layer, conv, **options)
        say(conv.x.dim(), conv.z is not None and conv.z_out is not None)
        return out

    lookup.rule = without_one_kernel
    ops.convolved_readout = said
