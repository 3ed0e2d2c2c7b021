"""Run without the interpreter and without a GPU: what Triton itself would compile for an H100.

``keys``: its cache keys after a warmup and in a random walk. ``wide``: how the kernels of a real
shape touch memory, as PTX.
"""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature
from walks import SHAPES, make, packed, walk

from replayinfer import Mamba2Spec
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = CUDABackend(TARGET)


def specialize(kernel, args, options):
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    return bind(*args, **options, debug=False)


def keys() -> None:
    found: set[tuple[str, str]] = set()

    def note(kernel, *args, grid, warmup, **options):
        _, known, rest = specialize(kernel, args, options)
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        found.add((name, compute_cache_key({}, known, rest)))

    JITFunction.run = note
    rng = np.random.default_rng()
    windows = {"max_window": 3, "capacity": 5, "direct": "never"}
    for shape, options in [
        *((s, {"direct": 2}) for s in SHAPES.values()),
        (SHAPES["odd"], windows),
    ]:
        for fused in (None, LaunchConfig(num_warps=4, rows=16)):
            wrapper = make(shape, **options)
            with forced(fused=fused):
                wrapper.warmup()
                warm = set(found)
                walk(wrapper, rng, steps=20)
            print(json.dumps({"warm": len(warm), "new": sorted(found - warm)}))
            found.clear()

    wrapper, few = make(SHAPES["given steps"]), SimpleNamespace(bucket=3, window=1)
    examples = []
    for z in (False, True):
        tokens, out = packed(wrapper.pool, few, None, z)
        examples.append({**tokens, "out": out})
    wrapper.warmup(inputs=examples, conv=False)
    warm = set(found)
    walk(wrapper, rng, steps=20, draw=packed, conv=False)
    print(json.dumps({"warm": len(warm), "new": sorted(found - warm)}))


def wide() -> None:
    launches = {}

    def note(kernel, *args, grid, warmup, **options):
        launches.setdefault(kernel.fn.__name__, (kernel, args, options))

    JITFunction.run = note
    spec = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
    for fused in (None, LaunchConfig(num_warps=4, rows=32)):
        with forced(fused=fused):
            make(spec, page_rows=8, capacity=16).warmup([2])
    make(spec, page_rows=8, capacity=16, max_window=4).warmup([2], windows=[4])
    for name in ("_fold_kernel", "_fused_kernel", "_readout_kernel", "_verify_kernel"):
        kernel, args, options = launches[name]
        bound, known, rest = specialize(kernel, args, options)
        types = {p.name: k[0] for p, k in zip(kernel.params, known, strict=True)}
        values = list(bound.values())
        constants = {(i,): values[i] for i, k in enumerate(known) if k[0] == "constexpr"}
        attributes = {
            (i,): BACKEND.parse_attr(k[1]) for i, k in enumerate(known) if isinstance(k[1], str)
        }
        source = ASTSource(kernel, types, constants, attributes)
        settings = BACKEND.parse_options(rest).__dict__
        ptx = compile(source, target=TARGET, options=settings).asm["ptx"]
        counts = [len(re.findall(rf"{op}\.global\S*\.v4\.", ptx)) for op in ("ld", "st")]
        shuffles = len(re.findall(r"shfl\.sync", ptx))
        print(json.dumps({"kernel": name, "wide": counts, "shuffles": shuffles}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    TritonBackend.supports = lambda self, pool: None
    {"keys": keys, "wide": wide}[sys.argv[1]]()
