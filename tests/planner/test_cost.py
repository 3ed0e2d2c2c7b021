"""Planning does not loop over sequences: Python executes the same instructions for 8 and for 512.

Times belong to a bench. A Python loop over a batch is what would make them grow, and that can be
counted exactly: bytecode instructions, in our code and in the numpy functions written in Python.
"""

import sys
from contextlib import contextmanager

import numpy as np
import pytest

from replayinfer import HostPlanner, StatePool

from ..pools.kit import SPECS


class Count:
    value = 0


@contextmanager
def instructions():
    """Count the bytecode instructions that run inside."""
    count = Count()

    def trace(frame, event, arg):
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count.value += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def step(planner, seqs, windows, force):
    """Every host call of a step."""
    plan = planner.plan(seqs, windows, force_fold=force, bucket=512)
    planner.folded(plan)
    planner.commit(plan, plan.windows - (plan.windows > 1))
    plan = planner.plan(seqs, windows, bucket=512)
    planner.abort(plan)
    plan = planner.plan(seqs, bucket=512)
    planner.folded(plan)
    planner.abort(plan)


def prepared(n, policy):
    """A pool in which a tenth of `n` sequences share pages, with histories 0..4 in turn."""
    pool = StatePool(
        SPECS["gdn"], [0], 1024, capacity=8, max_window=4, page_rows=4, checkpoint_pages=2048,
        input_pages=4096,
    )  # fmt: skip
    planner = HostPlanner(pool, policy=policy)
    seqs = np.array(pool.alloc(n))
    for round_ in range(4):
        some = seqs[np.arange(n) % 5 > round_]
        plan = planner.plan(some, bucket=512)
        planner.folded(plan)
        planner.commit(plan)
    for seq in seqs[4::10]:  # full pages
        pool.fork(int(seq))
    windows = 1 + np.arange(n) % 4
    force = np.arange(n) % 5 == 4
    return planner, seqs, windows, force


@pytest.mark.parametrize("policy", ["full", "spread", "deadline:1"])
def test_the_batch_size_does_not_matter(policy):
    counts = {}
    for n in (16, 512):
        planner, seqs, windows, force = prepared(n, policy)
        step(planner, seqs, windows, force)  # buffers made, caches warm
        planner, seqs, windows, force = prepared(n, policy)
        planner.abort(planner.plan([], bucket=512))
        with instructions() as count:
            step(planner, seqs, windows, force)
        counts[n] = count.value
    assert counts[16] > 100
    assert counts[512] == counts[16]


def test_handles_in_a_list_cost_no_more():
    counts = {}
    for n in (16, 512):
        planner, seqs, _, _ = prepared(n, "full")
        planner.abort(planner.plan([], bucket=512))
        handles = seqs.tolist()
        with instructions() as count:
            planner.abort(planner.plan(handles, bucket=512))
        counts[n] = count.value
    assert counts[512] == counts[16]


def test_alloc_and_free_do_not_loop_either():
    counts = {}
    for n in (16, 512):
        pool = StatePool(SPECS["mamba2"], [0], 512)
        pool.free(pool.alloc(n))
        with instructions() as count:
            pool.free(pool.alloc(n))
        counts[n] = count.value
    assert counts[512] == counts[16]


def test_the_count_sees_a_loop():
    with instructions() as short:
        sum(x for x in range(16))
    with instructions() as long:
        sum(x for x in range(512))
    assert long.value > short.value + 400
