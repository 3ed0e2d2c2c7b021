"""Advice is its formulas, over every model that has a name."""

from __future__ import annotations

import math

import pytest
import torch

from replayinfer import UnsupportedError, read_config
from replayinfer.cost import (
    DecodeWeights,
    Device,
    StepCost,
    accepted_mean,
    decode_weights,
    get_device,
    raw_config,
)
from replayinfer.cost import advise as advise_of
from replayinfer.cost.advise import best_length
from replayinfer.spec.presets import PRESETS

KNOWN = [name for name in PRESETS if name != "qwen3.5-4b"]  # its feed-forward size is unknown


def advised(name, **options):
    preset = PRESETS[name]
    layers = preset.read()
    options = {"weights": decode_weights(raw_config(preset), layers)} | options
    device = get_device(options.pop("gpu", "h200"))
    return advise_of(
        layers, device, name=name,
        sequence_bytes=lambda fmt, length, window: 10**6 + 10 * length + window, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_row_is_its_formula(name):
    preset = PRESETS[name]
    layers, weights = preset.read(), decode_weights(raw_config(preset), preset.read())
    advice = advised(name, batches=[1, 64], contexts=[512, 9000], windows=[1, 4])
    assert len(advice.steps) == 8
    bandwidth = 4.5e6
    for step in advice.steps:
        cost = StepCost.of(layers.spec, advice.format, window=step.window)
        rate = 0.7 if step.window > 1 else 1.0
        tokens = step.batch * step.window
        read = max(2 * weights.read(tokens) / bandwidth, 2 * weights.active * tokens / 989e6)
        kv = step.batch * step.context * layers.kv_bytes_per_token(torch.bfloat16) / bandwidth
        standard = len(layers.ssm) * cost.standard_us(step.batch)
        replay = len(layers.ssm) * cost.steady_us(step.batch, advice.capacity, rate)
        assert step.weights_us == pytest.approx(read)
        assert step.kv_us == pytest.approx(kv)
        assert step.ssm_share == pytest.approx(standard / (standard + read + kv))
        assert step.step_gain == pytest.approx((standard + read + kv) / (replay + read + kv))
        assert step.tokens_per_s == pytest.approx(
            step.batch * accepted_mean(step.window, rate) / step.step_replay_us * 1e6
        )
        each = 10**6 + 10 * advice.capacity + 4
        each += step.context * layers.kv_bytes_per_token(torch.bfloat16)
        assert step.fits == max(0, math.floor((0.9 * 141e9 - 2 * weights.total) / each))
        assert step.pays == (standard >= 1.02 * replay)
        assert bool(step.note) == (not step.pays or step.fits < step.batch or step.step_gain < 1.02)


def test_it_says_where_replay_does_not_pay():
    advice = advised("kimi-linear", batches=[1, 256]).as_dict()
    assert [(row["batch"], row["pays"]) for row in advice["rows"]] == [(1, False), (256, True)]
    (refused,) = advice["does_not_pay"]
    assert refused["batch"] == 1
    assert "latency of a layer is 4.5 us against 2.7" in refused["why"]


def test_the_fastest_lossless_format_is_chosen():
    advice = advised("nemotron-3-super", batches=[256])
    assert advice.format == "fp32_split"
    assert {f.format for f in advice.formats if f.lossless} == {"fp32", "fp32_split"}
    chosen = advised("nemotron-3-super", batches=[256], format="bf16", capacity=16)
    assert (chosen.format, chosen.capacity) == ("bf16", 16)
    assert {f.capacity for f in chosen.formats} == {16}


@pytest.mark.parametrize("name", KNOWN)
def test_the_best_length_is_nearly_the_fastest(name):
    cost = StepCost.of(PRESETS[name].read().spec)
    best = best_length(cost, 256)
    times = {length: cost.steady_us(256, length) for length in (4, 8, 16, 32, 64, 128)}
    assert times[best] <= 1.05 * min(times.values())
    assert all(t > 1.05 * min(times.values()) for length, t in times.items() if length < best)


def test_ranks_share_weights():
    one, four = (advised("qwen3-next", batches=[64], tp=tp) for tp in (1, 4))
    assert four.steps[0].weights_us == pytest.approx(one.steps[0].weights_us / 4)
    assert four.weights_total == one.weights_total / 4


def test_bytes_of_weights_may_be_given():
    advice = advised("qwen3.5-27b", batches=[1, 64], weights=9e9)
    assert [s.weights_us for s in advice.steps] == pytest.approx([9e9 / 4.5e6] * 2)
    assert advice.as_dict()["weights"] is None
    assert any("as given" in line for line in advice.formula())


def test_a_large_dense_batch_is_bound_by_its_products():
    advice = advised("qwen3.5-27b", batches=[1, 512])
    weights = advice.weights
    assert isinstance(weights, DecodeWeights)
    small, large = advice.steps
    assert small.weights_us == pytest.approx(2 * weights.total / 4.5e6)
    assert large.weights_us == pytest.approx(2 * weights.total * 512 / 989e6)


def test_a_device_of_ones_own():
    mine = Device("mine", 10.0, 9.0, 10**12, 1000.0, measured=False)
    advice = advised("qwen3-next", gpu=mine, batches=[256])
    half = advised("qwen3-next", gpu="h200", batches=[256])
    assert advice.steps[0].kv_us == pytest.approx(half.steps[0].kv_us / 2)
    assert "not measured" in advice.as_dict()["basis"]


def test_the_formula_gives_the_figures():
    advice = advised("nemotron-3-super", batches=[256], contexts=[4096])
    step = advice.steps[0]
    text = "\n".join(advice.formula())
    assert f"= {step.ssm_standard_us / 40:.1f} us" in text
    assert f"= {step.ssm_replay_us / 40:.1f} us" in text
    assert f"= {step.kv_us:.0f} us" in text
    assert f"= {step.weights_us:.0f} us" in text
    assert text.endswith(f"= {step.fits}")


def test_a_model_without_a_recurrence_is_refused():
    layers = read_config({"model_type": "nemotron_h", "hybrid_override_pattern": "*-*"})
    with pytest.raises(UnsupportedError, match="at least one recurrent layer"):
        advise_of(layers, get_device("h200"), sequence_bytes=lambda *_: 1, weights=1e9)
