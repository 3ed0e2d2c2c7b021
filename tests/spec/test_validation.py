"""Specifications refuse what no layer can be, with the reason, and cannot change afterwards."""

import dataclasses
import math
import re

import pytest
import torch

from replayinfer import GDNSpec, InputError, KDASpec, Mamba2Spec, UnsupportedError
from replayinfer.errors import ReplayError

FORM = re.compile(r"^\w+: got .+; allowed .+; .+$")
GOOD = {
    Mamba2Spec: {"heads": 8, "dim": 4, "state": 6, "groups": 2},
    GDNSpec: {"heads": 8, "dim": 4, "state": 6, "key_heads": 2},
    KDASpec: {"heads": 8, "dim": 4, "state": 6, "key_heads": 2},
}
DELTA = [GDNSpec, KDASpec]
NOT_SIZES = [0, -1, 2.0, "4", None, True, math.nan]


def refused(family, **change):
    """The message with which the one change is refused."""
    family(**GOOD[family])
    with pytest.raises(UnsupportedError) as error:
        family(**{**GOOD[family], **change})
    message = str(error.value)
    (name,) = change
    assert FORM.match(message), message
    assert message.startswith(f"{name}: got "), message
    assert isinstance(error.value, (ReplayError, ValueError))
    return message


@pytest.mark.parametrize("family", GOOD)
@pytest.mark.parametrize("name", ["heads", "dim", "state"])
@pytest.mark.parametrize("value", NOT_SIZES, ids=repr)
def test_sizes(family, name, value):
    message = refused(family, **{name: value})
    assert message.startswith(f"{name}: got {value!r}; allowed an integer >= 1; ")


@pytest.mark.parametrize(
    ("family", "name"), [(Mamba2Spec, "groups"), (GDNSpec, "key_heads"), (KDASpec, "key_heads")]
)
@pytest.mark.parametrize("value", NOT_SIZES, ids=repr)
def test_shared_heads(family, name, value):
    refused(family, **{name: value})


@pytest.mark.parametrize("value", [3, 5, 16])
def test_shared_heads_divide_the_heads(value):
    assert "allowed a divisor of heads=8" in refused(Mamba2Spec, groups=value)
    assert "allowed a divisor of heads=8" in refused(GDNSpec, key_heads=value)
    for count in (1, 2, 4, 8):
        assert Mamba2Spec(**{**GOOD[Mamba2Spec], "groups": count}).groups == count
        assert GDNSpec(**{**GOOD[GDNSpec], "key_heads": count}).head_ratio == 8 // count


@pytest.mark.parametrize("family", GOOD)
def test_convolution(family):
    for width in (1, -1, 4.0, "4", None, True):
        message = refused(family, conv_width=width)
        assert "allowed 0 (the caller convolves) or an integer >= 2" in message
    for name in ("relu", "SiLU", True, 0):
        assert "allowed 'silu', None" in refused(family, conv_activation=name)
    for width in (0, 2, 3, 4, 7):
        assert family(**GOOD[family], conv_width=width).conv_width == width
    assert family(**GOOD[family], conv_activation=None).conv_activation is None


@pytest.mark.parametrize(
    "limit",
    [(0.1, 0.01), (-1e-3, 1.0), (0.0, math.nan), (math.nan, 1.0), (0.0,), (0, 1, 2), 1.0, None,
     "ab", (math.inf, math.inf)],
    ids=repr,
)  # fmt: skip
def test_dt_limit(limit):
    assert "allowed (low, high) with 0 <= low <= high" in refused(Mamba2Spec, dt_limit=limit)


def test_dt_limit_is_kept_as_two_floats():
    """A config's list would make the specification unhashable."""
    spec = Mamba2Spec(**GOOD[Mamba2Spec], dt_limit=[0, 1])
    assert spec.dt_limit == (0.0, 1.0)
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert Mamba2Spec(**GOOD[Mamba2Spec]).dt_limit == (0.0, math.inf)
    assert Mamba2Spec(**GOOD[Mamba2Spec], dt_limit=(0.5, 0.5)).dt_limit == (0.5, 0.5)


@pytest.mark.parametrize("family", DELTA)
@pytest.mark.parametrize("name", ["gate", "beta", "norm"])
@pytest.mark.parametrize("value", ["Softplus", "", None, True, 2], ids=repr)
def test_forms(family, name, value):
    refused(family, **{name: value})


def test_the_bounded_gate_is_kdas():
    assert "allowed 'softplus', 'log'" in refused(GDNSpec, gate="bounded")
    assert KDASpec(**GOOD[KDASpec], gate="bounded").gate == "bounded"
    for bound in (0.0, 1.0, -math.inf, math.nan, None, "-5"):
        refused(KDASpec, lower_bound=bound)


@pytest.mark.parametrize("family", DELTA)
def test_numbers(family):
    for value in (-1e-9, math.nan, math.inf, None, "1e-6", True):
        refused(family, norm_eps=value)
    for value in (math.nan, math.inf, "0.1", True):
        refused(family, scale=value)
    assert family(**GOOD[family], norm_eps=0).norm_eps == 0
    assert family(**GOOD[family]).query_scale == 6**-0.5
    assert family(**GOOD[family], scale=0.25).query_scale == 0.25
    assert family(**GOOD[family], scale=1).query_scale == 1.0


@pytest.mark.parametrize("family", GOOD)
def test_immutable_comparable_hashable(family):
    spec = family(**GOOD[family])
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.heads = 16
    assert spec == family(**GOOD[family])
    assert spec != family(**{**GOOD[family], "heads": 16})
    assert len({spec, family(**GOOD[family])}) == 1
    assert spec.state_shape == (8, 4, 6)


@pytest.mark.parametrize("family", GOOD)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, "bf16", None])
def test_rows_hold_activations_as_given_or_refuse_them(family, dtype):
    with pytest.raises(
        UnsupportedError, match=r"^dtype: got .+; allowed float32, bfloat16 or float16; "
    ):
        family(**GOOD[family]).check_dtype(dtype)


def test_families_are_told_apart():
    assert [f.family for f in GOOD] == ["mamba2", "gdn", "kda"]
    assert GDNSpec(**GOOD[GDNSpec]) != KDASpec(**GOOD[KDASpec])


@pytest.mark.parametrize(
    ("rank", "size", "name"),
    [(0, 0, "size"), (0, -2, "size"), (0, 2.0, "size"), (0, True, "size"), (2, 2, "rank"),
     (-1, 2, "rank"), (True, 2, "rank"), (0.0, 2, "rank"), (None, 2, "rank"), (0, 3, "size"),
     (0, 16, "size")],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("family", GOOD)
def test_shards_that_do_not_exist(family, rank, size, name):
    with pytest.raises(InputError) as error:
        family(**GOOD[family]).shard(rank, size)
    assert FORM.match(str(error.value)), error.value
    assert str(error.value).startswith(f"{name}: got ")


def test_shared_heads_neither_divide_nor_are_divided():
    spec = Mamba2Spec(heads=12, dim=2, state=2, groups=6)
    with pytest.raises(InputError, match="a divisor or a multiple of groups=6"):
        spec.shard(0, 4)
    with pytest.raises(InputError, match="a divisor of heads=12"):
        spec.shard(0, 5)
