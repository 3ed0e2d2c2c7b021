"""SGLang's prefill and decode kernels of recurrent layers in plain torch, for a CPU."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F


def install() -> None:
    _projections()
    _gdn()
    _mamba2()
    _tracking()


def conv_fn(
    x, weight, bias=None, activation=None, conv_states=None, has_initial_state=None,
    cache_indices=None, query_start_loc=None, seq_lens_cpu=None, **options,
):  # fmt: skip
    """The causal convolution over packed sequences ``[channels, tokens]``."""
    taps = weight.shape[1] - 1
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            continue
        slot = int(cache_indices[n])
        before = torch.zeros(x.shape[0], taps)
        if has_initial_state is not None and bool(has_initial_state[n]):
            before = conv_states[slot].float()
        rows = torch.cat([before, x[:, start:stop].float()], 1)
        y = F.conv1d(
            rows[None], weight.float()[:, None], None if bias is None else bias.float(),
            groups=x.shape[0],
        )[0]  # fmt: skip
        out[:, start:stop] = (F.silu(y) if activation in ("silu", "swish", True) else y).to(x.dtype)
        conv_states[slot] = rows[:, -taps:].to(conv_states.dtype)
    return out


def conv_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
    intermediate_conv_window=None, intermediate_state_indices=None, **options,
):  # fmt: skip
    """The causal convolution of one token a sequence ``[batch, channels]``, or of several.

    Of several, ``[batch, channels, tokens]``, the windows after each are kept apart, and the state
    is left as it is.
    """
    slots = conv_state_indices.long()
    live = slots >= 0
    at = slots.clamp(min=0)
    tokens = x if x.dim() == 3 else x[:, :, None]
    taps = weight.shape[-1]
    rows = torch.cat([conv_state[at].float(), tokens.float()], -1).unfold(-1, taps, 1)
    y = (rows * weight.float()[:, None]).sum(-1)
    if bias is not None:
        y = y + bias.float()[:, None]
    if activation in ("silu", "swish", True):
        y = F.silu(y)
    after = rows[..., 1:]  # [batch, channels, tokens, taps - 1]
    if x.dim() == 3:
        kept = intermediate_state_indices.long()[live]
        intermediate_conv_window[kept] = after[live].transpose(1, 2).to(conv_state.dtype)
        return torch.empty_like(x).copy_(y)  # of the input's strides
    conv_state[at[live]] = after[live][:, :, 0].to(conv_state.dtype)
    return y[..., 0].to(x.dtype)


def _projections() -> None:
    """Before a model imports it."""
    import sglang.kernels.ops.attention.triton_gdn_fused_proj as projections

    def split(qkvz, ba, key_heads, heads, dim_k, dim_v):
        ratio = heads // key_heads
        sizes = [dim_k, dim_k, ratio * dim_v, ratio * dim_v]
        *qkv, z = qkvz.unflatten(1, (key_heads, -1)).split(sizes, 2)
        b, a = ba.unflatten(1, (key_heads, -1)).split(ratio, 2)
        z = z.reshape(len(z), heads, dim_v)
        return torch.cat([part.flatten(1) for part in qkv], 1), z, b.flatten(1), a.flatten(1)

    def split_contiguous(qkvz, ba, key_heads, heads, dim_k, dim_v):
        values = heads * dim_v
        qkv, z = qkvz.split([qkvz.shape[1] - values, values], 1)
        b, a = (gate.contiguous() for gate in ba.split(heads, 1))
        return qkv.contiguous(), z.reshape(-1, heads, dim_v), b, a

    projections.fused_qkvzba_split_reshape_cat = split
    projections.fused_qkvzba_split_reshape_cat_contiguous = split_contiguous


def _gdn() -> None:
    import sglang.srt.layers.attention.linear.gdn_backend as backend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    def gating(a_log, a, b, dt_bias, *args, **kwargs):
        g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        return g[None], torch.sigmoid(b.float())[None]

    def extend(
        self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **options
    ):  # fmt: skip
        ratio = v.shape[2] // q.shape[2]
        q = F.normalize(q[0].float(), dim=-1) * q.shape[-1] ** -0.5
        k = F.normalize(k[0].float(), dim=-1)
        q, k = (x.repeat_interleave(ratio, 1) for x in (q, k))
        out, chunks = torch.zeros_like(v), []
        bounds = query_start_loc.tolist()
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            slot = int(cache_indices[n])
            state = ssm_states[slot].float().clone()
            for t in range(start, stop):
                if (t - start) % 64 == 0:
                    chunks.append(state.clone())
                state = state * g[0, t].float().exp()[:, None, None]
                seen = torch.einsum("hvk,hk->hv", state, k[t])
                u = beta[0, t].float()[:, None] * (v[0, t].float() - seen)
                state = state + u[:, :, None] * k[t][:, None, :]
                out[0, t] = torch.einsum("hvk,hk->hv", state, q[t]).to(out.dtype)
            if slot >= 0:
                ssm_states[slot] = state.to(ssm_states.dtype)
        return out, None, torch.stack(chunks)[None] if chunks else None

    def packed_decode(
        self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices,
        num_v_heads, head_v_dim, **options,
    ):  # fmt: skip
        batch = mixed_qkv.shape[0]
        dim_k = ssm_states.shape[-1]
        keys = (mixed_qkv.shape[1] - num_v_heads * head_v_dim) // 2
        q, k, v = mixed_qkv.float().split([keys, keys, num_v_heads * head_v_dim], 1)
        ratio = num_v_heads // (keys // dim_k)
        q = F.normalize(q.view(batch, -1, dim_k), dim=-1).repeat_interleave(ratio, 1) * scale
        k = F.normalize(k.view(batch, -1, dim_k), dim=-1).repeat_interleave(ratio, 1)
        v = v.view(batch, num_v_heads, head_v_dim)
        g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        slots = cache_indices.long()
        live = slots >= 0
        state = ssm_states[slots.clamp(min=0)].float() * g.exp()[:, :, None, None]
        u = torch.sigmoid(b.float())[:, :, None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
        state = state + u[..., None] * k[:, :, None, :]
        ssm_states[slots[live]] = state[live].to(ssm_states.dtype)
        y = torch.einsum("bhvk,bhk->bhv", state, q)
        y = torch.where(live[:, None, None], y, 0.0)
        return y.to(mixed_qkv.dtype)[None]

    TritonGDNKernel.extend = extend
    TritonGDNKernel.packed_decode = packed_decode
    backend.causal_conv1d_fn = conv_fn
    backend.causal_conv1d_update = conv_update
    backend.fused_gdn_gating = gating


def _mamba2() -> None:
    import sglang.srt.layers.attention.mamba.mamba as mixer
    from sglang.kernels.ops.mamba.triton_ops.ssu_dispatch import TritonSSUBackend

    def step(state, x, dt, a, b, c, d):
        """One token: state ``[h, p, n]``, x ``[h, p]``, dt ``[h]``, b and c ``[g, n]``."""
        ratio = x.shape[-2] // b.shape[-2]
        b, c = (v.float().repeat_interleave(ratio, -2) for v in (b, c))
        x, decay = x.float(), torch.exp(a * dt)
        state = state * decay[..., None, None] + (dt[..., None] * x)[..., None] * b[..., None, :]
        return state, (state * c[..., None, :]).sum(-1) + d.float()[:, None] * x

    def scan(
        x, dt, A, B, C, chunk_size, D=None, dt_bias=None, cu_seqlens=None, initial_states=None,
        track_seq_idx=None, track_end_locs=None, out=None, state_dtype=None, **options,
    ):  # fmt: skip
        dt = F.softplus(dt[0].float() + dt_bias.float())
        tokens = x.shape[1]
        before = [None] * (tokens + 1)
        finals = []
        bounds = cu_seqlens.tolist()
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            state = torch.zeros(x.shape[2], x.shape[3], B.shape[3])
            if initial_states is not None:
                state = initial_states[n].float()
            for t in range(start, stop):
                before[t] = state
                state, y = step(state, x[0, t], dt[t], A.float(), B[0, t], C[0, t], D)
                out[0, t] = y.to(out.dtype)
            finals.append(state)
        grid = torch.stack([before[t] for t in range(0, tokens, chunk_size)])[None]
        tracked = None
        if track_end_locs is not None and track_end_locs.numel():
            tracked = torch.stack([before[t] for t in track_end_locs.tolist()])[None]
        return grid, torch.stack(finals).to(state_dtype), tracked

    def update(
        self, state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
        state_batch_indices=None, out=None, **options,
    ):  # fmt: skip
        slots = state_batch_indices.long()
        for i, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            rate = F.softplus(dt[i, :, 0].float() + dt_bias[:, 0].float())
            new, y = step(state[slot].float(), x[i], rate, A[:, 0, 0], B[i], C[i], D[:, 0])
            state[slot] = new.to(state.dtype)
            out[i] = y.to(out.dtype)

    for name in ("causal_conv1d_fn", "causal_conv1d_fn_triton"):
        setattr(mixer, name, conv_fn)
    for name in ("causal_conv1d_update", "causal_conv1d_update_triton"):
        setattr(mixer, name, conv_update)
    mixer.mamba_chunk_scan_combined = scan
    TritonSSUBackend.__call__ = update


def _tracking() -> None:
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as backend

    def all_layers(conv, ssm, slots, mask, targets, batch, check_freed_slots=False):
        chosen = mask[:batch] & (slots[:batch] >= 0)
        source, target = slots[:batch][chosen].long(), targets[:batch][chosen].long()
        conv[:, target] = conv[:, source]
        ssm[:, target] = ssm[:, source]

    def one_layer(conv, ssm, slots, mask, targets, batch, check_freed_slots=False):
        all_layers(conv[None], ssm[None], slots, mask, targets, batch)

    backend.track_mamba_states_all_layers = all_layers
    backend.track_mamba_states_if_needed = one_layer
