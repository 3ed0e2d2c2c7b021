"""What `ModelLayers` says and adds up, by hand-made numbers."""

import dataclasses
import json
import math

import pytest
import torch

from replayinfer.backends.torch.gates import mamba2_dt  # noqa: F401
