"""The direct kernels in Triton's interpreter, against the torch backend."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.backends.torch import TorchBackend
from replayinfer.backends.triton import TritonBackend
from replayinfer.kernels.launch import lookup as launch
from replayinfer.testing import (
    assert_no_poison,
    initial_states,
    layer_inputs,
    layer_weights,
    poison_,
    relative_error,
)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)

# Other orders of addition in fp32, one rounding of an output, and a tie of a stored state.
FLOAT = 2e-6
OUTPUT = {torch.float32: FLOAT, torch.bfloat16: 6e-3, torch.float16: 8e-4}
STATE = {"fp32": FLOAT, "fp32_split": FLOAT, "bf16": 2e-3, "fp16": 2e-4}
LAYER = 4


class DirectOnly(TritonBackend):
    """The direct kernels; whatever folds is not under test."""

    def supports(self, pool):
        return None

    def fold(self, pool, plan):
        TorchBackend().fold(pool, plan)


@dataclass(frozen=True)
class Case:
    spec: LayerSpec
    format: str = "fp32_split"
    dtype: torch.dtype = torch.bfloat16
    gates: str = "realistic"
    z: bool = False
    layers: int = 1

    def __str__(self) -> str:
        s, (_, shared) = self.spec, self.spec.shared_heads
        kind = f"{s.family}-{s.heads}x{s.dim}x{s.state}/{shared}-{self.format}-{self.gates}"
        rest = [v for n, v in vars(s).items() if n in ("gate", "beta", "norm", "dt_softplus")]
        return "-".join([kind, str(self.dtype)[6:], *map(str, rest), "z" * self.z])


MAMBA2 = Case(Mamba2Spec(heads=2, dim=8, state=16))
GDN = Case(GDNSpec(heads=2, dim=8, state=16, key_heads=1))
KDA = Case(KDASpec(heads=2, dim=8, state=16, key_heads=1))


def vary(base: Case, **choices) -> list[Case]:
    cases = []
    for name, values in choices.items():
        for value in values:
            if hasattr(base, name):
                cases.append(dataclasses.replace(base, **{name: value}))
            else:
                spec = dataclasses.replace(base.spec, **{name: value})
                cases.append(dataclasses.replace(base, spec=spec))
    return cases


COMMON = {
    "format": ["fp32", "fp32_split", "bf16", "fp16"],
    "dtype": [torch.float32, torch.float16],
    "gates": ["extreme", "strong"],
    "dim": [64, 80],
    "state": [24, 128],
}
CASES = [
    *vary(
        MAMBA2,
        **COMMON,
        layers=[2],
        groups=[2],
        z=[True],
        dt_softplus=[False],
        dt_limit=[(0.01, 0.05)],
    ),
    *vary(GDN, **COMMON, key_heads=[2], gate=["log"], beta=["sigmoid2", "given"], norm=["none"]),
    *vary(KDA, **COMMON, key_heads=[2], gate=["log", "bounded"], beta=["given"], norm=["none"]),
]


def packed(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as parts of one projection: every stride but the last is another one."""
    wide = {
        name: torch.full((*t.shape[:2], t[0, 0].numel() + 4), torch.nan, dtype=t.dtype)
        for name, t in inputs.items()
    }
    for name, t in inputs.items():
        wide[name][..., : t[0, 0].numel()] = t.flatten(2)
    return {n: wide[n][..., : t[0, 0].numel()].unflatten(2, t.shape[2:]) for n, t in inputs.items()}


def decode(case: Case, backend, seed: int, steps: int = 3):
    """Outputs, states, and the bits of every page that the steps may not touch."""
    rng = torch.Generator().manual_seed(seed)
    spec, n, bucket = case.spec, 3, 4
    layers = range(LAYER, LAYER + case.layers)
    pool = StatePool(spec, layers, n + 1, format=case.format, dtype=case.dtype, page_rows=2)
    for field in pool.inputs.fields.values():
        field.fill_(float("nan"))
    poison_(pool.checkpoints.storage)
    weights = layer_weights(spec, rng, case.gates)
    for layer in pool.layers:
        pool.bind(layer, **weights)
    seqs = pool.alloc(n)
    states = initial_states(spec, n, rng)
    taps = torch.zeros(spec.conv_channels, 3)
    for seq, state in zip(seqs, states, strict=True):
        both = dict.fromkeys(pool.layers, state)
        pool.seed(seq, both, tokens=1, conv=dict.fromkeys(pool.layers, taps))
    before = {name: t.clone() for name, t in pool.inputs.fields.items()}
    storage = pool.checkpoints.storage.clone()
    wrapper = ReplayDecodeWrapper(pool, backend=backend, direct="always")
    outputs = []
    for step in range(steps):
        windows = [1, int(step != 1), 0]
        inputs = layer_inputs(spec, 1, bucket, case.dtype, rng, case.gates)
        if case.z:
            inputs["z"] = torch.randn(inputs["x"].shape, generator=rng).to(case.dtype)
        for t in inputs.values():  # what a pad or an empty window brings may be anything
            t[torch.tensor([*windows, 0]) == 0] = float("nan")
        plan = wrapper.plan(seqs, windows, bucket=bucket)
        assert plan.direct
        wrapper.fold()
        shape = (bucket, 1, spec.heads, spec.dim)
        for layer in pool.layers:
            out = torch.full(shape, float("nan"), dtype=case.dtype)
            y = wrapper.run(layer, out=out, **packed(inputs))
            assert_no_poison(y, "outputs")
            assert not y[torch.tensor([*windows, 0]) == 0].any(), "a pad has an output"
            outputs.append(y.float())
        wrapper.commit()
    for name, field in pool.inputs.fields.items():
        assert torch.equal(field.nan_to_num(), before[name].nan_to_num()), f"rows of {name}"
        assert torch.equal(field.isnan(), before[name].isnan()), f"rows of {name}"
    moved = torch.zeros(storage.shape[1], dtype=torch.bool)
    moved[torch.from_numpy(pool.cursors.checkpoint[:2]).long()] = True
    after = pool.checkpoints.storage
    raw = {4: torch.int32, 2: torch.int16}[storage.element_size()]
    assert torch.equal(after[:, ~moved].view(raw), storage[:, ~moved].view(raw)), "another page"
    pages = torch.from_numpy(pool.cursors.checkpoint[:2]).long()
    return torch.stack(outputs), pool.checkpoints.load(slice(None), pages)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_reference(case, seed):
    (y, state), (want_y, want) = (decode(case, b, seed) for b in (DirectOnly(), "torch"))
    assert relative_error(y, want_y) <= OUTPUT[case.dtype]
    assert relative_error(state, want) <= STATE[case.format]
    assert relative_error(state, want, keep=[0, 1, 2]) <= 8 * STATE[case.format]  # every head


