"""A delta-rule fold of provisional values drifts; the re-solved one does not."""

import pytest
import torch

from replayinfer.backends.torch import TorchBackend
from replayinfer.testing import relative_error

from .world import BASES, World

DELTA_RULE = [base for base in BASES if base.spec.family != "mamba2"]


class FoldsAsLeft(TorchBackend):
    """Folds ``u`` as the readouts left it in the rows: what must not be done."""

    def fold(self, pool, plan):
        for i in range(plan.fold_count):
            source, target = (
                a[i : i + 1] for a in (plan.arrays.fold_source, plan.arrays.fold_target)
            )
            state = pool.checkpoints.load(0, source.long())[0]
            for row in range(int(plan.arrays.fold_rows[i])):
                page = plan.arrays.fold_table[i, row // pool.sizes.page_rows]
                held = pool.inputs.fields.items()
                held = {name: f[0, page, row % pool.sizes.page_rows].float() for name, f in held}
                k = held["k"] * held["k_scale"][:, None]
                k = k.repeat_interleave(pool.spec.head_ratio, dim=0)
                decay = torch.exp(held["g"]).view(pool.spec.heads, 1, -1)  # per head or per channel
                state = decay * state + held["u"][:, :, None] * k[:, None]
            pool.checkpoints.store(0, target.long(), state[None])


@pytest.mark.parametrize("base", DELTA_RULE, ids=str)
def test_resolved_folds_keep_fp32_accuracy(base, rng):
    case = base.but(
        tokens=2048, batch=2, pads=0, capacity=16, max_window=8, page_rows=8,
        format="fp32_split", gates="near_one", dtype=torch.bfloat16, heads=2, key_heads=1, dim=16,
    )  # fmt: skip
    ours = World(case, rng)
    naive = World(
        case, rng, weights=ours.weights, stream=ours.stream, start=ours.start, backend=FoldsAsLeft()
    )
    while (ours.done < case.tokens).any():
        for world in (ours, naive):
            world.step([8, 8], [8, 8])

    states = (ours.states(), naive.states(), ours.oracle(torch.float32)[1])
    resolved, provisional, plain = (relative_error(s, ours.exact[1], keep=(0, 1)) for s in states)
    assert resolved < 3 * plain
    assert provisional > 100 * plain, "a fold of provisional values passes for a good one"
