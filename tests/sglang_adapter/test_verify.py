"""Windows of drafts: what is accepted stays, whatever else happens to the slots."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replayinfer import PlanError
from replayinfer.integrations.sglang import speculation
from replayinfer.integrations.sglang.backends import _DeltaKernel, _StateUpdate
from replayinfer.integrations.sglang.slots import row_bytes_per_slot
from replayinfer.testing import peak_error

from .stand_ins import LAYERS, SLOTS, SPECS, Server
from .test_slots import FORMATS, OUTPUT, STATE, check


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SPECS)
def test_a_walk_of_windows_and_all_that_happens_to_slots(name, fmt, seed, rng):
    choose = random.Random(seed)
    server = Server(name, rng, capacity=6, format=fmt, window=4)
    live, cached = [1, 2], []
    server.clear(*live)
    server.extend(live, 5)
    for _ in range(20):
        free = [slot for slot in range(1, SLOTS) if slot not in server.truth]
        action = choose.choice(["verify"] * 6 + ["decode", "extend", "copy", "move", "new", "end"])
        if action == "verify":
            counts = [choose.randint(1, 4) for _ in live]
            track = {}
            if free and choose.random() < 0.5:  # a state within what is accepted
                at = choose.randrange(len(live))
                track = {live[at]: (choose.randrange(counts[at]), free[0])}
            check(server.verify([*live, 0], [*counts, 0], track, pads=choose.randint(0, 2)), fmt)
            cached += [target for _, target in track.values()]
        elif action == "decode":  # as in a batch that is not speculated on
            track = {choose.choice(live): free[0]} if free else None
            check(server.decode([*live, 0], track), fmt)
            cached += list(track.values()) if track else []
        elif action == "extend":
            server.extend([*live, 0, 0], choose.randint(1, 3))
        elif action == "copy" and free and cached:
            server.copy(choose.choice(cached), free[0])
            server.extend([free[0]], 2)
            live.append(free[0])
        elif action == "move" and free:
            slot = live.pop(choose.randrange(len(live)))
            server.move(slot, free[0])
            live.append(free[0])
        elif action == "new" and free:
            server.clear(free[0])
            server.extend([free[0]], 3)
            live.append(free[0])
        elif action == "end" and len(live) > 1:
            cached.append(live.pop())
    for slot in server.truth:
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


@pytest.mark.parametrize(("name", "fmt"), [("gdn", "fp32_split"), ("mamba2", "fp32")])
def test_kernels_do_the_same(name, fmt, rng):
    pytest.importorskip("triton")
    server = Server(name, rng, capacity=4, format=fmt, window=3, backend="triton")
    server.clear(1, 3)
    server.extend([1, 3], 3)
    check(server.verify([3, 0, 1], [2, 0, 3]), fmt)
    check(server.verify([3, 1], [1, 2], {1: (0, 5)}, pads=1), fmt)
    check(server.decode([3, 5, 1]), fmt)
    for slot in (1, 3, 5):
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_state_within_a_window_leaves_its_source_alone(fmt, rng):
    """Tracked before the last accepted token, where the target had rows of its own."""
    server = Server("gdn", rng, capacity=8, format=fmt, window=4)
    server.clear(1, 2, 3)
    server.extend([1, 2], 2)
    check(server.verify([1, 2], [3, 2]), fmt)
    check(server.verify([1], [4], {1: (1, 2)}), fmt)
    assert server.replay._history[1] == 7
    assert server.replay._history[2] == 0
    records = server.replay._records
    for own, used in ((records.own_checkpoint, records.checkpoint),
                      (records.own_table, records.table)):  # fmt: skip
        assert torch.equal(own[1:], used[1:])  # no slot is left on another's pages
    check(server.verify([2, 1], [2, 1]), fmt)
    for slot in (1, 2):
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


def test_a_verify_that_nobody_judged_leaves_no_trace(rng):
    server = Server("mamba2", rng, capacity=5, window=4)
    server.clear(1, 2)
    server.extend([1, 2], 2)
    server.verify([1, 2], [2, 1])
    server.replay.begin(torch.tensor([2, 1], dtype=torch.int32), verify=True)
    joined = server.inputs(4)
    server.replay.readout(LAYERS[0], **{n: torch.cat([v, v]) for n, v in joined.items()})
    check(server.decode([1, 2]), "fp32")
    with pytest.raises(PlanError, match="got accepted tokens of 7 rows, of which no step"):
        server.replay.accept(7, torch.tensor([1]))
    for slot in (1, 2):
        assert peak_error(server.state(slot), server.truth[slot]) < STATE


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_what_is_charged_is_what_is_held(name, rng):
    replay = Server(name, rng, capacity=8, window=4).replay
    charged = row_bytes_per_slot(
        SPECS[name], len(LAYERS), torch.float32, torch.float32, replay.options
    )
    assert replay.nbytes == charged * SLOTS


def test_counters(rng):
    server = Server("gdn", rng, capacity=4, policy="full", window=3)
    server.clear(1, 2)
    server.extend([1, 2], 1)
    server.verify([1, 2, 0], [3, 1, 0])
    server.verify([1, 2, 0], [2, 2, 0], {2: (1, 4)})
    server.decode([1])
    counts = server.replay.counters()
    assert counts.pop("bytes saved") != 0
    assert counts == {
        "decode rows": 1, "folds": 1, "folds for extend": 0, "folds for tracking": 1,
        "verified windows": 4, "accepted rows": 8,
    }  # fmt: skip


# SGLang's calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gdn", "kda", "kda-bounded"])
def test_target_verify(name, rng):
    """Parts of one row of ``q | k | v``, ``[1, batch * window, heads, dim]``, and flat gates."""
    server = Server(name, rng, capacity=5, window=4)
    server.clear(2, 5)
    server.extend([2, 5], 3)
    kernel = _DeltaKernel(server.replay)
    for _ in range(3):
        slots = [5, 0, 2]
        server.replay.begin(torch.tensor(slots, dtype=torch.int32), verify=True)
        for index, layer in enumerate(LAYERS):
            each = [server.inputs(4) for _ in slots]
            flat = [torch.cat([one[n][0].flatten(1) for n in "qkv"], -1) for one in each]
            sizes = [each[0][n][0, 0].numel() for n in "qkv"]
            parts = [
                part.unflatten(-1, each[0][n].shape[2:])[None]
                for n, part in zip("qkv", torch.cat(flat).split(sizes, -1), strict=True)
            ]
            a = torch.cat([one["a"][0].flatten(1) for one in each])
            b = torch.cat([one["b"][0].flatten(1) for one in each])
            kernel.layer = layer
            y = kernel.target_verify(
                A_log=None, dt_bias=None, q=parts[0], k=parts[1], v=parts[2],
                a=a, b=b if name == "gdn" else b[None], cache_steps=4, retrieve_parent_token=None,
            )  # fmt: skip
            assert y.shape == (1, 12, server.spec.heads, server.spec.dim)
            assert not y[0, 4:8].any()
            for i in (0, 2):
                want = server.advance(slots[i], index, each[i])
                assert peak_error(y[0, 4 * i : 4 * i + 4], want[0]) < OUTPUT["fp32"]
        server.replay.pause()
        server.replay.accept(3, torch.tensor([3, 3, 3]))


def test_state_update(rng):
    server = Server("mamba2", rng, capacity=5, window=4)
    server.clear(1, 3)
    server.extend([1, 3], 3)
    update = _StateUpdate(None, server.replay)
    spec = server.spec
    for _ in range(3):
        slots = [3, 1]
        server.replay.begin(torch.tensor(slots, dtype=torch.int32), verify=True)
        for index, layer in enumerate(LAYERS):
            each = [server.inputs(4) for _ in slots]
            x, dt, b, c = (torch.cat([one[n] for one in each]) for n in ("x", "dt", "B", "C"))
            out = torch.full((2, 4, spec.heads, spec.dim), torch.nan)
            update.layer = layer
            update(
                server.states[index], x, dt[..., None].expand(-1, -1, -1, spec.dim), None, b, c,
                dt_softplus=True, state_batch_indices=None, out=out, disable_state_update=True,
                intermediate_states_buffer=None, cache_steps=4, retrieve_parent_token=None,
            )  # fmt: skip
            for i, slot in enumerate(slots):
                want = server.advance(slot, index, each[i])
                assert peak_error(out[i], want[0]) < OUTPUT["fp32"]
        server.replay.pause()
        server.replay.accept(2, torch.tensor([3, 3]))


# Drafts -----------------------------------------------------------------------------------------


def tree(parents: list[int]) -> np.ndarray:
    """SGLang's mask of a tree: whom each node has above it, and itself."""
    mask = np.eye(len(parents), dtype=np.uint8)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def test_ngram_trees_become_their_deepest_paths():
    trees = [
        ([9, 5, 6, 7], [-1, 0, 1, 2], [9, 5, 6, 7]),  # a chain
        ([9, 5, 8, 6], [-1, 0, 0, 1], [9, 5, 6, 0]),  # two ways on from the root
        ([9, 5, 8, 6], [-1, 0, 0, 2], [9, 8, 6, 0]),
        ([9, 5, 0, 0], [-1, 0, 0, 0], [9, 5, 0, 0]),  # filled up with children of the root
        ([9, 0, 0, 0], [-1, 0, 0, 0], [9, 0, 0, 0]),  # nothing was found
    ]
    drafts = np.array([t for t, _, _ in trees], dtype=np.int64).flatten()
    masks = np.stack([tree(p) for _, p, _ in trees]).flatten()
    corpus = SimpleNamespace(draft_token_num=4)
    given = drafts.copy(), masks.copy()
    got, ancestors = speculation.only_chains(lambda *args: (drafts, masks), corpus, ["ids"], [], [])
    assert got.reshape(-1, 4).tolist() == [want for _, _, want in trees]
    assert (ancestors.reshape(-1, 4, 4) == np.tri(4)).all()
    assert (got.dtype, ancestors.dtype) == (drafts.dtype, masks.dtype)
    assert all((a == b).all() for a, b in zip(given, (drafts, masks), strict=True))
