"""Counters against a hand computation."""

import pytest
import torch

from replayinfer import GDNSpec, Mamba2Spec

from .rig import Rig

# heads * dim * state = 4 * 8 * 16 = 512 numbers of state per layer, 2 layers.
# Rows of a layer, float32 activations:
#   mamba2: x 4*8, B 2*16, dt 4                          = 68 floats
#   gdn:    k 2*16, k_scale 2, g 4, u 4*8                = 70 floats
#           split, which keeps v and beta beside u       + 4*8 + 4
CASES = {
    ("mamba2", "fp32"): (4, 4, 4, 68 * 4),
    ("mamba2", "fp32_split"): (2, 4, 4, 68 * 4),
    ("mamba2", "bf16"): (2, 2, 2, 68 * 4),
    ("gdn", "fp32"): (4, 4, 4, 70 * 4),
    ("gdn", "fp32_split"): (2, 4, 4, 106 * 4),
    ("gdn", "fp16"): (2, 2, 2, 70 * 4),
}
SPECS = {
    "mamba2": Mamba2Spec(heads=4, dim=8, state=16, groups=2),
    "gdn": GDNSpec(heads=4, dim=8, state=16, key_heads=2),
}


@pytest.mark.parametrize(("family", "format"), CASES)
def test_state_bytes(family, format, rng):
    """Three steps of windows (2, 3, 0), capacity 6; the fold happens by force in the third."""
    read, stored, standard, row = CASES[family, format]
    rig = Rig(SPECS[family], rng, format=format)
    counters, layers, state = rig.wrapper.counters, 2, 512
    rig.step([2, 3, 0], [1, 3, 0])
    # Two sequences read their state, and write 5 rows; no history yet.
    want = layers * (2 * state * read + 5 * row)
    want_standard = layers * (2 + 5) * state * standard  # a read each, a write per token
    assert counters.state_bytes == want
    assert counters.state_bytes_standard == want_standard

    rig.step([3, 3, 1], [0, 2, 1])
    # Histories 1, 3, 0 are read; 7 rows are written.
    want += layers * (3 * state * read + (1 + 3 + 0 + 7) * row)
    want_standard += layers * (3 + 7) * state * standard
    assert counters.state_bytes == want
    assert counters.state_bytes_standard == want_standard

    rig.step([1, 2, 0], None, force_fold=torch.tensor([True, False, False]).numpy())
    # Sequence 0 folds its 1 row by force, sequence 1 its 5 rows since 5 + 2 > 6: a fold reads and
    # writes the state and reads the rows. Their readouts find no history, and write 3 rows.
    want += layers * (2 * 2 * state * stored + (1 + 5) * row)
    want += layers * (2 * state * read + 3 * row)
    want_standard += layers * (2 + 3) * state * standard
    assert counters.as_dict() == {
        "steps": 3,
        "tokens": 10,
        "direct_steps": 0,
        "folds": 2,
        "forced_folds": 1,
        "early_folds": 0,
        "rows_rejected": 5,
        "aborted": 0,
        "state_bytes": want,
        "state_bytes_standard": want_standard,
    }
    counters.reset()
    assert not any(counters.as_dict().values())


def test_aborts_count_their_folds_and_nothing_else(rng):
    rig = Rig(SPECS["mamba2"], rng)
    rig.step(3)
    before = rig.wrapper.counters.as_dict()
    rig.wrapper.plan(rig.sequences, 1, force_fold=True)
    rig.wrapper.abort()
    assert rig.wrapper.counters.as_dict() == before | {"aborted": 1}
    rig.wrapper.plan(rig.sequences, 1, force_fold=True)
    rig.wrapper.fold()
    rig.wrapper.abort()
    folded = 2 * (3 * 2 * 512 * 4 + 9 * 68 * 4)
    assert rig.wrapper.counters.as_dict() == before | {
        "aborted": 2,
        "folds": 3,
        "forced_folds": 3,
        "state_bytes": before["state_bytes"] + folded,
    }


def test_early_folds_are_counted(rng):
    """Spread, one row a step, capacity 6: of six that start together one folds a step."""
    rig = Rig(SPECS["gdn"], rng, sequences=6, wrapper={"policy": "spread"})
    for _ in range(12):
        rig.step(1)
    counters = rig.wrapper.counters
    full = Rig(SPECS["gdn"], rng, sequences=6)
    for _ in range(12):
        full.step(1)
    assert full.wrapper.counters.early_folds == 0
    assert full.wrapper.counters.folds == 6
    assert 0 < counters.early_folds <= counters.folds
    assert counters.forced_folds == 0


def test_replay_moves_less_than_the_standard_kernel(rng):
    """At capacity 6 one decode step in six folds; the standard kernel writes the state in each."""
    rig = Rig(SPECS["mamba2"], rng, format="fp32_split", dtype=torch.bfloat16)
    for _ in range(60):
        rig.step(1)
    counters = rig.wrapper.counters
    assert counters.state_bytes < 0.75 * counters.state_bytes_standard
