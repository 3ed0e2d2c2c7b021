"""What the backend launches for a shape, format and bucket: kernels, grids, constants, options.

Found by calling the backend with the launches left out, so it cannot differ from what it does. The
same kernel is compiled once more for every dtype of the inputs and outputs that are passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...formats import CheckpointFormat
from ...planner import HostPlanner
from ...pools import StatePool
from ...spec import LayerSpec
from .warmup import calls

if TYPE_CHECKING:
    from replayinfer.kernels.launch.dry import DryLaunch

__all__ = ["Variant", "variants"]


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched.

    Attributes
    ----------
    op : {"fold", "conv", "readout", "direct", "materialize", "compact"}
        The operation of the backend that launches it.
    launch : DryLaunch
        The kernel's name, grid, constexpr arguments, and warps and registers.
    """

    op: str
    launch: DryLaunch


def variants(
    spec: LayerSpec,
    format: str | CheckpointFormat,
    capacity: int,
    page_rows: int | None,
    bucket: int,
    *,
    window: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> list[Variant]:
    """What decoding launches, by the launch table of `device` or the rule, each once.

    Parameters
    ----------
    spec, format, capacity, page_rows, dtype
        As of the pool.
    bucket, window : int
        As of the plan.
    device : torch.device or str
        A pool of one sequence and one layer is made there. A CPU has no table.

    Notes
    -----
    With and without the optional inputs, and for direct steps whether or not they pay.
    """
    from replayinfer.kernels.launch.dry import dry_launches

    from . import TritonBackend

    pool = StatePool(
        spec, [0], 1, capacity=capacity, max_window=window, format=format, dtype=dtype,
        page_rows=page_rows, device=device,
    )  # fmt: skip
    backend, found = TritonBackend(), list[Variant]()
    for direct in (False, True) if window == 1 else (False,):
        planner = HostPlanner(pool)
        plan = planner.plan([], bucket=bucket, window=window, direct=direct)
        for op, call in calls(backend, pool, plan, None, None):
            with dry_launches() as launches:
                call()
            found += [v for v in (Variant(op, n) for n in launches) if v not in found]
        planner.abort(plan)
    return found
