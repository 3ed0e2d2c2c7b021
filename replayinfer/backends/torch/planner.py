"""Plans and cursors on the device as torch operators: no loop over sequences, and no sync."""

from __future__ import annotations

import torch

from ...planner.device import DeviceStep, StepRequest
from ...planner.predicate import must_fold
from ...pools import StatePool

__all__ = ["abort_step", "accept_paths", "commit_step", "fold_step", "plan_step"]

_SLOTS = 1 << 20  # an entry below it is a slot, any other a handle, whose low bits are one


def plan_step(pool: StatePool, step: DeviceStep, request: StepRequest) -> None:
    """Write the plan of `request` into `step`; see `HostPlanner.plan` for what it is."""
    assert pool.on_device is not None
    records, out = pool.on_device.records, step.arrays
    bucket = out.slot.shape[0]
    given = _padded(request.sequences, bucket, -1).long()
    slot = given % _SLOTS
    live = (given >= 0) & (slot < records.handle.shape[0])
    slot = torch.where(live, slot, 0)
    handle = records.handle[slot]
    live &= (handle >= 0) & ((given < _SLOTS) | (given == handle))
    history = torch.where(live, records.history[slot], 0)
    if request.windows is None:
        window = torch.full_like(history, request.uniform)
    else:
        window = _padded(request.windows, bucket, 0).clamp(0, request.most).int()
    window = torch.where(live, window, 0)

    chosen = must_fold(history, window, pool.capacity)  # type: ignore[call-overload]
    if request.spread:
        chosen = chosen | _early(history, window, chosen, live, pool.capacity, request.budget)
    if request.force is not None:
        chosen = chosen | _padded(request.force, bucket, False)
    fold = chosen & (history > 0)
    page, own_page = records.checkpoint[slot], records.own_checkpoint[slot]
    if request.direct:
        fold = fold | ((history > 0) | (page != own_page)) & (window > 0)

    table, own_table = records.table[slot], records.own_table[slot]
    step.handle.copy_(torch.where(live, handle, -1))
    out.slot.copy_(torch.where(live, slot, -1))
    out.page.copy_(torch.where(live, torch.where(fold, own_page, page), -1))
    out.history.copy_(torch.where(fold, 0, history))
    out.window.copy_(window)
    place = (records.base[slot] + history) % pool.conv.ring
    out.conv_place.copy_(torch.where(live, place, 0))
    used = torch.where(fold[:, None], own_table, table)
    out.table.copy_(torch.where(live[:, None], used, -1))
    masks = _masks(request.parents, window, out.ancestors.shape[1])
    out.ancestors.copy_(torch.where(live[:, None], masks, 0))

    out.fold_count.copy_(fold.sum())
    # A fold goes to its place in the list, everything else to one more that is cut off.
    place = torch.where(fold, fold.cumsum(0) - 1, bucket)
    out.fold_source.copy_(_listed(place, page, -1))
    out.fold_target.copy_(_listed(place, own_page, -1))
    out.fold_rows.copy_(_listed(place, history, 0))
    out.fold_table.copy_(_listed(place, table, -1))


def accept_paths(pool: StatePool, step: DeviceStep, paths: torch.Tensor) -> None:
    """Write the nodes and counts of `paths`; each ends before its first wrong node."""
    out, bucket = step.arrays, step.nodes.shape[0]
    _, live = _live(pool, step)
    window = torch.where(live, out.window, 0)[:, None]
    node = torch.nn.functional.pad(
        paths.long(), (0, step.nodes.shape[1] - paths.shape[1], 0, bucket - paths.shape[0]),
        value=-1,
    )  # fmt: skip
    node = torch.where((node >= 0) & (node < window), node, -1)
    above = torch.nn.functional.pad(node, (1, 0), value=-1)[:, :-1]
    own = 1 << node.clamp_min(0)
    if out.ancestors.shape[1]:
        # What leads to a node, and nothing for no node.
        mask, before = (
            torch.where(n >= 0, out.ancestors.long().gather(1, n.clamp_min(0)), 0)
            for n in (node, above)
        )
    else:
        mask, before = own, torch.zeros_like(own)
    right = (node > above) & (mask == before | own)
    kept = right.cumprod(1).bool()
    step.nodes.copy_(torch.where(kept, node, -1))
    step.counts.copy_(kept.sum(1))


def fold_step(pool: StatePool, step: DeviceStep) -> None:
    """Move the cursors of the sequences that fold."""
    assert pool.on_device is not None
    records, planned = pool.on_device.records, step.arrays
    slot, live = _live(pool, step)
    history = records.history[slot]
    # A direct step moves a sequence to its own page where it has no rows, too.
    folded = live & ((planned.history < history) | (planned.page != records.checkpoint[slot]))
    _put(records.base, slot, folded, records.base[slot] + history)
    _put(records.history, slot, folded, planned.history)
    _put(records.checkpoint, slot, folded, planned.page)
    _put(records.table, slot, folded, planned.table)


