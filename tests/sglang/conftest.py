"""The suite that runs SGLang's own engine: `make test-sglang`, in an environment of its own."""

from __future__ import annotations

import importlib.metadata

import pytest

try:
    importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny models by name."""
    from .sglang_models import write

    return write(tmp_path_factory.mktemp("models"))
