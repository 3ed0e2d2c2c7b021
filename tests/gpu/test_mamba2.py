"""Mamba-2's kernels on a GPU, against the torch backend on the same device."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from replayinfer.kernels.launch import lookup as launch

from ..kernels.pair import Case, Pair
from ..kernels.vary import vary
from .layouts import Slices, WideIds, WideSlices

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BASE = Case(
    heads=8, dim=64, state=128, groups=2, capacity=11, page_rows=4, batch=5, pads=2, steps=26,
    layers=2,
)  # fmt: skip
MEASURED = {
    (key.split()[0], config)
    for key, choices in launch._table("NVIDIA H200").items()
    for _, config in choices
    if config
}


def force(monkeypatch, fused: bool | None, **others: launch.LaunchConfig) -> None:
    """Take the one kernel or the two, and other choices by operation, whatever the table says."""
    chosen = launch.lookup

    def lookup(op, spec, *rest):
        if op == "fused" and fused is not None:
            return launch.LaunchConfig(num_warps=4, rows=16) if fused else None
        return others.get(op) or chosen(op, spec, *rest)

    monkeypatch.setattr(launch, "lookup", lookup)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(
    "case",
    vary(
        [BASE],
        dim=[20, 64, 80, 128],
        state=[16, 24, 64, 256],
        groups=[1, 8],
        format=["fp32", "bf16", "fp16"],
        dtype=[torch.float32, torch.float16],
        capacity=[1, 2, 33],
        page_rows=[1, 64],
        z=[True],
        softplus=[False],
    ),
    ids=str,
)
def test_decode(case, fused, rng, monkeypatch):
    force(monkeypatch, fused)
    if case.capacity > case.steps:
        case = dataclasses.replace(case, steps=case.capacity * 3 // 2)
    Pair(case, rng, "cuda").decode().check()


@pytest.mark.parametrize("format", ["fp32", "fp32_split", "bf16"])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("stages", [1, 2])
def test_fold_in_the_order_of_the_matrix_units(format, rows, stages, rng, monkeypatch):
    config = launch.LaunchConfig(
        num_warps=rows // 16, rows=rows, columns=64, heads=4, stages=stages, registers=128
    )
    force(monkeypatch, False, fold=config)
    Pair(dataclasses.replace(BASE, format=format), rng, "cuda").decode().check()


@pytest.mark.parametrize(("op", "config"), sorted(MEASURED, key=str), ids=str)
def test_choices_of_the_table(op, config, rng, monkeypatch):
    """Each decodes right at a small batch too, whatever batch and shape it was measured for."""
    if op == "fused":
        monkeypatch.setattr(
            launch, "lookup", lambda o, *rest: config if o == op else launch.rule(o, *rest[:3])
        )
    else:
        force(monkeypatch, False, **{op: config})
    Pair(dataclasses.replace(BASE, steps=14, layers=1), rng, "cuda").decode().check()


def test_more_programs_than_the_small_grid_axes_hold(rng, monkeypatch):
    case = Case(heads=128, dim=16, state=16, groups=1, batch=600, pads=1, steps=3, capacity=2)
    for fused in (True, False):
        force(monkeypatch, fused)
        Pair(case, rng, "cuda").decode().check()


@pytest.mark.xdist_group("memory")
def test_pages_past_two_to_the_31_elements(rng, monkeypatch):
    case = Case(heads=8, dim=64, state=128, batch=2, capacity=3, steps=6, dtype=torch.bfloat16)
    page = 2 * case.heads * case.dim * case.state  # int16 values of a split page
    pages = 2**31 // page + 16
    row_pages = 2**31 // (case.page_rows * case.heads * case.dim) + 16

    def take_low_pages(pool):
        keep = 12
        pool.checkpoint_ids.take(pages - keep)
        pool.input_ids.take(row_pages - keep)

    for fused in (True, False):
        force(monkeypatch, fused)
        pair = Pair(
            case, rng, "cuda", checkpoint_pages=pages, input_pages=row_pages, before=take_low_pages
        )
        pool = pair.worlds[1][0]
        assert int(pool.cursors.checkpoint[pool.cursors.live].min()) * page > 2**31
        pair.decode().check()
        del pair
        torch.cuda.empty_cache()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("layout", [WideIds, Slices, WideSlices])
@pytest.mark.parametrize("case", vary([BASE], format=["fp32_split", "bf16"], z=[True]), ids=str)
def test_wide_ids_and_slices_of_a_projection(case, layout, fused, rng, monkeypatch):
    force(monkeypatch, fused)
    pair = Pair(case, rng, DEVICE)
    pair.worlds[1][2].backend = layout()
    pair.decode().check()


def dead_rows(pool, sequences, page_rows):
    """Pages and rows in them, as two lists, that hold no committed row of any sequence."""
    dead = set(itertools.product(range(pool.sizes.input_pages), range(page_rows)))
    for sequence in sequences:
        (slot,) = pool.cursors.resolve([sequence])
        for row in range(pool.history(sequence)):
            dead.remove((int(pool.cursors.table[slot, row // page_rows]), row % page_rows))
    return map(list, zip(*dead, strict=True))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_nothing_dead_is_read(format, fused, rng, monkeypatch):
    """Rows past the history, free pages and inputs of pads turn NaN again before every step."""
    force(monkeypatch, fused)
    pair = Pair(dataclasses.replace(BASE, format=format), rng, DEVICE)
    case, (pool, sequences, _) = pair.case, pair.worlds[1]
    for step in range(case.steps):
        pages, rows = dead_rows(pool, sequences, case.page_rows)
        for world, *_ in pair.worlds:
            for field in world.inputs.fields.values():
                field[:, pages, rows] = float("nan")
        pair.step([int((step + i) % 4 != 3) for i in range(case.batch)])
    pair.check()


def test_a_captured_step_is_the_same_step(rng, monkeypatch):
    """Fold and readouts replay from a CUDA graph with whatever the next plan says."""
    for fused in (True, False):
        force(monkeypatch, fused)
        pair = Pair(BASE, rng, "cuda")
        (_, _, _), (pool, sequences, wrapper) = pair.worlds
        backend, spec, bucket = wrapper.backend, pair.spec, BASE.batch
        shapes = {"x": (spec.heads, spec.dim), "dt": (spec.heads,)}
        shapes |= dict.fromkeys(("B", "C"), (spec.groups, spec.state))
        inputs = {
            name: torch.randn((bucket, 1, *shape), device="cuda", dtype=BASE.dtype)
            for name, shape in shapes.items()
        }
        out = torch.empty((bucket, 1, spec.heads, spec.dim), device="cuda", dtype=BASE.dtype)
        graph = None
        for _ in range(3 * BASE.capacity):
            plan = wrapper.plan(sequences)
            # Twice on the same plan: a fold writes another page or the same rows again, a readout
            # the same row again, so eager and replayed outputs must agree bit for bit.
            wrapper.fold()
            for layer in range(BASE.layers):
                backend.readout(pool, plan, layer, inputs, out)
            eager = out.clone()
            if graph is None:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for layer in range(BASE.layers):
                        backend.readout(pool, plan, layer, inputs, out)
            out.fill_(np.nan)
            graph.replay()
            assert torch.equal(out, eager)
            plan.layers_run.update(pool.layers)
            wrapper.commit()


@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
def test_the_demo_decodes_on_the_gpu(format, capsys):
    pytest.importorskip("typer")
    pytest.importorskip("transformers")
    from replayinfer.cli.app import run

    arguments = ["--model", "nemotron_h", "--backend", "triton", "--format", format]
    assert (
        run(["demo", *arguments, "--prompts", "3", "--tokens", "24", "--capacity", "5", "--json"])
        == 0
    )
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["backend"], result["ok"], result["pages_leaked"]) == ("triton", True, 0)
    assert result["folds"] > 3
    assert "interpreter" not in err
