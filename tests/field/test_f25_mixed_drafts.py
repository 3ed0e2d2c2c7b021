"""Field report 25: rows with 0, some and all drafts mix in one batch."""

import numpy as np
import pytest

from ..pools.kit import check_books, random_int
from ..transfer.rig import SPECS, Rig, assert_equal_outputs, assert_same, join, joined

T, TURNS = 4, 9
DRAFTS = (0, 1, 3)  # none, some, all; by turns each sequence has each of them


@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_mix_gives_what_each_gives_alone(spec, format, rng):
    """Accepted counts mix too. Bit for bit, and against the recurrence over what was accepted."""
    options = {"capacity": 7, "max_window": T, "format": format, "layers": (4,)}
    batch, alone = Rig(spec, rng, **options), Rig(spec, rng, **options)
    for layer, weights in batch.weights.items():
        alone.pool.bind(layer, **weights)
    seqs, lone = batch.pool.alloc(3), alone.pool.alloc(3)
    kept, got = {s: [] for s in seqs}, {s: [] for s in seqs}
    mixes = set()
    for turn in range(TURNS):
        drafts = [DRAFTS[(turn + i) % 3] for i in range(3)]
        counts = [random_int(rng, int(turn < 3), 1 + d) for d in drafts]
        parts = [batch.draw(1 + d) for d in drafts]
        outputs = batch.step(
            dict(zip(seqs, parts, strict=True)), accepted=dict(zip(seqs, counts, strict=True)),
            width=T, pads=turn % 2,
        )  # fmt: skip
        for s, t, part, count in zip(seqs, lone, parts, counts, strict=True):
            want = alone.step({t: part}, accepted={t: count}, pads=0)
            assert_equal_outputs(outputs[s], want[t])
            assert_same(batch, s, alone, t)
            kept[s].append(part[:count])
            got[s].append({key: y[:count] for key, y in outputs[s].items()})
            mixes.add((len(part) - 1, "all" if count == len(part) else min(count, 1)))
        check_books(batch.pool)
    assert {d for d, _ in mixes} == set(DRAFTS)
    assert batch.wrapper.counters.folds > 0
    streams = {s: join(parts) for s, parts in kept.items()}
    decoded = {s: np.ones(len(stream), dtype=bool) for s, stream in streams.items()}
    batch.check(streams, {s: joined(outs) for s, outs in got.items()}, decoded=decoded)
