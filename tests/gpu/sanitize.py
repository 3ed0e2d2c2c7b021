"""Runs every kernel on small shapes, for the tools that watch memory and races on a GPU.

::

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py

Outputs and states are also held against the torch backend. It exits with 1 where they differ, or
where a kernel of the package was not launched. On a CPU it runs in Triton's interpreter, which only
shows that the script itself works.
"""

# ruff: noqa: E402 -- two variables are read at the first import of torch and of Triton

from __future__ import annotations

import argparse
import itertools
import os
import pkgutil
import sys
from importlib import import_module

# A tensor in a block of its own, so that an access past its end is one past an allocation.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from replayinfer import GDNSpec, KDASpec, Mamba2Spec, ReplayDecodeWrapper, StatePool, kernels
from replayinfer.kernels.launch.config import LaunchConfig
from replayinfer.kernels.launch.lookup import forced
from replayinfer.testing import (
    conv_inputs,
    initial_states,
    layer_inputs,
    layer_weights,
    relative_error,
)

BOUND = 0.02  # 16-bit outputs, and a state that the readout sees in bf16
BATCH, PADS, LAYERS = 3, 1, 2
SPECS = {
    "mamba2": [
        Mamba2Spec(heads=4, dim=16, state=32, groups=2),
        Mamba2Spec(heads=4, dim=20, state=24, groups=1, dt_softplus=False),
        Mamba2Spec(heads=4, dim=64, state=64, groups=2),
    ],
    "gdn": [
        GDNSpec(heads=4, dim=16, state=32, key_heads=2),
        GDNSpec(heads=3, dim=64, state=64, key_heads=1, beta="sigmoid2", norm="none"),
    ],
    "kda": [
        KDASpec(heads=2, dim=16, state=32, key_heads=2),
        KDASpec(heads=2, dim=64, state=64, key_heads=1, gate="bounded"),
    ],
}
FORMATS = ("fp32", "fp32_split", "bf16", "fp16")
STEPS = {  # how each kind of step is asked for
    "fused": ({"fused": LaunchConfig(num_warps=4, rows=16)}, "never"),
    "split": ({"fused": None}, "never"),
    "direct": ({}, "always"),
}


class Recorder:
    """Stands in for a kernel in its module, and notes when it is launched."""

    def __init__(self, kernel, name, launched):
        self._kernel, self._name, self._launched = kernel, name, launched

    def __getitem__(self, grid):
        self._launched.add(self._name)
        return self._kernel[grid]

    def __getattr__(self, name):
        return getattr(self._kernel, name)


def record_kernels():
    """The names of all kernels of the package, and a set that fills with those launched."""
    names, launched = set(), set()
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = import_module(found.name)
        for name, kernel in list(vars(module).items()):
            if name.startswith("_") and name.endswith("_kernel"):
                full = f"{found.name.removeprefix(kernels.__name__ + '.')}.{name}"
                names.add(full)
                setattr(module, name, Recorder(kernel, full, launched))
    return names, launched


def make_world(spec, format, capacity, backend, direct, weights, states):
    pool = StatePool(
        spec, range(LAYERS), BATCH, capacity=capacity, format=format, dtype=torch.bfloat16,
        page_rows=2, device=DEVICE,
    )  # fmt: skip
    for field in pool.inputs.fields.values():
        field.fill_(float("nan"))
    for layer in pool.layers:
        pool.bind(layer, **weights[layer])
    sequences = pool.alloc(BATCH)
    taps = {layer: torch.ones(spec.conv_channels, 3, device=DEVICE) for layer in pool.layers}
    for i, sequence in enumerate(sequences):
        start = {layer: states[layer][i] for layer in pool.layers}
        pool.seed(sequence, start, tokens=3, conv=taps)
    return pool, sequences, ReplayDecodeWrapper(pool, backend=backend, direct=direct)


def decode(spec, format, kind, capacity, steps, generator):
    """The largest relative error of an output or a state against the torch backend."""
    choices, direct = STEPS[kind]
    weights = [layer_weights(spec, generator) for _ in range(LAYERS)]
    states = [initial_states(spec, BATCH, generator) for _ in range(LAYERS)]
    worlds = [
        make_world(spec, format, capacity, "torch", "never", weights, states),
        make_world(spec, format, capacity, "triton", direct, weights, states),
    ]
    bucket, worst = BATCH + PADS, 0.0
    with forced(**choices):
        for step in range(steps):
            windows = [int((step + i) % 4 != 3) for i in range(BATCH)]
            tokens = [
                layer_inputs(spec, 1, bucket, torch.bfloat16, generator) for _ in range(LAYERS)
            ]
            rows = conv_inputs(spec, 1, bucket, torch.bfloat16, generator)
            got = []
            for _, sequences, wrapper in worlds:
                wrapper.plan(sequences, windows, bucket=bucket, window=1)
                wrapper.fold()
                got.append(
                    [wrapper.run(layer, **tokens[layer]) for layer in range(LAYERS)]
                    + [wrapper.conv(layer, rows) for layer in range(LAYERS)]
                )
                wrapper.commit()
            for want, have in zip(*got, strict=True):
                worst = max(worst, relative_error(have.float(), want.float()))
        (_, firsts, reference), (_, seconds, ours) = worlds
        for first, second in zip(firsts, seconds, strict=True):
            want, have = reference.materialize(first), ours.materialize(second)
            worst = max(worst, relative_error(have, want))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=SPECS, action="append", help="only this one")
    parser.add_argument("--format", choices=FORMATS, action="append", help="only this one")
    options = parser.parse_args()
    names, launched = record_kernels()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    families, formats = options.family or SPECS, options.format or FORMATS
    wrong = 0
    for family, format in itertools.product(families, formats):
        cases = [(spec, 3, 7, kind) for spec in SPECS[family] for kind in STEPS]
        if format == "fp32_split":  # more rows than one tile of a fold holds
            cases.append((SPECS[family][0], 18, 20, "split"))
        for spec, capacity, steps, kind in cases:
            error = decode(spec, format, kind, capacity, steps, generator)
            wrong += error > BOUND
            shape = "x".join(map(str, spec.state_shape))
            says = "WRONG" if error > BOUND else "ok"
            print(f"{family} {shape} {format} L={capacity} {kind}: {error:.1e} {says}", flush=True)
    missing = sorted(names - launched)
    if options.family is None and options.format is None:
        for name in missing:
            print(f"{name}: not launched")
        wrong += len(missing)
    print(f"{len(launched)} of {len(names)} kernels on {DEVICE}; {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
