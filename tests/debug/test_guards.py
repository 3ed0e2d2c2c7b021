"""Writes outside of a pool's pages are found and the pool is named."""

from functools import partial

import numpy as np
import pytest
import torch

from replayinfer import CheckError
from replayinfer.debug import check_guards

from ..pools.kit import random_int
from ..transfer.rig import FAMILIES, SPECS


def write_page(guarded, layer, page, rng):
    """One element of a page by its address, as a kernel that trusts the page id does."""
    pages = guarded.pages
    inner = pages[0, 0].numel()
    address = pages.storage_offset() + layer * pages.stride(0) + page * pages.stride(1)
    flat = guarded.whole.view(-1).view(torch.uint8)
    size = pages.element_size()
    at = (address + random_int(rng, 0, inner - 1)) * size
    flat[at : at + size] = torch.tensor(list(np.float64(1.5).tobytes())[-size:], dtype=torch.uint8)


def guarded_of(rig):
    return [g for g in rig.pool.guarded() if g.pages.numel()]


@pytest.mark.parametrize("where", ["fold", "run"])
@pytest.mark.parametrize("format", ["fp32", "fp32_split"])
@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_page_minus_one_and_one_past_the_end(spec, format, where, checked_rig, rng):
    """In each pool, on both sides, in any layer; by the step in which it happens."""
    rig = checked_rig(spec, rng, format=format)
    (seq,) = rig.pool.alloc()
    rig.step({seq: rig.draw(2)})
    names = set()
    for guarded in guarded_of(rig):
        for page, side in ((-1, "before the first"), (guarded.pages.shape[1], "after the last")):
            part = rig.draw(1)
            rig.wrapper.plan([seq])
            if where == "run":
                rig.wrapper.fold()
            write_page(guarded, random_int(rng, 0, 1), page, rng)
            inputs = {k: x[None] for k, x in part.inputs[1].items()}
            step = rig.wrapper.fold if where == "fold" else partial(rig.wrapper.run, 1, **inputs)
            with pytest.raises(CheckError, match="something wrote into") as error:
                step()
            assert str(error.value).endswith(f"wrote into {guarded.name}, {side} page")
            names.add(guarded.name)
            guarded.refill()
            rig.wrapper.abort()
            rig.step({seq: part})
    fields = {f"input pages ({name})" for name in rig.pool.inputs.fields}
    assert names == fields | {"checkpoint pages", "convolution rings"}


def test_pages_inside_are_not_guards(checked_rig, rng):
    rig = checked_rig(SPECS["gdn"], rng)
    for guarded in guarded_of(rig):
        for layer in (0, 1):
            for page in (0, guarded.pages.shape[1] - 1):
                write_page(guarded, layer, page, rng)
    check_guards(rig.pool)


def test_guards_after_sleep_and_resize(checked_rig, rng, monkeypatch):
    rig = checked_rig(SPECS["kda"], rng)
    monkeypatch.setenv("REPLAYINFER_CHECK", "1")
    moves = (
        lambda: (rig.pool.sleep(), rig.pool.wake()),
        lambda: (rig.pool.sleep(keep=False), rig.pool.wake()),
        lambda: rig.pool.resize(max_sequences=9, checkpoint_pages=3, input_pages=40),
    )
    for move in moves:
        move()
        check_guards(rig.pool)
        for guarded in guarded_of(rig):
            write_page(guarded, 1, guarded.pages.shape[1], rng)
            with pytest.raises(CheckError, match="after the last page"):
                check_guards(rig.pool)
            guarded.refill()


def test_without_checks_nothing_is_looked_at(rng, checked_rig, monkeypatch):
    """The checks belong to the wrapper, which reads the variable when it is made."""
    rig = checked_rig(SPECS["mamba2"], rng)
    monkeypatch.delenv("REPLAYINFER_CHECK", raising=False)
    unchecked = type(rig.wrapper)(rig.pool)
    (seq,) = rig.pool.alloc()
    write_page(guarded_of(rig)[0], 0, -1, rng)
    unchecked.plan([seq])
    unchecked.fold()
    unchecked.abort()
    rig.wrapper.plan([seq])
    with pytest.raises(CheckError):
        rig.wrapper.fold()
