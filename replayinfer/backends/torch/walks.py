"""Steps on a caller's own states in plain torch: the reference for the kernels of that name.

Arguments as in ``kernels.mamba2.walk``, ``kernels.delta.walk`` and ``kernels.mamba2.ring``.
"""

from __future__ import annotations

import torch

from ...formats import FORMATS, to_storage
from .gates import norm_scale, sigmoid, silu, softplus

__all__ = ["delta_walk", "mamba2_ring", "mamba2_walk"]

_FP16 = FORMATS["fp16"]


def mamba2_walk(
    y: torch.Tensor,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    a: torch.Tensor,
    d_skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    batch: int,
    window: int,
    starts: torch.Tensor | None,
    source: torch.Tensor | None,
    accepted: torch.Tensor | None,
    target: torch.Tensor | None,
    each: torch.Tensor | None,
    entry: torch.Tensor | None,
    scale: torch.Tensor | None,
    each_scale: torch.Tensor | None,
    write: str,
    pad: int,
    dt_softplus: bool,
) -> None:
    """Token after token, every sequence by itself."""
    slots = state.shape[0]
    ratio = state.shape[1] // b.shape[-2]
    bounds = None if starts is None else starts.tolist()
    sources = _rows(source, batch)
    targets = sources if target is None else _rows(target, batch)
    columns = [0] * batch if accepted is None else accepted.tolist()
    entries = [s[0] for s in sources] if entry is None else entry.tolist()
    finals: list[tuple[int, torch.Tensor]] = []
    for i in range(batch):
        where, tokens = _tokens(i, window, bounds)
        slot = sources[i][min(max(columns[i] - 1, 0), len(sources[i]) - 1)]
        live = slot != pad and 0 <= slot < slots
        s = torch.zeros(state.shape[1:], device=state.device)
        if live:
            s = state[slot].float()
            s = s if scale is None else s * scale[slot][..., None]
        for t in range(tokens):
            at = where(t)
            xt, bt, ct = x[at].float(), _heads(b[at], ratio), _heads(c[at], ratio)
            step = _step(dt[at], dt_bias, dt_softplus)
            s = torch.exp(a.float() * step)[:, None, None] * s
            s = s + (step[:, None] * xt)[..., None] * bt[:, None]
            out = (s * ct[:, None]).sum(-1)
            out = out if d_skip is None else out + d_skip.float()[:, None] * xt
            y[at] = (out if z is None else out * silu(z[at].float())).to(y.dtype)
            if not live:
                continue
            if each is not None:
                place = entries[i] if entry is not None else slot
                if 0 <= place < each.shape[0]:
                    _store(each, each_scale, (place, t), s)
            if write == "each":
                finals.append((targets[i][t], s))
        if live and tokens and write == "last":
            finals.append((slot if target is None else targets[i][0], s))
    for slot, s in finals:  # every source is read before anything is written
        if slot != pad and 0 <= slot < slots:
            _store(state, scale, (slot,), s)


def mamba2_ring(
    y: torch.Tensor,
    state: torch.Tensor,
    row_x: torch.Tensor,
    row_b: torch.Tensor,
    row_dt: torch.Tensor,
    start: torch.Tensor,
    history: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    z: torch.Tensor | None,
    a: torch.Tensor,
    d_skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    batch: int,
    window: int,
    slot: torch.Tensor | None,
    starts: torch.Tensor | None,
    scale: torch.Tensor | None,
    pad: int,
    dt_softplus: bool,
) -> None:
    """The history token after token, then the window; the state is written between the two."""
    length, slots = row_x.shape[2], state.shape[0]
    ratio = state.shape[1] // b.shape[-2]
    bounds = None if starts is None else starts.tolist()
    names = list(range(batch)) if slot is None else slot.tolist()
    for i, name in enumerate(names):
        where, tokens = _tokens(i, window, bounds)
        if tokens <= 0:
            continue
        if name == pad or not 0 <= name < slots:
            for t in range(tokens):
                y[where(t)] = 0
            continue
        first = int(start[name]) % length
        rows = min(max(int(history[name]), 0), length - window)
        s = state[name].float()
        s = s if scale is None else s * scale[name][..., None]
        for j in range(rows):
            r = (first + j) % length
            step = row_dt[name, :, r]
            s = torch.exp(a.float() * step)[:, None, None] * s
            xr = step[:, None] * row_x[name, :, r].float()
            s = s + xr[..., None] * _heads(row_b[name, :, r], ratio)[:, None]
        if rows + tokens > length - window:
            _store(state, scale, (name,), s)
        for t in range(tokens):
            at, r = where(t), (first + rows + t) % length
            xt, ct = x[at].float(), _heads(c[at], ratio)
            step = _step(dt[at], dt_bias, dt_softplus)
            s = torch.exp(a.float() * step)[:, None, None] * s
            s = s + (step[:, None] * xt)[..., None] * _heads(b[at], ratio)[:, None]
            out = (s * ct[:, None]).sum(-1)
            out = out if d_skip is None else out + d_skip.float()[:, None] * xt
            y[at] = (out if z is None else out * silu(z[at].float())).to(y.dtype)
            row_x[name, :, r] = x[at]
            row_b[name, :, r] = b[at]
            row_dt[name, :, r] = step


