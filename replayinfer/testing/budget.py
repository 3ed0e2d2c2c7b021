"""Comparisons: within a budget that is derived, not guessed, or bit for bit.

The budget of a result is how far a plain computation in the same type is from the exact one, times
a small factor. A test that passes then means "as accurate as this type allows", at every size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def relative_error(out: Tensor, ref: Tensor, *, keep: Sequence[int] = ()) -> float:
    """Return ``||out - ref|| / ||ref||``, or the worst of it over slices.

    Parameters
    ----------
    out, ref : tensors of the same shape
    keep : axes to look at one slice at a time (the worst head, say); none means the whole tensor.
        A slice whose reference is zero counts as infinitely wrong unless it is exactly zero.

    Returns
    -------
    float
        Infinite where ``out`` holds NaN or inf: a NaN never passes a comparison.

    Raises
    ------
    ValueError
        If the shapes differ or the reference itself is not finite.
    """
    out, ref = _comparable(out, ref)
    if ref.numel() == 0:
        return 0.0
    if not torch.isfinite(out).all():
        return math.inf
    kept = sorted(axis % ref.dim() for axis in keep)
    summed = [axis for axis in range(ref.dim()) if axis not in kept]
    error, size = ((t * t).permute(*kept, *summed) for t in (out - ref, ref))
    rows = math.prod(ref.shape[axis] for axis in kept)
    error, size = error.reshape(rows, -1).sum(1).sqrt(), size.reshape(rows, -1).sum(1).sqrt()
    ratio = torch.where(error == 0, 0.0, error / size)  # zero against zero is no error
    return float(ratio.max())


def peak_error(out: Tensor, ref: Tensor) -> float:
    """Return ``max|out - ref| / max|ref|``, infinite where ``out`` holds NaN or inf."""
    out, ref = _comparable(out, ref)
    if ref.numel() == 0:
        return 0.0
    if not torch.isfinite(out).all():
        return math.inf
    error, size = float((out - ref).abs().max()), float(ref.abs().max())
    return 0.0 if error == 0 else (error / size if size else math.inf)


def assert_within_budget(
    out: Tensor,
    *,
    exact: Tensor,
    rounded: Tensor | None = None,
    factor: float = 3.0,
    floor: float | None = None,
    keep: Sequence[int] = (),
    name: str = "out",
) -> float:
    """Fail unless ``out`` is about as close to ``exact`` as its type allows.

    Two errors are held against their budgets: the norm of the difference, and its largest element
    (a norm over many elements hides a single wrong one). The budget of the norm is
    ``max(factor * error of rounded, floor)``; the largest of many rounding errors varies more from
    one honest computation to the next, so its factor is twice that.

    Parameters
    ----------
    out : the result under test
    exact : the float64 oracle's result
    rounded : the same computation done plainly in the type under test; None leaves the floor alone
    factor : how many times worse than ``rounded`` the result may be
    floor : relative error that is always granted; None means the machine epsilon of ``out``'s type
    keep : axes over which the norm is taken slice by slice, see :func:`relative_error`
    name : what to call the result in the message

    Returns
    -------
    float
        The relative error of ``out``.

    Raises
    ------
    AssertionError
        With both errors, the budgets, where they come from, and the worst element.
    """
    granted = torch.finfo(out.dtype).eps if floor is None else floor
    errors = {"norm": relative_error(out, exact, keep=keep), "peak": peak_error(out, exact)}
    plain = {"norm": 0.0, "peak": 0.0}
    if rounded is not None:
        plain = {
            "norm": relative_error(rounded, exact, keep=keep),
            "peak": peak_error(rounded, exact),
        }
        if not all(map(math.isfinite, plain.values())):
            raise ValueError("rounded: got NaN or inf; allowed finite, or it is no budget")
    factors = {"norm": factor, "peak": 2 * factor}
    budgets = {kind: max(factors[kind] * plain[kind], granted) for kind in errors}
    if any(errors[kind] > budgets[kind] for kind in errors):
        lines = [
            f"{kind} error {errors[kind]:.3e}, budget {budgets[kind]:.3e}"
            f" = max({factors[kind]:g} x {plain[kind]:.3e}, {granted:.3e})"
            for kind in errors
        ]
        worst = _worst_element(out, exact)
        raise AssertionError(f"{name}: too far from exact\n  " + "\n  ".join([*lines, worst]))
    return errors["norm"]


def assert_bitwise_equal(got: Tensor, want: Tensor, name: str = "tensor") -> None:
    """Fail unless type, shape and every bit are equal: -0 is not 0, a NaN equals its own bits."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(
            f"{name}: got {got.dtype} {list(got.shape)}, want {want.dtype} {list(want.shape)}"
        )
    differs = bits(got) != bits(want)
    if differs.any():
        raise AssertionError(f"{name}: {first_differences(got, want, differs)}")


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as signed integers of the same width (bool as it is)."""
    if tensor.dtype == torch.bool:
        return tensor
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(width[tensor.element_size()])


def first_differences(got: Tensor, want: Tensor, differs: Tensor, count: int = 3) -> str:
    """Describe where two tensors differ: how many elements, and the first few of them."""
    places = differs.nonzero()
    lines = [f"{len(places)} of {got.numel()} elements differ"]
    for place in places[:count]:
        index = tuple(int(i) for i in place)
        lines.append(f"at {index}: got {_show(got, index)}, want {_show(want, index)}")
    return "\n    ".join(lines)


def _show(tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor[index].item()
    if not tensor.dtype.is_floating_point:
        return str(value)
    digits = 2 * tensor.element_size()
    pattern = int(bits(tensor[index]).item()) & (16**digits - 1)
    return f"{value:.9g} (0x{pattern:0{digits}x})"


def _worst_element(out: Tensor, exact: Tensor) -> str:
    got, want = out.detach().double(), exact.detach().double()
    error = torch.nan_to_num((got - want).abs(), nan=math.inf, posinf=math.inf)
    flat = int(error.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), out.shape))
    broken = int((~torch.isfinite(got)).sum())
    note = f"; {broken} of {out.numel()} elements are not finite" if broken else ""
    return f"worst at {index}: got {got[index]:.9g}, want {want[index]:.9g}{note}"


def _comparable(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    if out.shape != ref.shape:
        raise ValueError(f"out: got {list(out.shape)}; allowed {list(ref.shape)}, as the reference")
    ref = ref.detach().double()
    if not torch.isfinite(ref).all():
        raise ValueError("ref: got NaN or inf; allowed finite values, or it is no reference")
    return out.detach().double().to(ref.device), ref
