"""What the tests of this library, and of anything built on it, measure against.

Independent of pools, planner, backends and kernels, on purpose: it knows the mathematics and the
layer specifications, nothing else.
"""

from .budget import assert_bitwise_equal, assert_within_budget, peak_error, relative_error
from .dict_model import DictModel
from .inputs import (
    Gates,
    conv_inputs,
    conv_weights,
    delta_inputs,
    delta_weights,
    initial_states,
    layer_inputs,
    layer_weights,
    mamba2_inputs,
    mamba2_weights,
    split_channels,
)
from .poison import (
    PoisonedAllocations,
    assert_no_poison,
    assert_untouched,
    is_poison,
    poison_,
    poisoned,
    snapshot,
)
from .reference import (
    causal_conv,
    gdn_recurrence,
    kda_recurrence,
    mamba2_recurrence,
    recurrence,
)

__all__ = [
    "DictModel",
    "Gates",
    "PoisonedAllocations",
    "assert_bitwise_equal",
    "assert_no_poison",
    "assert_untouched",
    "assert_within_budget",
    "causal_conv",
    "conv_inputs",
    "conv_weights",
    "delta_inputs",
    "delta_weights",
    "gdn_recurrence",
    "initial_states",
    "is_poison",
    "kda_recurrence",
    "layer_inputs",
    "layer_weights",
    "mamba2_inputs",
    "mamba2_recurrence",
    "mamba2_weights",
    "peak_error",
    "poison_",
    "poisoned",
    "recurrence",
    "relative_error",
    "snapshot",
    "split_channels",
]
