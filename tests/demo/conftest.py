"""The demo's models, built once a session."""

from __future__ import annotations

import functools

import pytest
import torch

from replayinfer import UnsupportedError
from replayinfer.demo.models import build_model
from replayinfer.demo.run import quiet_peer


@pytest.fixture(scope="session")
def build():
    """`build_model` that remembers; skips where transformers is missing."""
    try:
        with quiet_peer():
            yield functools.cache(build_model)
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
