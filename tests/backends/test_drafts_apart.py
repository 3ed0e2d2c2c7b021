"""A draft whose inputs are not finite reaches neither the tokens before it nor its siblings."""

import math

import pytest
import torch

from replayinfer import GDNSpec, KDASpec, Mamba2Spec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import assert_bitwise_equal, layer_inputs, layer_weights

SPECS = {
    "mamba2": Mamba2Spec(heads=4, dim=4, state=6, groups=2, conv_width=0),
    "gdn": GDNSpec(heads=4, dim=4, state=6, key_heads=2, conv_width=0),
    "kda": KDASpec(heads=4, dim=4, state=6, key_heads=2, conv_width=0),
}
CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 0, 2)  # node 1 is a dead end beside 2 and 3


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    ("parents", "bad", "good"),
    [(CHAIN, 2, (0, 1)), (CHAIN, 1, (0,)), (TREE, 1, (0, 2, 3))],
    ids=["chain, third", "chain, second", "tree, a sibling"],
)
def test_a_draft_that_is_not_finite_stays_by_itself(family, parents, bad, good, rng):
    spec = SPECS[family]
    pool = StatePool(spec, [0], 2, capacity=9, max_window=4, page_rows=2)
    pool.bind(0, **layer_weights(spec, rng))
    wrapper = ReplayDecodeWrapper(pool)
    inputs = layer_inputs(spec, 4, 1, torch.float32, rng)
    poisoned = {name: value.clone() for name, value in inputs.items()}
    for value in poisoned.values():
        value[:, bad] = math.nan
    outputs, states = [], []
    for given in (inputs, poisoned):
        (seq,) = pool.alloc()
        wrapper.plan([seq], 4, parents=[parents])
        wrapper.fold()
        outputs.append(wrapper.run(0, **given)[0])
        wrapper.commit(paths=[list(good)])
        states.append(wrapper.materialize(seq))
    clean, dirty = outputs
    assert_bitwise_equal(dirty[list(good)], clean[list(good)], "y")
    assert_bitwise_equal(states[1], states[0], "state")
    assert torch.isnan(dirty[bad]).all()
