"""Run without the interpreter and without a GPU: what Triton itself would compile for an H100.

``keys``: its cache keys after a warmup and in a random walk. ``wide``: how the kernels of a real
shape touch memory, as PTX. ``spills``: what a prepass that convolves has no registers for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature
from walks import SHAPES, make, packed, walk

from replayinfer import GDNSpec, Mamba2Spec, ops
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = CUDABackend(TARGET)


def specialize(kernel, args, options):
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    return bind(*args, **options, debug=False)


def compiled(kernel, args, options):
    bound, known, rest = specialize(kernel, args, options)
    types = {p.name: k[0] for p, k in zip(kernel.params, known, strict=True)}
    values = list(bound.values())
    constants = {(i,): values[i] for i, k in enumerate(known) if k[0] == "constexpr"}
    attributes = {
        (i,): BACKEND.parse_attr(k[1]) for i, k in enumerate(known) if isinstance(k[1], str)
    }
    source = ASTSource(kernel, types, constants, attributes)
    return compile(source, target=TARGET, options=BACKEND.parse_options(rest).__dict__)


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
        ptx = compiled(*launches[name]).asm["ptx"]
        counts = [len(re.findall(rf"{op}\.global\S*\.v4\.", ptx)) for op in ("ld", "st")]
        shuffles = len(re.findall(r"shfl\.sync", ptx))
        print(json.dumps({"kernel": name, "wide": counts, "shuffles": shuffles}))


def spills() -> None:
    launches = {}

    def note(kernel, *args, grid, warmup, **options):
        launches[kernel.fn.__name__] = kernel, args, options

    JITFunction.run = note
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for heads, key_heads, size in ((32, 16, 128), (32, 4, 256)):
        spec = GDNSpec(heads=heads, key_heads=key_heads, dim=size, state=size, conv_width=0)
        wrapper = make(spec, page_rows=8, capacity=16)
        channels, dtype, bucket = spec.conv_channels, wrapper.pool.dtype, 64
        conv = ops.ShiftedConvolution(
            x=torch.zeros(bucket, channels, dtype=dtype),
            states=torch.zeros(2, channels, 3, dtype=dtype),
            slots=torch.zeros(bucket, dtype=torch.int32),
            weight=torch.zeros(channels, 4), bias=torch.zeros(channels),
        )  # fmt: skip
        gates = {name: torch.zeros(bucket, 1, spec.heads, dtype=dtype) for name in "ab"}
        ops.warmup(wrapper.planner, bucket, inputs=[], convolved=[(conv, gates)], backend="triton")
        kernel = compiled(*launches["_prepass_kernel"])
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            said = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        stack = int(re.search(r"STACK:(\d+)", said)[1])
        print(json.dumps({"warps": kernel.metadata.num_warps, "stack": stack}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    TritonBackend.supports = lambda self, pool: None
    {"keys": keys, "wide": wide, "spills": spills}[sys.argv[1]]()
