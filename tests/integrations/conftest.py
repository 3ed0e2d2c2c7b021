"""Small hybrid models, built once, and what their own ``generate`` says."""

from __future__ import annotations

import pytest
import torch

from replayinfer import UnsupportedError
from replayinfer.demo.configs import DEFAULT_MODELS
from replayinfer.demo.models import build_model
from replayinfer.demo.prompts import load_prompts
from replayinfer.demo.run import quiet_peer


@pytest.fixture(scope="session", autouse=True)
def quiet():
    try:
        with quiet_peer():
            yield
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Models(dict):
    """By name; built when they are first asked for."""

    def __missing__(self, name):
        self[name] = build_model(name, seed=0)
        return self[name]


@pytest.fixture(scope="session")
def models():
    return Models()


@pytest.fixture(params=DEFAULT_MODELS)
def model(request, models):
    """One of the two that most tests here run; the others are in `test_architectures`."""
    return models[request.param]


@pytest.fixture(scope="session")
def prompts():
    """Four texts of 55, 24, 3 and 2 bytes: the last two are shorter than the convolution."""
    texts = load_prompts(4)
    return [texts[1], texts[0], texts[2][:3], texts[3][:2]]
