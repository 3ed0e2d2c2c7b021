"""The variable: what it takes, and when it is read."""

import pytest

from replayinfer import InputError, ReplayDecodeWrapper, StatePool
from replayinfer.env import checks_enabled

from ..pools.kit import Unchanged
from ..transfer.rig import SPECS

NAME = "REPLAYINFER_CHECK"
BAD = ("yes", "2", "01", "-1", "1.0", "checked", "none", "o n")


def test_values(monkeypatch):
    for value, enabled in {
        "1": True, "true": True, "ON": True, " 1 ": True,
        "0": False, "false": False, "Off": False, "": False, " ": False,
    }.items():  # fmt: skip
        monkeypatch.setenv(NAME, value)
        assert checks_enabled() is enabled, value
    monkeypatch.delenv(NAME)
    assert checks_enabled() is False


@pytest.mark.parametrize("value", BAD)
def test_others_are_refused(value, monkeypatch):
    """Nothing is guessed: neither on nor off."""
    pool = StatePool(SPECS["gdn"], [0], 2)
    monkeypatch.setenv(NAME, value)
    reason = f"REPLAYINFER_CHECK: got '{value}'; allowed 1 or 0"
    with pytest.raises(InputError, match=reason):
        StatePool(SPECS["gdn"], [0], 2)
    with pytest.raises(InputError, match=reason):
        ReplayDecodeWrapper(pool)
    sizes = pool.sizes
    with Unchanged(pool), pytest.raises(InputError, match=reason):
        pool.resize(max_sequences=4)
    assert pool.sizes is sizes


def test_it_is_read_when_a_pool_is_made(monkeypatch):
    monkeypatch.setenv(NAME, "1")
    pool = StatePool(SPECS["gdn"], [0, 1], 2)
    monkeypatch.setenv(NAME, "0")
    assert pool.checkpoints.guarded.whole.shape[1] == pool.sizes.checkpoint_pages + 2
    other = StatePool(SPECS["gdn"], [0, 1], 2)
    assert other.checkpoints.guarded.whole.shape[1] == other.sizes.checkpoint_pages
