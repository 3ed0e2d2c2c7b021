"""The delta-rule kernels for windows of drafts in Triton's interpreter: against the torch backend,
and against the float64 recurrence.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

pytest.importorskip("triton")

from replayinfer import GDNSpec, KDASpec, ReplayDecodeWrapper, StatePool
from replayinfer.testing import (
    assert_bitwise_equal,
    delta_inputs,
    delta_weights,
    relative_error,
)

from ..backends.world import EPSILON, Case, World
from ..trees.forest import leaves, matrix, path_to, random_tree
from .delta_pair import OUTPUT_EPSILON, DeltaCase
from .vary import vary
from .verify_pair import VerifyPair, verifying

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="needs TRITON_INTERPRET=1; use make test"
)
SMALL = DeltaCase(heads=1, key_heads=1, batch=2, pads=1, capacity=9)
BASES = [SMALL, SMALL.but(family="kda")]
EXACT = {"format": "fp32", "dtype": torch.float32}


@pytest.mark.parametrize(
    "case", vary(BASES, format=["fp32", "fp32_split", "bf16", "fp16"]), ids=str
)
def test_formats(case, rng):
    """Mixed windows over folds; the rows that are stored, u among them, are the torch backend's."""
    pair = VerifyPair(case.but(capacity=6), rng, width=4)
    pair.verify([4, 1], accepted=[3, 1])
    pair.verify([4, 2], accepted=[2, 0])
    pair.verify([0, 4])
    pair.check()
    assert pair.worlds[1][2].counters.folds


