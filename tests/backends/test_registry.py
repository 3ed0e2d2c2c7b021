"""Backends by name: what is known, what is refused and why, what `auto` takes."""

from types import SimpleNamespace

import pytest
import torch

from replayinfer import InputError, ReplayDecodeWrapper, StatePool, UnsupportedError, backends
from replayinfer.backends import registry
from replayinfer.backends.torch import TorchBackend

from .world import BASES


class Named(TorchBackend):
    def __init__(self, name, reason=None):
        self.name, self.reason = name, reason

    def supports(self, pool):
        return self.reason


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    monkeypatch.setattr(registry, "_MADE", dict(registry._MADE))


@pytest.fixture
def pool():
    return StatePool(BASES[0].spec, [0], 1)


def test_torch_is_known_and_serves_every_family():
    assert "torch" in backends.available()
    for base in BASES:
        pool = StatePool(base.spec, [0], 1)
        assert ReplayDecodeWrapper(pool, backend="torch").backend.name == "torch"
        assert ReplayDecodeWrapper(pool).backend.name == "torch"  # on a CPU


@pytest.mark.parametrize("name", ["cuda", "", "Torch", "auto "])
def test_unknown_names(pool, name):
    with pytest.raises(UnsupportedError, match=rf"^backend: got '{name}'; allowed auto, .*torch"):
        ReplayDecodeWrapper(pool, backend=name)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_taken_name(name):
    before = backends.available()
    with pytest.raises(InputError, match=f"^name: got '{name}'; allowed a name not in use"):
        backends.register(name, TorchBackend)
    assert backends.available() == before


def test_registered_backends_are_made_once_and_only_when_used(pool):
    made = []

    def factory():
        made.append(Named("mine"))
        return made[-1]

    backends.register("mine", factory)
    assert backends.available()[-1] == "mine"
    assert ReplayDecodeWrapper(pool).backend.name == "torch"
    assert not made
    for _ in range(2):
        assert backends.select("mine", pool) is made[0]
    assert len(made) == 1


def test_auto_takes_the_first_that_supports_the_pool(pool):
    backends.register("last", lambda: Named("last"))
    backends.register("refuses", lambda: Named("refuses", "no such device"), first=True)
    assert backends.available()[0] == "refuses"
    assert backends.select("auto", pool).name == "torch"
    backends.register("first", lambda: Named("first"), first=True)
    assert ReplayDecodeWrapper(pool).backend.name == "first"


def test_refusals_say_why(pool):
    backends.register("refuses", lambda: Named("refuses", "no such device"))
    with pytest.raises(UnsupportedError, match=r"refused: refuses \(no such device\)"):
        ReplayDecodeWrapper(pool, backend="refuses")
    with pytest.raises(UnsupportedError, match=r"refused: given \(too old\)"):
        ReplayDecodeWrapper(pool, backend=Named("given", "too old"))


def test_auto_that_finds_nothing_lists_every_reason(pool, monkeypatch):
    factories = {name: (lambda n=name: Named(n, f"not {n}")) for name in ("a", "b")}
    monkeypatch.setattr(registry, "_FACTORIES", factories)
    with pytest.raises(UnsupportedError, match=r"refused: a \(not a\); b \(not b\)"):
        backends.select("auto", pool)


def test_an_object_is_taken_as_it_is(pool):
    mine = Named("mine")
    assert ReplayDecodeWrapper(pool, backend=mine).backend is mine


@pytest.mark.parametrize(
    ("device", "family", "taken"),
    [("cuda", "mamba2", "triton"), ("cuda", "gdn", "triton"), ("cpu", "mamba2", "torch")],
)
def test_auto_takes_triton_only_on_a_gpu(device, family, taken):
    registry._MADE["triton"] = Named("triton")
    pool = SimpleNamespace(device=torch.device(device), spec=SimpleNamespace(family=family))
    assert backends.select("auto", pool).name == taken
    assert backends.select("triton", pool).name == "triton"
