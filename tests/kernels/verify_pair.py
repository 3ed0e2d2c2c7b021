"""`DeltaPair` with windows of several tokens: chains and draft trees, partly accepted."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch

from replayinfer.testing import assert_no_poison, delta_inputs, relative_error

from ..backends.world import poison_dead
from .delta_pair import OUTPUT_EPSILON, DeltaCase, DeltaPair
from .pair import READ_EPSILON


@contextmanager
def verifying(case: DeltaCase):
    """Blocks of the case in both kernels, whatever the table says; with no rows as the rule has."""
    from replayinfer.kernels.launch import lookup as launch

    shape = launch.LaunchConfig(num_warps=case.warps, rows=case.rows)
    choices = {"verify_prepass": shape, "verify": shape} if case.rows else {}
    with launch.forced(**choices):
        yield


class VerifyPair(DeltaPair):
    """`width` is the tokens of a row of a step, and the pool's largest window."""

    def __init__(self, case: DeltaCase, rng, device: str = "cpu", *, width: int, **options) -> None:
        self.width = width
        super().__init__(case, rng, device, max_window=width, **options)

    def verify(self, windows, *, parents=None, accepted=None, paths=None, erase=None) -> None:
        """One step of both. The given gate of token `erase` is minus infinity."""
        case, width = self.case, self.width
        bucket = case.batch + case.pads
        tokens = [
            delta_inputs(self.spec, width, bucket, case.dtype, self.rng, case.gates)
            for _ in self.layers
        ]
        if erase is not None:
            for inputs in tokens:
                inputs["g"][:, erase] = float("-inf")
        live = np.zeros((bucket, width), dtype=bool)
        live[: case.batch] = np.arange(width) < np.asarray(windows)[:, None]
        for inputs in tokens:  # what a pad or a dead token brings may be anything
            for value in inputs.values():
                value[~live] = float("nan")
        want, have = (self._run(world, windows, tokens, bucket, parents) for world in self.worlds)
        live = torch.from_numpy(live)
        for theirs, ours in zip(want, have, strict=True):
            assert_no_poison(ours, "outputs")
            assert not ours[~live].any(), "a pad or a dead token has an output"
            epsilon = max(OUTPUT_EPSILON[case.dtype], READ_EPSILON[case.format])
            error = relative_error(ours[live], theirs[live]) if live.any() else 0.0
            assert error <= epsilon, f"outputs are {error:.1e} apart"
        self.check_rows()
        for pool, _, wrapper in self.worlds:
            wrapper.commit(accepted, paths=paths)
            poison_dead(pool)

    def _run(self, world, windows, tokens, bucket, parents) -> list[torch.Tensor]:
        _, sequences, wrapper = world
        outputs = []
        with verifying(self.case):
            wrapper.plan(sequences, windows, bucket=bucket, window=self.width, parents=parents)
            wrapper.fold()
            for layer, inputs in zip(self.layers, tokens, strict=True):
                shape = (bucket, self.width, self.spec.heads, self.spec.dim)
                out = torch.full(shape, float("nan"), device=self.device, dtype=self.case.dtype)
                inputs = {name: v.to(self.device) for name, v in inputs.items()}
                outputs.append(wrapper.run(layer, out=out, **inputs).cpu())
        return outputs
