"""Every node of a tree gives what its root-to-leaf chain gives when it is decoded alone."""

import numpy as np
import pytest
import torch

from replayinfer.testing import assert_bitwise_equal, assert_within_budget

from ..pools.kit import memory
from ..transfer.rig import CASES, FLOOR, SPECS, Rig, assert_equal_outputs, assert_same, join
from .forest import leaves, matrix, path_to, random_tree

L, T = 9, 7
HISTORIES = (0, 1, 4, 7)  # with pages of 2 rows, windows begin at and inside of a page
SIZES = (7, 3, 5, 6)  # the last two fold first, and the last crosses a page more than it fills


def planted(spec, rng, **options):
    """Sequences with rows, and what they were fed."""
    options = {"capacity": L, "max_window": T, "sequences": 24} | options
    rig = Rig(spec, rng, **options)
    fed = {seq: rig.draw(n) for seq, n in zip(rig.pool.alloc(4), HISTORIES, strict=True)}
    rig.step(fed)
    return rig, fed


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_every_node_is_the_end_of_its_chain(spec, format, rng):
    rig, fed = planted(spec, rng, format=format)
    trees = {seq: random_tree(n, rng) for seq, n in zip(fed, SIZES, strict=True)}
    parts = {seq: rig.draw(n) for seq, n in zip(fed, SIZES, strict=True)}
    # First the chains, on forks that fold where the trees do.
    chains, folds = {}, []
    for seq, parents in trees.items():
        ends = leaves(parents)
        for child, leaf in zip(rig.pool.fork(seq, len(ends)), ends, strict=True):
            chains[child] = (seq, path_to(parents, leaf))
            folds.append(rig.pool.history(seq) + len(parents) > L)
    alone = rig.step({c: parts[s][p] for c, (s, p) in chains.items()}, force_fold=np.array(folds))
    together = rig.start(parts, parents=matrix(list(trees.values())))
    rig.wrapper.abort()

    got, exact, plain, chained = [], [], [], []
    for child, (seq, path) in chains.items():
        line = join([fed[seq], parts[seq][path]])
        references = [rig.reference(line), rig.reference(line, torch.float32, readout=True)]
        for layer in rig.layers:
            name = f"conv {layer}"
            assert_bitwise_equal(together[seq][name][path], alone[child][name], name)
            name = f"y {layer}"
            got.append(together[seq][name][path])
            chained.append(alone[child][name])
            for into, reference in zip((exact, plain), references, strict=True):
                into.append(reference[name][len(fed[seq]) :])
    got, exact, plain, chained = (torch.cat(x) for x in (got, exact, plain, chained))
    assert_within_budget(got, exact=exact, rounded=plain.float(), floor=FLOOR, name="y")
    # The sums are the chain's, over the same terms; only zeros for other branches stand between.
    assert_within_budget(got, exact=chained.double(), floor=FLOOR, name="y against the chains")


@pytest.mark.parametrize(("spec", "format"), CASES)
def test_a_tree_without_branches_is_a_chain(spec, format, rng):
    """Bit for bit, in outputs, rows and rings, whatever part is accepted."""
    state = rng.get_state()
    rig, fed = planted(spec, rng, format=format)
    rng.set_state(state)
    twin, others = planted(spec, rng, format=format)
    parts = [rig.draw(n) for n in SIZES]
    trees = [list(range(-1, n - 1)) for n in SIZES]
    accepted = [3, 0, 5, 1]
    a = dict(zip(fed, parts, strict=True))
    b = dict(zip(others, parts, strict=True))
    paths = {seq: list(range(n)) for seq, n in zip(a, accepted, strict=True)}
    got = rig.step(a, parents=matrix(trees), paths=paths)
    want = twin.step(b, accepted=dict(zip(b, accepted, strict=True)))
    for x, y in zip(a, b, strict=True):
        assert_equal_outputs(got[x], want[y])
        assert_same(rig, x, twin, y)
    for name, tensor in memory(rig.pool).items():
        assert_bitwise_equal(tensor, memory(twin.pool)[name], name)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bits_do_not_depend_on_the_other_trees(spec, rng):
    """A tree beside full, short and empty windows, or alone in a wider one."""
    rig, fed = planted(spec, rng)
    trees = [random_tree(n, rng) for n in (5, 0, 2, 7)]
    parts = {seq: rig.draw(len(p)) for seq, p in zip(fed, trees, strict=True)}
    crowd = rig.start(parts, parents=matrix(trees), pads=3)
    rig.wrapper.abort()
    for seq, parents in zip(fed, trees, strict=True):
        if not parents:
            assert not crowd[seq]["y 1"].numel()
            continue
        alone = rig.start({seq: parts[seq]}, parents=matrix([parents], T), width=T, pads=0)
        rig.wrapper.abort()
        assert_equal_outputs(alone[seq], crowd[seq])


@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolution_walks_up_the_tree(width, rng):
    """Short taps, taps that reach into the history, taps longer than the tree is deep."""
    spec = SPECS["gdn"].__class__(heads=2, dim=3, state=4, key_heads=1, conv_width=width)
    rig, fed = planted(spec, rng)
    parents = [-1, 0, 0, 1, 2, 4, 5]
    for seq, stream in fed.items():
        part = rig.draw(7)
        out = rig.start({seq: part}, parents=[parents])[seq]
        rig.wrapper.abort()
        for node in range(7):
            path = path_to(parents, node)
            want = rig.reference(join([stream, part[path]]))
            for layer in rig.layers:
                assert_within_budget(
                    out[f"conv {layer}"][node], exact=want[f"conv {layer}"][-1], floor=2 * FLOOR
                )
