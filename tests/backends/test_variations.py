"""The model's own variations: gates, limits, norms, scales, betas, skip and output gate."""

import math

import pytest
import torch

from replayinfer.testing import assert_bitwise_equal, assert_within_budget

from .world import BASES, LAYER, World, vary

CASES = vary(
    BASES,
    # Mamba-2
    z=[True],
    dt_softplus=[False],
    dt_limit=[(0.0, 0.05), (0.02, math.inf), (0.01, 0.1)],
    # Delta rule
    beta=["sigmoid", "sigmoid2", "given"],
    norm=["none"],
    norm_eps=[1e-2],
    gate=["log"],
    scale=[1.0, 0.37],
)
CASES = [case for case in CASES if not case.z or case.spec.family == "mamba2"]
CASES += [
    base.but(gate="bounded", lower_bound=bound)
    for base in BASES
    for bound in (-5.0, -0.25)
    if base.spec.family == "kda"
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gates", ["realistic", "extreme"])
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_variation(case, gates, format, rng):
    World(case.but(gates=gates, format=format, tokens=25), rng).decode().check()


@pytest.mark.parametrize("case", BASES, ids=str)
def test_default_weights(case, rng):
    optional = {f.name for f in case.spec.weight_fields if f.default is not None}
    drawn = World(case, rng).weights
    weights = {name: w for name, w in drawn.items() if name not in optional}
    assert len(weights) < len(drawn)
    World(case, rng, weights=weights).decode().check()


@pytest.mark.parametrize("case", BASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_float_type(case, dtype, rng):
    drawn = World(case, rng).weights
    weights = {name: w.to(dtype).float() for name, w in drawn.items()}
    world = World(case, rng, weights=weights)
    world.pool.bind(LAYER, **{name: w.to(dtype) for name, w in weights.items()})
    world.decode().check()


# The raw steps whose softplus is neither NaN nor cut to 0 or to the step itself.
EDGES = [-80.0, -40.0, -20.0, -17.0, -1.0, 0.0, 15.0, 21.0, 80.0]


@pytest.mark.parametrize("case", BASES, ids=str)
def test_softplus_over_its_range(case, rng):
    """One head per raw step, with a rate that makes its log decay -1: then every bit shows."""
    shared, _ = case.spec.shared_heads
    case = case.but(heads=len(EDGES), **{shared: 1}, tokens=3, batch=2)
    edges = torch.tensor(EDGES)
    rate = 1 / torch.nn.functional.softplus(edges.double(), threshold=800)
    world = World(case, rng)
    raw = "dt" if "dt" in world.stream else "a"
    shape = world.stream[raw].shape
    per_head = edges.view(-1, *(1,) * (len(shape) - 3))  # KDA: the same in every channel
    stream = world.stream | {raw: per_head.expand(shape).clone()}
    weights = {"A": -rate} if "A" in world.weights else {"A_log": rate.log()}
    weights = {name: w.float() for name, w in weights.items()}
    start = world.start.clone()
    start[0] = 0  # what a token adds, alone
    World(case, rng, weights=weights, stream=stream, start=start).decode().check(factor=4)


@pytest.mark.parametrize("case", BASES, ids=str)
def test_a_decay_of_zero_erases_history(case, rng):
    """A rate beyond fp32, whatever the step: what came before is gone, and nothing is NaN."""
    case = case.but(tokens=20)
    world = World(case, rng, start=torch.full((3, *case.spec.state_shape), 1e30))
    weights = dict(world.weights)
    if "A" in weights:
        weights["A"] = torch.full_like(weights["A"], -torch.inf)
    else:
        weights["A_log"] = torch.full_like(weights["A_log"], 100.0)
    world.pool.bind(LAYER, **weights)
    world.decode()
    erased = {name: w.clamp(-1e9, 60) for name, w in weights.items()}
    zero = torch.zeros_like(world.start)
    fresh = World(case, rng, weights=erased, stream=world.stream, start=zero)
    for got, exact, plain in zip((world.y, world.states()), fresh.exact, fresh.plain, strict=True):
        assert_within_budget(got, exact=exact, rounded=plain)


@pytest.mark.parametrize("case", BASES, ids=str)
def test_a_rate_beyond_fp32_times_a_step_below_it(case, rng):
    """Infinity times zero is no NaN: without a step nothing decays and nothing is written."""
    case = case.but(tokens=20)
    drawn = World(case, rng)
    steps = [name for name in ("dt", "a", "b") if name in drawn.stream]
    stream = drawn.stream | {name: torch.full_like(drawn.stream[name], -200.0) for name in steps}
    world = World(case, rng, weights=drawn.weights, stream=stream)
    rate = {"A": -torch.inf} if "A" in drawn.weights else {"A_log": 100.0}
    ready = {name: torch.full_like(drawn.weights[name], value) for name, value in rate.items()}
    world.pool.bind(LAYER, **ready)
    world.decode()
    assert_bitwise_equal(world.states(), world.start)


def test_a_bounded_gate_of_any_slope(rng):
    """`sigmoid(rate * a)` at a = 0 is one half, whatever the rate."""
    base = next(base for base in BASES if base.spec.family == "kda")
    case = base.but(gate="bounded", tokens=20)
    drawn = World(case, rng)
    weights = {"A_log": torch.full((case.spec.heads,), 60.0)}
    stream = drawn.stream | {"a": torch.zeros_like(drawn.stream["a"])}
    world = World(case, rng, weights=weights, stream=stream)
    world.pool.bind(LAYER, A_log=torch.full((case.spec.heads,), 100.0))
    world.decode().check()
