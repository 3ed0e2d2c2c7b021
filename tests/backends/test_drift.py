"""A delta-rule fold of provisional values drifts; the re-solved one does not."""

import importlib

import pytest
import torch

from replayinfer.testing import relative_error

from .world import BASES, World

DELTA_RULE = [base for base in BASES if base.spec.family != "mamba2"]
TOKENS = 2048


def state_errors(case, rng, **options):
    """Relative errors of the state: ours, and the plain fp32 recurrence's."""
    world = World(case, rng, **options)
    whole = [case.max_window] * case.batch
    while (world.done < case.tokens).any():
        world.step(whole, whole)
    _, plain = world.oracle(torch.float32)
    errors = [relative_error(s, world.exact[1], keep=(0, 1)) for s in (world.states(), plain)]
    return world, *errors


@pytest.mark.parametrize("base", DELTA_RULE, ids=str)
def test_resolved_folds_keep_fp32_accuracy(base, rng, monkeypatch):
    case = base.but(
        tokens=TOKENS, batch=2, pads=0, capacity=16, max_window=8, page_rows=8,
        format="fp32_split", gates="near_one", dtype=torch.bfloat16, heads=2, key_heads=1, dim=16,
    )  # fmt: skip
    world, ours, plain = state_errors(case, rng)
    assert ours < 3 * plain
    assert ours < 5e-6

    # The same run with a fold that takes u as the readouts left it.
    backend = importlib.import_module("replayinfer.backends.torch.delta")
    monkeypatch.setattr(backend, "_solve_rows", lambda state, k, g, rows: rows["u"])
    _, naive, _ = state_errors(
        case, rng, weights=world.weights, stream=world.stream, start=world.start
    )
    assert naive > 100 * ours
    assert naive > 100 * 3 * plain / 3, "the bound above could not have failed"