def delta_walk(
    y: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    each: torch.Tensor | None,
    write: str,
    norm: bool,
    norm_eps: float,
    query_scale: float,
    keep_pads: bool,
) -> None:
    """Token after token, every sequence by itself."""
    batch, window = v.shape[:2]
    slots, ratio = state.shape[0], v.shape[2] // k.shape[2]
    sources = list(range(batch)) if source is None else source.tolist()
    targets = [[s] for s in sources] if target is None else target.tolist()
    q, k = q.float(), k.float()
    if norm:
        q, k = (m * norm_scale(m, norm_eps)[..., None] for m in (q, k))
    q = (q * query_scale).repeat_interleave(ratio, dim=2)
    k = k.repeat_interleave(ratio, dim=2)
    rate = torch.exp(a_log.float()).clamp_max(torch.finfo(torch.float32).max)
    decay = torch.exp(-rate * softplus(gate.float() + dt_bias.float()))
    strength = sigmoid(beta.float())
    finals: list[tuple[int, torch.Tensor]] = []
    for i, slot in enumerate(sources):
        if not 0 <= slot < slots:
            if not keep_pads:
                y[i] = 0
            continue
        s = state[slot].float()
        for t in range(window):
            s = decay[i, t, :, None, None] * s
            kt = k[i, t, :, None]
            u = strength[i, t, :, None] * (v[i, t].float() - (s * kt).sum(-1))
            s = s + u[..., None] * kt
            y[i, t] = (s * q[i, t, :, None]).sum(-1).to(y.dtype)
            if each is not None:
                _store(each, None, (i, t), s)
            if write in ("each", "all"):
                finals.append((targets[i][t], s))
        if write in ("last", "all"):
            finals.append((targets[i][window if write == "all" else 0], s))
    for slot, s in finals:  # every source is read before anything is written
        if 0 <= slot < slots:
            _store(state, None, (slot,), s)


class _Tokens:
    """Index of token ``t`` of a sequence in ``[batch, window, ...]`` or in packed inputs."""

    def __init__(self, sequence: int | None, first: int) -> None:
        self.sequence, self.first = sequence, first

    def __call__(self, t: int) -> tuple[int, ...]:
        return (self.first + t,) if self.sequence is None else (self.sequence, t)


def _tokens(i: int, window: int, bounds: list[int] | None) -> tuple[_Tokens, int]:
    if bounds is None:
        return _Tokens(i, 0), window
    return _Tokens(None, bounds[i]), min(bounds[i + 1] - bounds[i], window)


def _rows(index: torch.Tensor | None, batch: int) -> list[list[int]]:
    return [[i] for i in range(batch)] if index is None else index.tolist()


def _heads(per_group: torch.Tensor, ratio: int) -> torch.Tensor:
    return per_group.float().repeat_interleave(ratio, dim=0)


def _step(dt: torch.Tensor, bias: torch.Tensor | None, with_softplus: bool) -> torch.Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return softplus(dt) if with_softplus else dt


def _store(
    target: torch.Tensor, scale: torch.Tensor | None, place: tuple[int, ...], s: torch.Tensor
) -> None:
    """A state in the type of `target`; integers get a scale for each row."""
    if scale is None:
        target[place] = to_storage(s, _FP16) if target.dtype is torch.float16 else s.to(
            target.dtype
        )  # fmt: skip
        return
    largest = float(torch.iinfo(target.dtype).max)
    size = s.abs().amax(-1)
    up = torch.where(size == 0, 1.0, largest / size)
    target[place] = torch.round(s * up[..., None]).clamp(-largest, largest).to(target.dtype)
    scale[place] = 1.0 / up
