"""Which of Triton's compiled variants a launch would take, recorded instead of launched.

Triton compiles a kernel per types, constants, options, and what it is told of its arguments: an
integer that is 1, an integer or address divisible by 16. The same holds here, in a function of our
own, so that the interpreter, which compiles nothing, can say what a GPU would compile.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass

import torch

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int32: "i32", torch.int16: "i16", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Everything that decides which compiled kernel is taken."""

    kernel: str
    constants: tuple
    arguments: tuple  # (name, type, what is known of it)
    options: tuple


def specialization(value, specialize=True, align=True):
    """The type of an argument and what a compiled kernel may rely on."""
    if value is None:
        return "constexpr", None
    if isinstance(value, bool):
        return "u1", None
    if isinstance(value, float):
        return "fp32", None
    if isinstance(value, torch.Tensor):
        kind, number = "*" + TYPES[value.dtype], value.data_ptr()
    elif specialize and value == 1:
        return "constexpr", 1
    else:
        kind, number = "i32" if -(2**31) <= value < 2**31 else "i64", value
    return kind, ("D" if align and number % 16 == 0 else "") if specialize else None


def describe(kernel, args, kwargs) -> Launch:
    parameters = inspect.signature(kernel.fn).parameters
    settings = getattr(kernel, "kwargs", None) or vars(kernel)  # the interpreter's, or the JIT's
    plain = settings["do_not_specialize"] or ()
    unaligned = settings["do_not_specialize_on_alignment"] or ()
    unknown = {*plain, *unaligned} - set(parameters)
    assert not unknown, f"{kernel.fn.__name__} has no {unknown}"
    given = dict(zip(parameters, args, strict=False)) | kwargs
    constants = [n for n, p in parameters.items() if "constexpr" in str(p.annotation)]
    return Launch(
        kernel.fn.__name__,
        tuple((name, given[name]) for name in constants),
        tuple(
            (name, *specialization(given[name], name not in plain, name not in unaligned))
            for name in parameters
            if name not in constants
        ),
        tuple(sorted((n, v) for n, v in given.items() if n not in parameters)),
    )


@contextmanager
def recording(monkeypatch, *, run: bool = False):
    """The launches within, as a list that grows; the kernels run only if asked to."""
    from replayinfer.kernels.conv.update import _conv_update_kernel

    launches: list[Launch] = []
    kind = type(_conv_update_kernel)
    launch = kind.run

    def record(kernel, *args, grid, warmup, **kwargs):
        launches.append(describe(kernel, args, kwargs))
        return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs) if run else None

    with monkeypatch.context() as patch:
        patch.setattr(kind, "run", record)
        yield launches


def difference(have: set[Launch], want: set[Launch]) -> str:
    """What the launches of `want` that are not among `have` differ in from their nearest there."""
    lines = []
    for launch in want - have:
        parts = set(launch.constants + launch.arguments + launch.options)
        same = [h for h in have if h.kernel == launch.kernel]
        near = min(
            (parts - set(h.constants + h.arguments + h.options) for h in same),
            key=len, default="no launch of it",
        )  # fmt: skip
        lines.append(f"{launch.kernel}: {near}")
    return "\n".join(sorted(lines))
