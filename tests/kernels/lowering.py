"""Puts the delta-rule decode kernels through Triton's front end; run by `test_delta`.

The interpreter runs Python: it lets pass what the compiler refuses, as a name whose type changes in
a branch. That needs no GPU, but a process of its own, since the two cannot share one.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from replayinfer import ReplayDecodeWrapper, StatePool
from replayinfer.backends.triton import delta
from replayinfer.testing import delta_inputs, delta_weights
from tests.kernels.delta_pair import DeltaCase, launching
from tests.kernels.verify_pair import verifying

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
}
BASE = DeltaCase(heads=4, key_heads=2, dim=64, state=128, capacity=16, page_rows=16, batch=2)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


def lower(kernel, *args, grid, warmup, **kwargs) -> None:
    """In place of a launch: what `JITFunction.run` does first with a kernel it has not seen."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert set(given) == set(kernel.arg_names), set(given) ^ set(kernel.arg_names)
    constants, signature = {}, {}
    for param in kernel.params:
        value = given[param.name]
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constants[param.name], signature[param.name] = value, "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({k: v for k, v in options.items() if v is not None})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = backend.get_codegen_implementation(options)
    source.make_ir(target, options, code, backend.get_module_map(), context)


def decode(case: DeltaCase, width: int = 1) -> None:
    rng = torch.Generator().manual_seed(0)
    pool = StatePool(
        case.spec, [0], case.batch, capacity=case.capacity, format=case.format, dtype=case.dtype,
        page_rows=case.page_rows, max_window=width,
    )  # fmt: skip
    pool.bind(0, **delta_weights(case.spec, rng))
    plan = ReplayDecodeWrapper(pool, backend="torch").plan(pool.alloc(case.batch), width)
    inputs = delta_inputs(case.spec, width, case.batch, case.dtype, rng)
    out = torch.empty((case.batch, width, case.heads, case.dim), dtype=case.dtype)
    with launching(case), verifying(case):
        (delta.readout if width == 1 else delta.verify)(pool, plan, 0, inputs, out)


def main() -> None:
    triton.runtime.JITFunction.run = lower
    delta.has_pdl = lambda device: True
    for family in ("gdn", "kda"):
        base = dataclasses.replace(BASE, family=family)
        for case in (
            base,
            base.but(format="fp32", gate="log", norm="none", beta="given"),
            base.but(format="fp16", dtype=torch.float16, capacity=33, heads=6, beta="sigmoid2"),
            base.but(dim=20, state=24, page_rows=1, warps=2, rows=16),
            base.but(fused=True, warps=4, rows=32),
            base.but(fused=True, format="fp32", gate="log", norm="none", capacity=3, page_rows=2),
        ):
            print(case, flush=True)
            decode(case)
        for case, width in (
            (base, 4),
            (base.but(format="fp32", dtype=torch.float32, gate="log", norm="none"), 3),
            (base.but(format="fp16", dtype=torch.float16, capacity=33, warps=2, rows=64), 16),
            (base.but(dim=20, state=24, page_rows=1, rows=16), 2),
        ):
            print(case, "by", width, flush=True)
            decode(case, width)
    decode(BASE.but(family="kda", gate="bounded"))


if __name__ == "__main__":
    main()