def commit_step(
    pool: StatePool, step: DeviceStep, accepted: torch.Tensor | None, *, direct: bool = False
) -> None:
    """Advance histories, or the bases of a direct step, by the accepted counts."""
    assert pool.on_device is not None
    records, window = pool.on_device.records, step.arrays.window
    slot, live = _live(pool, step)
    counts = window
    if accepted is not None:
        counts = _padded(accepted, window.shape[0], 0).clamp_min(0).minimum(window.long()).int()
    counts = torch.where(live, counts, 0)
    step.counts.copy_(counts)
    if direct:
        _put(records.base, slot, live, records.base[slot] + counts)
        _put(records.undo, slot, live, torch.zeros_like(counts))
        return
    _put(records.history, slot, live, records.history[slot] + counts)
    _put(records.undo, slot, live, counts)


def abort_step(pool: StatePool, step: DeviceStep) -> None:
    """Drop the windows: they may have taken the oldest places in the rings."""
    assert pool.on_device is not None
    undo = pool.on_device.records.undo
    slot, live = _live(pool, step)
    room = pool.max_window - step.arrays.window
    _put(undo, slot, live, torch.minimum(undo[slot], room))


def _live(pool: StatePool, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of a step (0 for pads), and which of them still hold the planned sequence."""
    assert pool.on_device is not None
    slot = step.arrays.slot.long()
    live = slot >= 0
    slot = torch.where(live, slot, 0)
    return slot, live & (pool.on_device.records.handle[slot] == step.handle)


def _put(
    target: torch.Tensor, slot: torch.Tensor, mask: torch.Tensor, values: torch.Tensor
) -> None:
    """``target[slot[i]] = values[i]`` where `mask`, without a boolean index, which would sync."""
    longer = torch.cat([target, target[:1]])  # one more row, for entries that write nothing
    longer[torch.where(mask, slot, target.shape[0])] = values.to(target.dtype)
    target.copy_(longer[:-1])


def _masks(parents: torch.Tensor | None, window: torch.Tensor, columns: int) -> torch.Tensor:
    """`ancestor_masks` of parents ``[entries, width]``, or of chains; ``[bucket, columns]``."""
    own = 1 << torch.arange(columns, device=window.device)
    if parents is None or not columns:
        return own.cumsum(0)
    masks = own.repeat(window.shape[0], 1)
    parents = torch.nn.functional.pad(parents.long(), (0, 0, 0, window.shape[0] - len(parents)))
    for t in range(1, parents.shape[1]):  # over nodes, not over sequences
        parent = parents[:, t]
        continues = (parent >= 0) & (parent < t) & (t < window)
        above = masks.gather(1, torch.where(continues, parent, 0)[:, None])[:, 0]
        masks[:, t] |= torch.where(continues, above, 0)
    return masks


def _early(
    history: torch.Tensor,
    window: torch.Tensor,
    must: torch.Tensor,
    live: torch.Tensor,
    capacity: int,
    budget: int,
) -> torch.Tensor:
    """The folds that `policy.spread` adds: the earliest deadlines first, found by counting.

    Or those of `policy.Deadline`, if `budget` is not 0.
    """
    pace = window.clamp_min(1)
    cycle = (capacity // pace.max()).clamp_min(1)
    share = (live.sum() + cycle - 1) // cycle
    deadline = torch.where(must, 0, ((capacity - history) // pace).clamp_min(0))
    days = torch.arange(capacity + 1, device=history.device)
    due_by = deadline[:, None] <= days
    foldable = history > 0
    due = (due_by & live[:, None]).sum(0)
    if budget:
        peak = ((due + days) // (days + 1)).max()
        share = share.clamp_min(budget).maximum(peak)
    wanted = (due - share * days).max().clamp_min(0)
    # Whole deadlines while they fit; of the next one the first of the batch.
    due = (due_by & foldable[:, None]).sum(0)
    limit = (due <= wanted).sum()
    quota = wanted - torch.where(due <= wanted, due, 0).max()
    at_limit = foldable & (deadline == limit)
    chosen = foldable & (deadline < limit) | at_limit & (at_limit.cumsum(0) <= quota)
    return chosen & (wanted > must.sum())


def _padded(values: torch.Tensor, size: int, pad: int | bool) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, size - values.shape[0]), value=pad)


def _listed(place: torch.Tensor, values: torch.Tensor, pad: int) -> torch.Tensor:
    """``[bucket, ...]`` with ``values[i]`` at ``place[i]``, where that is below the bucket."""
    listed = values.new_full((values.shape[0] + 1, *values.shape[1:]), pad)
    listed[place] = values
    return listed[:-1]