@pytest.mark.parametrize("width", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("base", BASES, ids=str)
def test_widths(base, width, rng):
    """Windows that are full, empty, and neither; rows of a window lie in several pages."""
    case = base.but(capacity=width + 3, batch=3, pads=0, **EXACT)
    pair = VerifyPair(case, rng, width=width)
    pair.verify([width, 0, 1], accepted=[width - 1, 0, 1])
    pair.verify([1, width, width - 1], accepted=[1, width, 0])
    pair.check()


@pytest.mark.parametrize(
    "case",
    vary(
        [base.but(batch=1, capacity=5, **EXACT) for base in BASES],
        gate=["log"],
        norm=["none"],
        beta=["sigmoid2", "given"],
        scale=[0.37],
        page_rows=[1, 16],
        dim=[20],
        state=[24],
    )
    + vary([base.but(batch=1, capacity=5) for base in BASES], dtype=[torch.float16])
    + vary([BASES[0].but(batch=1, capacity=5)], layers=[2])
    + vary([BASES[1].but(batch=1, capacity=5, **EXACT)], gate=["bounded"]),
    ids=str,
)
def test_variations(case, rng):
    pair = VerifyPair(case, rng, width=3)
    for accepted in (2, 1, 3):
        pair.verify([3], accepted=[accepted])
    pair.check()
    assert pair.worlds[1][2].counters.folds


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("base", BASES, ids=str)
def test_value_heads_of_a_key_head(base, ratio, rng):
    case = base.but(heads=2 * ratio, key_heads=2, batch=1, pads=0, **EXACT)
    pair = VerifyPair(case, rng, width=4)
    pair.verify([4], accepted=[3])
    pair.verify([4])
    pair.check()


@pytest.mark.parametrize(("dim", "state"), [(64, 64), (128, 128)])
@pytest.mark.parametrize("base", BASES, ids=str)
def test_real_head_sizes(base, dim, state, rng):
    """fp32 all through: 3e-6 over sums of as many products as a model has."""
    case = base.but(dim=dim, state=state, heads=1, batch=1, pads=0, **EXACT)
    pair = VerifyPair(case, rng, width=4)
    pair.verify([4], accepted=[2])
    pair.verify([3])
    pair.check()


@pytest.mark.parametrize(
    ("format", "dtype", "warps", "rows"),
    [
        ("fp32_split", torch.bfloat16, 1, 64),
        ("fp32_split", torch.bfloat16, 2, 32),
        ("fp32_split", torch.float16, 2, 64),
        ("bf16", torch.float32, 1, 32),
        ("fp16", torch.float16, 2, 64),
        ("fp16", torch.bfloat16, 4, 128),
        ("fp32", torch.bfloat16, 1, 64),
        ("fp32", torch.bfloat16, 2, 64),
    ],
)
def test_operands(format, dtype, warps, rows, rng):
    """Every pair of plane and input types, in blocks of several tiles to a warp."""
    case = SMALL.but(
        dim=128, state=64, heads=1, batch=1, pads=0, format=format, dtype=dtype, warps=warps,
        rows=rows,
    )  # fmt: skip
    pair = VerifyPair(case, rng, width=4)
    pair.verify([4], accepted=[3])
    pair.verify([4])


@pytest.mark.parametrize("base", BASES, ids=str)
def test_longer_histories_than_a_block_of_rows(base, rng):
    case = base.but(capacity=41, page_rows=4, heads=1, batch=1, pads=0, **EXACT)
    pair = VerifyPair(case, rng, width=8)
    for _ in range(5):
        pair.verify([8])
    pair.verify([8], accepted=[5])
    pair.check()
    assert pair.worlds[1][2].counters.folds


@pytest.mark.parametrize(
    ("family", "gate", "gates", "format"),
    [
        ("gdn", "softplus", "extreme", "fp32"),
        ("gdn", "log", "near_one", "fp32_split"),
        ("kda", "log", "extreme", "fp32_split"),
        ("kda", "bounded", "near_one", "fp32"),
    ],
)
def test_against_the_recurrence(family, gate, gates, format, rng):
    """Rounds of mixed windows whose rejected drafts are junk: as near to float64 as the plain fp32
    recurrence is, in every head; see `test_delta` for the factor.
    """
    spec = {"gdn": GDNSpec, "kda": KDASpec}[family](
        heads=6, dim=8, state=16, key_heads=3, conv_width=0, gate=gate
    )
    case = Case(
        spec, tokens=8, batch=1, pads=1, capacity=8, max_window=4, page_rows=2, format=format,
        gates=gates,
    )  # fmt: skip
    World(case, rng, backend="triton").decode().check(factor=6, floor=4 * EPSILON)


def test_gates_that_erase_everything(rng):
    """A log decay of minus infinity: what came before is gone, and nothing is NaN."""
    for base in BASES:
        case = base.but(gate="log", heads=1, batch=1, pads=0, **EXACT)
        pair = VerifyPair(case, rng, width=4)
        pair.verify([4])
        pair.verify([4], erase=2)
        pair.verify([3])
        pair.check()


@pytest.mark.parametrize("nodes", [3, 6])
@pytest.mark.parametrize("base", BASES, ids=str)
def test_trees(base, nodes, rng):
    """Random trees beside a chain and an empty window, and a random path of each accepted."""
    case = base.but(heads=1, batch=3, pads=0, capacity=nodes + 3, **EXACT)
    pair = VerifyPair(case, rng, width=nodes)
    for turn in range(2):
        trees = [random_tree(nodes - turn, rng), list(range(-1, nodes - 1)), []]
        ends = [int(torch.randint(-1, len(p), (), generator=rng)) for p in trees]
        paths = [path_to(p, end) for p, end in zip(trees, ends, strict=True)]
        pair.verify([len(p) for p in trees], parents=matrix(trees, nodes), paths=paths)
    pair.check()


@pytest.mark.parametrize("base", BASES, ids=str)
def test_every_node_is_the_end_of_its_chain(base, rng):
    """A node gives what its root-to-leaf chain gives when it is decoded alone."""
    case = base.but(batch=1, pads=0, capacity=12, **EXACT)
    pair = VerifyPair(case, rng, width=6)
    pair.verify([5])
    parents = random_tree(6, rng)
    _, sequences, wrapper = pair.worlds[1]
    (inputs,) = [delta_inputs(pair.spec, 6, 1, case.dtype, rng)]

    def outputs(tokens, **options):
        wrapper.plan(sequences, [tokens["q"].shape[1]], **options)
        wrapper.fold()
        y = wrapper.run(2, **tokens)[0]
        wrapper.abort()
        return y

    tree = outputs(inputs, parents=[parents])
    for leaf in leaves(parents):
        path = path_to(parents, leaf)
        chain = outputs({name: value[:, path].contiguous() for name, value in inputs.items()})
        # The sums are the chain's; only the place of a token in a tile is another.
        assert relative_error(tree[path], chain) <= OUTPUT_EPSILON[case.dtype]


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
@pytest.mark.parametrize(
    ("parents", "bad", "good"),
    [((-1, 0, 1, 2), 2, (0, 1)), ((-1, 0, 0, 2), 1, (0, 2, 3))],
    ids=["chain", "tree"],
)
def test_a_draft_that_is_not_finite_stays_by_itself(family, format, parents, bad, good, rng):
    """It reaches neither the tokens before it nor its siblings; rejected it leaves no trace."""
    case = SMALL.but(family=family, format=format)
    pool = StatePool(case.spec, [0], 2, capacity=9, max_window=4, page_rows=2, format=format,
                     dtype=case.dtype)  # fmt: skip
    pool.bind(0, **delta_weights(case.spec, rng))
    wrapper = ReplayDecodeWrapper(pool, backend="triton")
    inputs = delta_inputs(case.spec, 4, 1, case.dtype, rng)
    poisoned = {name: value.clone() for name, value in inputs.items()}
    for value in poisoned.values():
        value[:, bad] = math.nan
    more = delta_inputs(case.spec, 1, 1, case.dtype, rng)
    found = []
    for given in (inputs, poisoned):
        (seq,) = pool.alloc()
        wrapper.plan([seq], 4, parents=[parents])
        wrapper.fold()
        y = wrapper.run(0, **given)[0]
        wrapper.commit(paths=[list(good)])
        wrapper.plan([seq], 1)
        wrapper.fold()
        after = wrapper.run(0, **more)[0]
        wrapper.commit()
        found.append((y[list(good)], after, wrapper.materialize(seq)))
        dirty = y[bad]
    for clean, other, name in zip(*found, ("y", "next y", "state"), strict=True):
        assert_bitwise_equal(other, clean, name)
    assert torch.isnan(dirty).all()


def test_bits_do_not_depend_on_the_other_windows(rng):
    """A window beside others, or alone."""
    for base in BASES:
        case = base.but(batch=2, pads=1)
        pair = VerifyPair(case, rng, width=4)
        pair.verify([3, 4], accepted=[3, 2])
        _, sequences, wrapper = pair.worlds[1]
        inputs = delta_inputs(pair.spec, 4, 2, case.dtype, rng)
        results = []
        for who in ([0, 1], [0]):
            with verifying(case):
                wrapper.plan([sequences[i] for i in who], [2, 4][: len(who)], window=4)
                wrapper.fold()
                y = wrapper.run(2, **{n: v[who].contiguous() for n, v in inputs.items()})
            wrapper.abort()
            results.append(y[0])
        assert_bitwise_equal(*results, "y")
