"""Rigs whose pools and wrappers were made with the checks on."""

import pytest

from ..transfer.rig import Rig


@pytest.fixture
def checked_rig(monkeypatch):
    """``checked_rig(spec, rng, ...)`` makes one; others stay without checks."""

    def make(*args, **options):
        with monkeypatch.context() as patch:
            patch.setenv("REPLAYINFER_CHECK", "1")
            return Rig(*args, **options)

    return make
