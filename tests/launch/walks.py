"""Pools of shapes that Triton tells apart, and random walks over what a wrapper does with them."""

from __future__ import annotations

import numpy as np
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec, ReplayDecodeWrapper, StatePool

BUCKETS = (1, 2, 5, 16)
# An odd number of heads puts layers at every alignment of 4 bytes; 16 and 1 are what Triton knows.
SHAPES = {
    "odd": Mamba2Spec(heads=3, dim=20, state=24, groups=1),
    "round": Mamba2Spec(heads=16, dim=64, state=128, groups=2),
    "one head": Mamba2Spec(heads=1, dim=16, state=16, conv_width=0),
    "given steps": Mamba2Spec(heads=4, dim=8, state=16, groups=4, dt_softplus=False),
    "gdn": GDNSpec(heads=6, dim=16, state=16, key_heads=3),
    "kda": KDASpec(heads=3, dim=16, state=16, key_heads=3),
}


def make(spec, *, direct="auto", **options) -> ReplayDecodeWrapper:
    """A wrapper around an empty pool of three layers."""
    options = {
        "capacity": 3, "page_rows": 2, "format": "fp32_split", "dtype": torch.bfloat16
    } | options  # fmt: skip
    pool = StatePool(spec, range(3), 16, checkpoint_pages=24, **options)
    for layer in pool.layers:
        weights = {f.name: -torch.ones(f.shape, device=pool.device) for f in spec.weight_fields}
        pool.bind(layer, **weights)
    return ReplayDecodeWrapper(pool, backend="triton", buckets=BUCKETS, direct=direct)


def draw(pool, plan, rng, z) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Inputs and output of a step, in one of the ways that a warmup without examples covers."""
    dtypes, lead = (pool.dtype, torch.float32), (plan.bucket, plan.window)
    tokens = {}
    for field in pool.spec.input_fields:
        shape = (*lead, *(getattr(pool.spec, d) for d in field.dims))
        dtype = dtypes[rng.integers(2)] if field.kind == "gate" else pool.dtype
        if not field.optional or z:
            tokens[field.name] = torch.zeros(shape, dtype=dtype, device=pool.device)
    if rng.integers(2):
        return tokens, None
    shape = (*lead, pool.spec.heads, pool.spec.dim)
    return tokens, torch.empty(shape, dtype=dtypes[rng.integers(2)], device=pool.device)


def packed(pool, plan, rng, z) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Views of one projection with a width and offsets that are not round, and a strided output."""
    spec, lead = pool.spec, (plan.bucket, plan.window)
    options = {"dtype": pool.dtype, "device": pool.device}
    fields = [f for f in spec.input_fields if z or not f.optional]
    shapes = [tuple(getattr(spec, d) for d in f.dims) for f in fields]
    sizes = [int(np.prod(s)) for s in shapes]
    projected = torch.zeros(*lead, sum(sizes) + 7, **options)[..., 1:-6]
    parts = projected.split(sizes, dim=-1)
    tokens = {f.name: p.unflatten(-1, s) for f, p, s in zip(fields, parts, shapes, strict=True)}
    return tokens, torch.empty(*lead, spec.heads, spec.dim + 2, **options)[..., 2:]


def walk(wrapper, rng, *, steps=30, z=(False, True), draw=draw, conv=True) -> None:
    """Random steps: batches, pads, idle sequences, folds, forks, materialized states.

    With windows and draft trees as long as the pool has them, and paths that leave nodes out.
    """
    pool = wrapper.pool
    live = pool.alloc(3)
    for _ in range(steps):
        if len(live) < 12 and rng.integers(3) == 0:
            live += pool.alloc(1) if rng.integers(2) else pool.fork(live[0])
        elif len(live) > 1 and rng.integers(4) == 0:
            pool.free(live.pop())
        some = [s for s in live if rng.integers(4)] or live[:1]
        width, force = int(rng.integers(pool.max_window)) + 1, bool(rng.integers(5) == 0)
        windows = rng.integers(width + 1, size=len(some))
        parents = np.full((len(some), width), -1) if width > 1 and rng.integers(2) else None
        plan = wrapper.plan(some, windows, window=width, force_fold=force, parents=parents)
        wrapper.fold()
        for layer in pool.layers:
            tokens, out = draw(pool, plan, rng, z[rng.integers(len(z))])
            wrapper.run(layer, out=out, **tokens)
            if conv and pool.spec.conv_width:
                rows = torch.zeros(plan.bucket, width, pool.spec.conv_channels, dtype=pool.dtype)
                wrapper.conv(layer, rows.to(pool.device))
        if parents is None:
            wrapper.commit()
        else:
            wrapper.commit(paths=[[n - 1] if n else [] for n in windows.tolist()])
        if rng.integers(4) == 0:
            wrapper.materialize(live[-1])
    pool.free(live)
