"""Workers share one GPU: what a test has left in its allocator's cache is not another's to use."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def give_memory_back(request):
    yield
    if torch.cuda.is_available():
        if request.node.get_closest_marker("xdist_group"):
            gc.collect()
        torch.cuda.empty_cache()