@interpreted
@pytest.mark.parametrize(("dim", "rows"), [(6, 1), (20, 16), (20, 64)])
@pytest.mark.parametrize("base", [MAMBA2, GDN, KDA], ids=str)
def test_blocks_of_any_size(base, dim, rows, seed, monkeypatch):
    """One row, a block that does not divide the head size, and one for all of it."""
    case = dataclasses.replace(base, spec=dataclasses.replace(base.spec, dim=dim))
    want = decode(case, "torch", seed, steps=2)[1]
    config = launch.LaunchConfig(num_warps=1, rows=rows)
    monkeypatch.setattr(launch, "lookup", lambda *args: config)
    assert relative_error(decode(case, DirectOnly(), seed, steps=2)[1], want) <= FLOAT


@interpreted
@pytest.mark.parametrize("format", ["fp32", "fp32_split", "bf16", "fp16"])
def test_switching_with_replay_and_forks(format, rng):
    """Mamba-2's own folds: of rows, and of none where a sharer gets a page of its own."""
    spec = Mamba2Spec(heads=2, dim=8, state=16, groups=2, conv_width=0)
    weights, start = layer_weights(spec, rng), initial_states(spec, 1, rng)[0]
    inputs = layer_inputs(spec, 12, 2, torch.float32, rng)
    got = []
    for backend in ("torch", "triton"):
        pool = StatePool(
            spec, [LAYER], 3, capacity=4, format=format, page_rows=2, checkpoint_pages=6
        )
        pool.bind(LAYER, **weights)
        wrapper = ReplayDecodeWrapper(pool, backend=backend)
        (a,) = pool.alloc()
        pool.seed(a, {LAYER: start}, tokens=1)
        outputs = []

        def step(seqs, t, direct, pool=pool, wrapper=wrapper, outputs=outputs):
            wrapper.plan(seqs, direct=direct)
            wrapper.fold()
            token = {name: x[: len(seqs), t : t + 1] for name, x in inputs.items()}
            outputs.append(wrapper.run(LAYER, **token).flatten(1))
            wrapper.commit()

        for t, direct in enumerate([True, False, False, True]):
            step([a], t, direct)
        (b,) = pool.fork(a)  # no rows: the direct step copies the page for both
        sibling = wrapper.materialize(a)
        step([b], 4, True)
        assert torch.equal(wrapper.materialize(a), sibling)
        for t, direct in enumerate([True, True, False, True, False], start=5):
            step([a, b], t, direct)
        (c,) = pool.fork(b)  # a row each: it is folded into a page of its own
        sibling = wrapper.materialize(b)
        step([c], 10, True)
        assert torch.equal(wrapper.materialize(b), sibling)
        assert wrapper.counters.direct_steps == 7
        states = [wrapper.materialize(seq) for seq in (a, b, c)]
        got.append((torch.cat([y.flatten() for y in outputs]), torch.stack(states)))
    (want_y, want), (y, state) = got
    bound = max(STATE[format], 2e-3 if format == "fp32_split" else 0)  # replay reads it in bf16
    assert relative_error(y, want_y) <= bound
    assert relative_error(state, want) <= STATE[format]


@pytest.mark.parametrize("batch", [1, 64, 4096])
@pytest.mark.parametrize("fmt", ["fp32", "fp32_split", "bf16", "fp16"])
def test_a_launch_choice_always_exists(fmt, batch):
    for case in (MAMBA2, GDN, KDA):
        for dim, state in ((64, 128), (80, 128), (128, 256), (3, 5)):
            spec = dataclasses.replace(case.spec, dim=dim, state=state)
            choice = launch.lookup("direct", spec, fmt, batch, torch.device("cpu"))
            assert choice is not None
            assert choice.rows & (choice.rows - 1) == 0
            assert choice.rows * state <= 8192  # float32 values that two warps hold
            assert choice.rows <= 16 or -(-dim // choice.rows) * choice.rows <= 1.25 * dim


def test_direct_is_preferred_up_to_what_was_measured(monkeypatch):
    spec = MAMBA2.spec
    limits = {launch.shape_key("direct", spec, "fp32"): 4}
    monkeypatch.setattr(launch, "_direct_limits", lambda name: limits)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some")
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [launch.prefers_direct(spec, "fp32", b, gpu) for b in (1, 4, 5)] == [True, True, False]
    assert not launch.prefers_direct(spec, "bf16", 1, gpu)  # nobody measured it
    assert not launch.prefers_direct(GDN.spec, "fp32", 1, gpu)
    assert not launch.prefers_direct(spec, "fp32", 1, cpu)
    pool = StatePool(spec, [0], 1)
    assert not TritonBackend().prefers_direct(pool, 1)
