"""A snapshot that belongs elsewhere is refused, and the message names every difference."""

import dataclasses
import json
import math
import re

import pytest
import torch

from replayinfer import GDNSpec, InputError, KDASpec, Mamba2Spec, SequenceSnapshot, StatePool

from ..pools.kit import Unchanged
from .rig import SPECS, Rig

SIZES = {"capacity": 6, "max_window": 3, "page_rows": 2}
# One other value for every field of every spec that leaves the others as they are.
OTHER = {
    "heads": 2, "dim": 4, "state": 6, "conv_width": 3, "conv_activation": None, "groups": 4,
    "dt_softplus": False, "dt_limit": (0.0, 0.5), "key_heads": 4, "gate": "log",
    "beta": "sigmoid2", "norm": "none", "norm_eps": 1e-5, "scale": 0.5, "lower_bound": -4.0,
}  # fmt: skip


def snapshot_of(spec, rng, **options):
    pool = StatePool(spec, [1, 4], 3, **(SIZES | options))
    (seq,) = pool.alloc()
    return pool, pool.export(seq)


def refused(pool, snap, *reasons):
    with Unchanged(pool), pytest.raises(InputError, match=r"^snapshot: got one where ") as error:
        pool.import_(snap)
    for reason in reasons:
        assert reason in str(error.value)
    named = str(error.value).removeprefix("snapshot: got one where ").split("; allowed")[0]
    return named.split("; ")


def test_every_field_of_every_spec(rng):
    tried = set()
    for spec in (Mamba2Spec(4, 3, 5, groups=2), GDNSpec(4, 3, 5, key_heads=2),
                 KDASpec(4, 3, 5, key_heads=2)):  # fmt: skip
        pool, _ = snapshot_of(spec, rng)
        for field in dataclasses.fields(spec):
            theirs = dataclasses.replace(spec, **{field.name: OTHER[field.name]})
            _, snap = snapshot_of(theirs, rng)
            have, want = (
                list(v) if isinstance(v, tuple) else v
                for v in (getattr(theirs, field.name), getattr(spec, field.name))
            )
            if field.name == "dt_limit":
                want[1] = "inf"
            assert refused(pool, snap) == [f"spec.{field.name} is {have!r}, here {want!r}"]
            tried.add(field.name)
    assert tried == set(OTHER)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "bf16"}, "format is 'bf16', here 'fp32'"),
        ({"format": "fp32_split"}, "format is 'fp32_split', here 'fp32'"),
        ({"dtype": torch.bfloat16}, "dtype is 'bfloat16', here 'float32'"),
        ({"capacity": 8}, "capacity is 8, here 6"),
        ({"restore": "any"}, "restore is 'any', here 'window'"),
    ],
)
def test_the_pool(options, reason, rng):
    pool, _ = snapshot_of(SPECS["gdn"], rng)
    _, snap = snapshot_of(SPECS["gdn"], rng, **options)
    assert refused(pool, snap) == [reason]


def test_layers_family_and_everything_at_once(rng):
    pool, mine = snapshot_of(SPECS["gdn"], rng)
    for layers in ([1], [4, 1], [1, 5]):
        other = StatePool(SPECS["gdn"], layers, 1, **SIZES)
        assert refused(pool, other.export(*other.alloc())) == [f"layers is {layers}, here [1, 4]"]
    _, snap = snapshot_of(SPECS["kda"], rng, format="fp16", capacity=9)
    reasons = refused(
        pool, snap, "family is 'kda', here 'gdn'", "format is 'fp16'", "capacity is 9"
    )
    assert reasons[-1] == "spec.lower_bound is unknown here"
    _, snap = snapshot_of(SPECS["mamba2"], rng)
    refused(
        pool, snap, "family is 'mamba2'", "spec.key_heads is 'absent', here 2", "spec.groups is"
    )
    pool.import_(mine)


BAD_HEADERS = {
    "layout_version is 2, here 1": {"layout_version": 2},
    "layout_version is 'absent', here 1": {"layout_version": None},
    "family is 'absent', here 'gdn'": {"family": None},
    "restore is 'absent'": {"restore": None},
    "spec.heads is 'absent', here 4": {"spec": None},
    "spec.dim is 'absent', here 3": {"spec": [4, 3, 5]},
    "history is None, allowed 0..6": {"history": None},
    "history is -1, allowed 0..6": {"history": -1},
    "history is 7, allowed 0..6": {"history": 7, "tokens": 9},
    "history is 2.0, allowed 0..6": {"history": 2.0},
    "history is '2', allowed 0..6": {"history": "2"},
    "tokens is None, allowed an integer >= history=2": {"tokens": None},
    "tokens is 1, allowed an integer >= history=2": {"tokens": 1},
    "tokens is 5.0, allowed": {"tokens": 5.0},
    "tokens is 9223372036854775808, allowed": {"tokens": 2**63},
}


@pytest.fixture
def rows(rng):
    """A pool and the snapshot of a sequence with two rows in it."""
    rig = Rig(SPECS["gdn"], rng)
    (seq,) = rig.pool.alloc()
    rig.decode(seq, rig.draw(8), window=3)
    assert rig.pool.history(seq) == 2
    return rig.pool, rig.pool.export(seq)


@pytest.mark.parametrize(("reason", "change"), BAD_HEADERS.items(), ids=BAD_HEADERS)
def test_bad_headers(rows, reason, change):
    pool, snap = rows
    header = {k: v for k, v in (dict(snap.header) | change).items() if v is not None}
    refused(pool, SequenceSnapshot(header, snap.tensors), reason)
    pool.import_(snap)


@pytest.mark.parametrize("change", ["absent", "shape", "dtype", "rank"])
def test_bad_tensors(rows, change):
    pool, snap = rows
    assert sorted(snap.tensors) == [
        "checkpoint", "conv", "rows.g", "rows.k", "rows.k_scale", "rows.u",
    ]  # fmt: skip
    for name, tensor in snap.tensors.items():
        tensors = dict(snap.tensors)
        if change == "absent":
            del tensors[name]
            reason = f"tensor {name} is absent"
        else:
            tensors[name] = {
                "shape": tensor[:, :1], "dtype": tensor.double(), "rank": tensor[None],
            }[change]  # fmt: skip
            reason = f"tensor {name} is {str(tensors[name].dtype)[6:]} {list(tensors[name].shape)}"
        assert len(refused(pool, SequenceSnapshot(snap.header, tensors), reason)) == 1
    # A history that is not the tensors' own is one fault per field of a row.
    header = dict(snap.header) | {"history": 1}
    assert len(refused(pool, SequenceSnapshot(header, snap.tensors), "tensor rows.u is")) == 4


def test_what_is_no_snapshot(rows):
    pool, snap = rows
    for thing in (None, {}, dict(snap.header), SequenceSnapshot([], snap.tensors)):
        with Unchanged(pool), pytest.raises(InputError, match="without a header; allowed a Sequ"):
            pool.import_(thing)


def test_the_header_is_plain_json(rng):
    """Infinite limits, tuples and None included, so that it compares equal from a file."""
    spec = Mamba2Spec(4, 3, 5, groups=2, dt_limit=(0.001, math.inf), conv_activation=None)
    pool, snap = snapshot_of(spec, rng)
    text = json.dumps(dict(snap.header), allow_nan=False)
    assert not re.search("Infinity|NaN", text)
    assert json.loads(text) == dict(snap.header)
    pool.import_(SequenceSnapshot(json.loads(text), snap.tensors))
