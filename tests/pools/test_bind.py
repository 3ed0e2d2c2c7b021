"""Weights of layers: what is taken, what is refused, and pools for some of a model's layers."""

import pytest
import torch

from replayinfer import GDNSpec, InputError, KDASpec, Mamba2Spec, PlanError, StatePool
from replayinfer.testing import layer_inputs, layer_weights, relative_error

from .kit import SPECS, Unchanged, World

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", SPECS)
def test_any_float_type_is_copied_into_float32(family, dtype, rng):
    spec = SPECS[family]
    pool = StatePool(spec, [4, 9], 1)
    before = {name: w.clone() for name, w in pool.weights.items()}
    given = {name: w.to(dtype) for name, w in layer_weights(spec, rng).items()}
    want = {name: w.float().clone() for name, w in given.items()}
    pool.bind(9, **given)
    for w in given.values():
        w.fill_(-7.0)
    for name, tensor in pool.weights.items():
        assert tensor.dtype == torch.float32
        assert tensor.shape[0] == 2
        assert torch.equal(tensor[1], want[name])
        assert torch.equal(tensor[0].nan_to_num(5.0), before[name][0].nan_to_num(5.0))


def test_defaults():
    pool = StatePool(Mamba2Spec(heads=2, dim=3, state=4), [0], 1)
    pool.bind(0, A=torch.tensor([-1.0, 0.0]), conv_weight=torch.ones(14, 4), D=None)
    for name in ("D", "dt_bias", "conv_bias"):
        assert not pool.weights[name].any()
    pool.bind(0, A=-torch.ones(2), conv_weight=torch.ones(14, 4), D=torch.ones(2))
    assert pool.weights["D"].all()
    pool.bind(0, A=-torch.ones(2), conv_weight=torch.ones(14, 4))
    assert not pool.weights["D"].any()  # an omitted weight is its default, not what it was


def test_a_weight_that_wants_a_gradient_leaves_none_behind():
    pool = StatePool(Mamba2Spec(heads=2, dim=3, state=4, conv_width=0), [0], 1)
    pool.bind(0, A=torch.nn.Parameter(-torch.ones(2)))
    assert not pool.weights["A"].requires_grad


def test_nothing_to_bind_is_bound():
    spec = GDNSpec(heads=2, dim=2, state=2, gate="log", conv_width=0)
    StatePool(spec, [0], 1).require_bound()
    pool = StatePool(spec, [0, 1], 1)
    pool.bind(1)
    pool.require_bound()


def test_every_layer_must_be_bound(rng):
    spec = SPECS["mamba2"]
    world = World(spec, rng, layers=(3, 5))
    pool = StatePool(spec, [3, 5, 7], 1)
    pool.bind(5, **layer_weights(spec, rng))
    with pytest.raises(PlanError, match=r"^weights: got none for layers \[3, 7\]; allowed after "):
        pool.require_bound()
    world.pool.require_bound()


WRONG = {
    "layer": (7, lambda w: w),
    "layer ": ("4", lambda w: w),
    "layer  ": ([4], lambda w: w),
    "layer   ": (None, lambda w: w),
    "weights": (4, lambda w: {**w, "A_log": w["A"]}),
    "A": (4, lambda w: {n: x for n, x in w.items() if n != "A"}),
    "A ": (4, lambda w: {**w, "A": None}),
    "A  ": (4, lambda w: {**w, "A": w["A"][:3]}),
    "A   ": (4, lambda w: {**w, "A": -w["A"]}),
    "A    ": (4, lambda w: {**w, "A": torch.full((4,), torch.nan)}),
    "A     ": (4, lambda w: {**w, "A": w["A"].int()}),
    "A      ": (4, lambda w: {**w, "A": w["A"].tolist()}),
    "A       ": (4, lambda w: {**w, "A": w["A"].to("meta")}),
    "A        ": (4, lambda w: {**w, "A": w["A"].repeat_interleave(2)[::2]}),
    "D": (4, lambda w: {**w, "D": w["D"][None]}),
    "dt_bias": (4, lambda w: {**w, "dt_bias": torch.zeros(())}),
    "conv_weight": (4, lambda w: {**w, "conv_weight": w["conv_weight"][:, None]}),
    "conv_weight ": (4, lambda w: {**w, "conv_weight": w["conv_weight"].T.contiguous().T}),
    "conv_bias": (4, lambda w: {**w, "conv_bias": w["conv_bias"][1:]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals_change_nothing(case, rng):
    spec = SPECS["mamba2"]
    pool = StatePool(spec, [4, 9], 1)
    pool.bind(4, **layer_weights(spec, rng))
    layer, change = WRONG[case]
    with Unchanged(pool), pytest.raises(InputError) as error:
        pool.bind(layer, **change(layer_weights(spec, rng)))
    message = str(error.value)
    assert message.startswith(f"{case.strip()}: got "), message
    assert "; allowed " in message
    with pytest.raises(PlanError, match=r"layers \[9\]"):
        pool.require_bound()


def test_a_refused_layer_stays_unbound(rng):
    spec = SPECS["mamba2"]
    pool = StatePool(spec, [4], 1)
    weights = layer_weights(spec, rng)
    with pytest.raises(InputError, match=r"^conv_bias: "):
        pool.bind(4, **{**weights, "conv_bias": torch.zeros(1)})
    assert pool.weights["A"].isnan().all()
    with pytest.raises(PlanError):
        pool.require_bound()


def test_shapes_by_family():
    pool = StatePool(KDASpec(heads=2, dim=3, state=4, key_heads=2), [0], 1)
    assert pool.weights["dt_bias"].shape == (1, 2, 4)
    with pytest.raises(InputError, match=r"^dt_bias: got float32 \[2\] .+; allowed .+ \[2, 4\] "):
        pool.bind(0, A_log=torch.zeros(2), dt_bias=torch.zeros(2), conv_weight=torch.ones(22, 4))


@pytest.mark.parametrize("order", [(7, 2), (2, 7)])
def test_a_pool_for_some_of_a_models_layers(order, rng):
    """By the model's own numbers, in the order given; each layer computes as in a pool alone."""
    spec = SPECS["gdn"]
    world = World(spec, rng, layers=order, capacity=4)
    pool = world.pool
    assert pool.layers == order
    assert [pool.index(layer) for layer in order] == [0, 1]
    for layer in (0, 1, 3, -1, 2.5, True, None, [2], "2"):
        if layer not in order:
            with pytest.raises(InputError, match=rf"allowed the layers of this pool, \[{order[0]}"):
                pool.index(layer)
    (a,) = world.alloc()
    world.seed(a, tokens=2)
    for _ in range(6):
        world.step([a])
    world.check()
    # What the model says by layer is at that layer's place.
    state = world.wrapper.materialize(a)
    for i, layer in enumerate(order):
        assert relative_error(state[i], world.model.state(a, layer)) < world.bound
    world.wrapper.plan([a])
    world.wrapper.fold()
    inputs = layer_inputs(spec, 1, 1, torch.float32, rng)
    with pytest.raises(InputError, match=r"^layer: got 5; "):
        world.wrapper.run(5, **inputs)
