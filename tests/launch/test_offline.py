"""What Triton itself would compile, without a GPU and without its interpreter; see `offline`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia.compiler")


def offline(mode: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("offline.py"), mode],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_after_a_warmup_no_cache_key_is_new():
    lines = offline("keys")
    assert len(lines) >= 8
    for line in lines:
        assert line["warm"] > 4
        assert not line["new"]


@pytest.mark.slow
def test_checkpoints_and_rows_are_read_128_bits_at_a_time():
    """Not specializing the other arguments has cost no wide access."""
    lines = offline("wide")
    found = {line["kernel"]: line["wide"] for line in lines}
    assert found["_fold_kernel"][0] >= 8
    assert found["_fold_kernel"][1] >= 8
    assert found["_fused_kernel"][0] >= 6
    assert found["_readout_kernel"][0] >= 16
    assert found["_verify_kernel"][0] >= 16 + 4  # and the tokens' C
    # Five of them for the question whether a sum is finite; none to move an operand.
    assert {line["kernel"]: line["shuffles"] for line in lines}["_verify_kernel"] <= 6


@pytest.mark.slow
def test_a_prepass_that_convolves_has_registers_for_its_channels():
    """In two warps those of a wide key head would have none: unpacked, it spills 264 bytes."""
    measured, wide = offline("spills")
    assert (measured["warps"], measured["stack"]) == (2, 0)
    assert (wide["warps"], wide["stack"]) == (4, 0)
