"""Prefill with peers' chunk kernels: what they are given and what becomes of it, on stand-ins.

The stand-ins take the arguments that flash-linear-attention 0.6 and mamba-ssm 2.3 take, and walk
token by token in float32. How close their real kernels come is for tests/gpu/test_prefill.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from replayinfer import (
    GDNSpec,
    KDASpec,
    Mamba2Spec,
    ReplayDecodeWrapper,
    ReplayPrefillWrapper,
    StatePool,
    materialize,
)
from replayinfer.backends import fla, mamba_ssm
from replayinfer.testing import (
    initial_states,
    layer_inputs,
    layer_weights,
    mamba2_recurrence,
    relative_error,
)

BOUND = 1e-5  # float32 on both sides, in another order


def chunk_delta(q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first,
                cu_seqlens, cu_seqlens_cpu):  # fmt: skip
    """Both of theirs: gates and beta after their activations, ``q`` and ``k`` normalised."""
    assert output_final_state
    assert state_v_first
    assert q.shape[0] == 1
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert cu_seqlens.dtype is torch.int64
    ratio = v.shape[2] // k.shape[2]
    y, states = torch.full(v.shape, float("nan")), initial_state.clone()
    for i in range(len(cu_seqlens) - 1):
        for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1])):
            decay = torch.exp(g[0, t] if g.dim() == 4 else g[0, t][:, None])  # a head, or a channel
            kt, qt = (x[0, t].repeat_interleave(ratio, 0)[:, None] for x in (k, q))
            s = states[i] * decay[:, None]
            u = beta[0, t][:, None] * (v[0, t] - (s * kt).sum(-1))
            states[i] = s + u[..., None] * kt
            y[0, t] = scale * (states[i] * qt).sum(-1)
    return y, states


def chunk_scan(x, dt, A, B, C, chunk_size, D=None, z=None, initial_states=None,
               return_final_states=False):  # fmt: skip
    """Steps after bias and softplus; a batch of sequences of one length."""
    assert return_final_states
    assert chunk_size & (chunk_size - 1) == 0
    y, states = mamba2_recurrence(
        initial_states, x, dt, A, B, C, D, z, None, False, dtype=torch.float32
    )
    return y, states


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(fla, "_call", lambda family: chunk_delta)
    monkeypatch.setattr(mamba_ssm, "_call", lambda: chunk_scan)
    for peer in (fla.FlaPrefill, mamba_ssm.MambaSsmPrefill):
        monkeypatch.setattr(peer, "supports", lambda self, pool: self.refuses(pool))


GDN = GDNSpec(heads=4, dim=8, state=12, key_heads=2, conv_width=3)
SPECS = {
    "gdn": GDN,
    "gdn log": dataclasses.replace(GDN, gate="log", norm="none", beta="given", scale=0.4),
    "kda": KDASpec(heads=2, dim=8, state=12, key_heads=2, beta="sigmoid2", conv_width=3),
    "kda bounded": KDASpec(
        heads=2, dim=8, state=12, key_heads=2, gate="bounded", norm_eps=1e-3, conv_width=3
    ),
    "mamba2": Mamba2Spec(heads=4, dim=8, state=12, groups=2, conv_width=3),
    "mamba2 limited": Mamba2Spec(
        heads=4, dim=8, state=12, groups=2, conv_width=3, dt_limit=(0.01, 0.2)
    ),
}


class Pair:
    """Two pools with the same sequences: one is prefilled by a peer, one by the reference."""

    def __init__(self, spec, rng, format="fp32"):
        self.spec, self.rng = spec, rng
        weights = layer_weights(spec, rng)
        self.pools = []
        for _ in range(2):
            pool = StatePool(
                spec,
                [0, 1],
                max_sequences=4,
                checkpoint_pages=8,
                format=format,
                capacity=6,
                dtype=torch.float32,
            )
            for layer in (0, 1):
                pool.bind(layer, **weights)
            self.pools.append(pool)
        peer = "mamba_ssm" if spec.family == "mamba2" else "fla"
        self.wrappers = [
            ReplayPrefillWrapper(p, backend=b)
            for p, b in zip(self.pools, (peer, "torch"), strict=True)
        ]
        assert self.wrappers[0].backend.name == peer
        self.sequences = [pool.alloc(3) for pool in self.pools]

    def prefill(self, lengths):
        cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        rows = torch.randn(2, cu[-1], self.spec.conv_channels, generator=self.rng)
        inputs = [
            {
                n: t[0]
                for n, t in layer_inputs(self.spec, cu[-1], 1, torch.float32, self.rng).items()
            }
            for _ in range(2)
        ]
        results = []
        for wrapper, sequences in zip(self.wrappers, self.sequences, strict=True):
            wrapper.plan(sequences, cu)
            ys = []
            for layer in (0, 1):
                ys.append(wrapper.conv(layer, rows[layer]))
                ys.append(wrapper.run(layer, **inputs[layer]))
            wrapper.commit()
            results.append(ys)
        return results

    def check(self, results):
        for got, exact in zip(*results, strict=True):
            assert got.isfinite().all()
            assert relative_error(got, exact) <= BOUND
        for a, b in zip(*self.sequences, strict=True):
            first, second = self.pools
            assert first.tokens(a) == second.tokens(b)
            assert first.history(a) == second.history(b) == 0
            states = [state_of(p, s) for p, s in zip(self.pools, (a, b), strict=True)]
            assert relative_error(*states) <= BOUND if states[1].any() else not states[0].any()


def packed_inputs(spec, tokens, rng):
    return {n: t[0] for n, t in layer_inputs(spec, tokens, 1, torch.float32, rng).items()}


def state_of(pool, sequence):
    return materialize(pool, sequence, backend="torch")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_fresh_sequences_some_without_tokens(spec, rng):
    pair = Pair(spec, rng)
    pair.check(pair.prefill([5, 0, 3]))


@pytest.mark.parametrize("spec", [SPECS["gdn"], SPECS["kda"], SPECS["mamba2"]], ids=str)
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_sequences_that_continue_from_checkpoint_and_rows(spec, format, rng):
    """A prompt, tokens of decode that leave rows, and a second prompt; one sequence is fresh."""
    pair = Pair(spec, rng, format)
    pair.prefill([4, 2, 0])
    steps = [layer_inputs(spec, 1, 3, torch.float32, rng) for _ in range(2)]
    rows = torch.randn(2, 3, 1, spec.conv_channels, generator=rng)
    for pool, sequences in zip(pair.pools, pair.sequences, strict=True):
        decode = ReplayDecodeWrapper(pool, backend="torch", direct="never")
        decode.plan(sequences, [1, 0, 0])
        decode.fold()
        for layer in (0, 1):
            decode.conv(layer, rows[layer])
            decode.run(layer, **steps[layer])
        decode.commit()
        assert pool.history(sequences[0]) == 1
    pair.check(pair.prefill([3, 3, 2]))


@pytest.mark.parametrize("spec", [SPECS["gdn"], SPECS["mamba2"]], ids=str)
def test_pieces_give_what_the_whole_gives(spec, rng):
    tokens = 9
    inputs = packed_inputs(spec, tokens, rng)
    rows = torch.randn(tokens, spec.conv_channels, generator=rng)
    weights = layer_weights(spec, rng)
    ends = []
    for pieces in ([9], [1, 5, 3]):
        pool = StatePool(spec, [0], max_sequences=2, dtype=torch.float32)
        pool.bind(0, **weights)
        wrapper = ReplayPrefillWrapper(
            pool, backend="mamba_ssm" if spec is not SPECS["gdn"] else "fla"
        )
        sequence, outputs, at = pool.alloc(1), [], 0
        for piece in pieces:
            part = slice(at, at + piece)
            wrapper.plan(sequence, [0, piece])
            wrapper.conv(0, rows[part])
            outputs.append(wrapper.run(0, **{n: t[part] for n, t in inputs.items()}))
            wrapper.commit()
            at += piece
        ends.append((torch.cat(outputs), state_of(pool, sequence[0])))
    for got, exact in zip(*ends, strict=True):
        assert relative_error(got, exact) <= BOUND


def test_an_abort_leaves_the_sequences_as_they_were(rng):
    pair = Pair(SPECS["gdn"], rng)
    pair.prefill([4, 2, 0])
    wrapper, pool, sequences = pair.wrappers[0], pair.pools[0], pair.sequences[0]
    before = [state_of(pool, s) for s in sequences]
    wrapper.plan(sequences, [0, 2, 2, 5])
    wrapper.run(0, **packed_inputs(pair.spec, 5, rng))
    wrapper.abort()
    for sequence, state in zip(sequences, before, strict=True):
        assert torch.equal(state_of(pool, sequence), state)


def test_a_seeded_state_is_continued(rng):
    pair = Pair(SPECS["mamba2"], rng)
    state = initial_states(pair.spec, 2, rng)
    taps = torch.randn(2, pair.spec.conv_channels, 2, generator=rng)
    for pool, sequences in zip(pair.pools, pair.sequences, strict=True):
        pool.seed(sequences[1], dict(enumerate(state)), conv=dict(enumerate(taps)), tokens=7)
    pair.check(pair.prefill([0, 4, 4]))


def test_what_a_peer_does_not_compute_is_refused(rng):
    pool = StatePool(dataclasses.replace(GDN, state=512), [0], max_sequences=1)
    assert "up to 256 key channels" in fla.FlaPrefill.refuses(None, pool)
    pool = StatePool(SPECS["mamba2"], [0], max_sequences=1)
    assert "family 'mamba2'" in fla.FlaPrefill.refuses(None, pool)
    pool = StatePool(GDN, [0], max_sequences=1)
    assert "family 'gdn'" in mamba_ssm.MambaSsmPrefill.refuses(None, pool)


def test_a_peer_that_does_not_import_says_why(monkeypatch):
    def missing(*args):
        raise ImportError("No module named 'fla'\nand more")

    monkeypatch.setattr(fla, "_call", missing)
    fla._why_not.cache_clear()
    assert fla._why_not("gdn") == "does not import: ImportError: No module named 'fla'"
    fla._why_not.cache_clear()
