"""What every test gets: its own seed, NaN in fresh memory, and a reason where a GPU is missing."""

from __future__ import annotations

import os
import secrets

import pytest
import torch

try:
    import hypothesis
except ImportError:  # a machine with no network may lack it; those tests skip themselves
    pass
else:
    hypothesis.settings.register_profile("replayinfer", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("replayinfer")

SEED_VARIABLE = "REPLAYINFER_TEST_SEED"
SEED = pytest.StashKey[int]()


def pytest_configure(config):
    # The workers of pytest-xdist share the cores; torch would take all of them in each.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_report_header(config):
    devices = torch.cuda.device_count()
    interpreted = os.environ.get("TRITON_INTERPRET", "0")
    return f"torch {torch.__version__}, CUDA devices {devices}, TRITON_INTERPRET={interpreted}"


def why_no_gpu(count: int) -> str | None:
    """Why a test that needs `count` CUDA devices cannot run here, or None if it can."""
    if torch.cuda.device_count() < count:
        return f"needs {count} CUDA device(s), this machine has {torch.cuda.device_count()}"
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return "TRITON_INTERPRET=1 keeps kernels off the GPU; use make test-gpu"
    return None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            reason = why_no_gpu(marker.kwargs.get("count", marker.args[0] if marker.args else 1))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """Fresh on every run, printed where a test fails; REPLAYINFER_TEST_SEED repeats one."""
    value = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    request.node.stash[SEED] = value
    torch.manual_seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """A CPU generator seeded with this test's seed."""
    return torch.Generator().manual_seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and SEED in item.stash:
        report.sections.append(("seed", f"repeat with {SEED_VARIABLE}={item.stash[SEED]}"))
    return report


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(request):
    """`torch.empty` holds NaN (integers: their maximum), so that reading before writing shows.

    Not for GPU tests: the switch behind it also changes which CUDA kernels torch picks.
    """
    if request.node.get_closest_marker("gpu"):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
