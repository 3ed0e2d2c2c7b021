"""Bytes of checkpoints, rows, rings and weights, against numbers worked out by hand."""

import pytest
import torch

from replayinfer import FORMATS, GDNSpec, KDASpec, Mamba2Spec, StatePool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEMOTRON = Mamba2Spec(heads=128, dim=64, state=128, groups=8)
QWEN = GDNSpec(heads=32, dim=128, state=128, key_heads=16)
KIMI = KDASpec(heads=32, dim=128, state=128, key_heads=32)


@pytest.mark.parametrize(
    ("spec", "bytes_fp32"),
    [(NEMOTRON, 4_194_304), (QWEN, 2_097_152), (KIMI, 2_097_152),
     (Mamba2Spec(heads=3, dim=5, state=7), 420)],
    ids=["mamba2", "gdn", "kda", "odd"],
)  # fmt: skip
def test_checkpoint_bytes(spec, bytes_fp32):
    half = bytes_fp32 // 2
    stored = {name: spec.checkpoint_bytes(fmt) for name, fmt in FORMATS.items()}
    assert stored == {"fp32": bytes_fp32, "fp32_split": bytes_fp32, "bf16": half, "fp16": half}


@pytest.mark.parametrize(
    ("spec", "dtype", "fmt", "row"),
    [
        # x 128*64*2, B 8*128*2, dt 128*4
        (NEMOTRON, BF16, "fp32", 16_384 + 2_048 + 512),
        (NEMOTRON, FP16, "fp32_split", 16_384 + 2_048 + 512),
        (NEMOTRON, FP32, "bf16", 32_768 + 4_096 + 512),
        # k 16*128*2, its norm 16*4, g 32*4, u 32*128*4
        (QWEN, BF16, "fp32", 4_096 + 64 + 128 + 16_384),
        (QWEN, FP16, "bf16", 4_096 + 64 + 128 + 16_384),
        # k, norm, g, a provisional u and v 32*128*2 each, beta 32*4
        (QWEN, BF16, "fp32_split", 4_096 + 64 + 128 + 8_192 + 8_192 + 128),
        (QWEN, FP32, "fp32_split", 8_192 + 64 + 128 + 16_384 + 16_384 + 128),
        # k 32*128*2, norm 32*4, g per channel 32*128*4, u 32*128*4
        (KIMI, BF16, "fp32", 8_192 + 128 + 16_384 + 16_384),
        (KIMI, BF16, "fp32_split", 8_192 + 128 + 16_384 + 8_192 + 8_192 + 128),
        # without a norm of ours there is none to keep
        (GDNSpec(heads=4, dim=8, state=2, key_heads=2, norm="none"), FP32, "fp32", 16 + 16 + 128),
        (Mamba2Spec(heads=3, dim=5, state=7), BF16, "fp16", 30 + 14 + 12),
    ],
)
def test_row_bytes(spec, dtype, fmt, row):
    assert spec.row_bytes(dtype, FORMATS[fmt]) == row


def test_a_provisional_u_beside_fp16_is_bf16():
    """fp16 could overflow where bf16 cannot."""
    fields = {f.name: f.dtype for f in QWEN.row_fields(FP16, FORMATS["fp32_split"])}
    assert fields == {
        "k": FP16, "k_scale": FP32, "g": FP32, "u": BF16, "v": FP16, "beta": FP32,
    }  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("spec", [NEMOTRON, QWEN, KIMI], ids=["mamba2", "gdn", "kda"])
def test_activations_are_kept_as_given_and_gates_in_fp32(spec, dtype, fmt):
    fields = {f.name: f.dtype for f in spec.row_fields(dtype, FORMATS[fmt])}
    assert all(fields[name] is dtype for name in fields.keys() & {"x", "B", "k", "v"})
    gates = fields.keys() & {"dt", "g", "beta", "k_scale"}
    assert gates
    assert all(fields[name] is FP32 for name in gates)
    if "u" in fields and fmt != "fp32_split":
        assert fields["u"] is FP32  # folded as it is


@pytest.mark.parametrize(
    ("spec", "channels"),
    [(NEMOTRON, 128 * 64 + 2 * 8 * 128), (QWEN, 2 * 16 * 128 + 32 * 128), (KIMI, 3 * 32 * 128)],
    ids=["mamba2", "gdn", "kda"],
)
def test_convolution_channels_and_weights(spec, channels):
    assert spec.conv_channels == channels
    shapes = {f.name: f.shape for f in spec.weight_fields}
    assert shapes["conv_weight"] == (channels, 4)
    assert shapes["conv_bias"] == (channels,)
    bare = type(spec)(heads=spec.heads, dim=spec.dim, state=spec.state, conv_width=0)
    assert not {"conv_weight", "conv_bias"} & {f.name for f in bare.weight_fields}


def test_weights_by_family():
    def fields(spec):
        return {f.name: (f.shape, f.default) for f in spec.own_weight_fields}

    assert fields(NEMOTRON) == {
        "A": ((128,), None), "D": ((128,), 0.0), "dt_bias": ((128,), 0.0),
    }  # fmt: skip
    assert fields(QWEN) == {"A_log": ((32,), None), "dt_bias": ((32,), 0.0)}
    assert fields(KIMI) == {"A_log": ((32,), None), "dt_bias": ((32, 128), 0.0)}
    assert fields(GDNSpec(heads=2, dim=2, state=2, gate="log")) == {}


def test_inputs_by_family():
    def names(spec):
        return [f.name for f in spec.input_fields]

    assert names(NEMOTRON) == ["x", "dt", "B", "C", "z"]
    assert [f.name for f in NEMOTRON.input_fields if f.optional] == ["z"]
    assert names(QWEN) == ["q", "k", "v", "a", "b"]
    assert names(GDNSpec(heads=2, dim=2, state=2, gate="log")) == ["q", "k", "v", "g", "b"]
    (gate,) = (f for f in KIMI.input_fields if f.name == "a")
    assert gate.dims == ("heads", "state")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("spec", [NEMOTRON, QWEN, KIMI], ids=["mamba2", "gdn", "kda"])
def test_what_is_computed_is_what_tensors_hold(spec, fmt):
    """One layer, one sequence, one page of eight rows: every byte of the formulas."""
    small = type(spec)(heads=4, dim=6, state=10)
    pool = StatePool(small, [0], 1, capacity=8, page_rows=8, format=fmt, dtype=BF16)
    assert pool.checkpoints.nbytes == small.checkpoint_bytes(pool.format)
    assert pool.inputs.nbytes == 8 * small.row_bytes(BF16, pool.format)
    assert pool.conv.nbytes == 4 * small.conv_channels * 2  # three taps and a window of one
